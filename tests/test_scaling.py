"""Loss scaling, accumulation, clipping and odd parameters on real gloo ranks."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar.runtime.gradients import clip_gradients
from autopar.tracer.precision import call_in
from tests import handwritten as hw
from tests import zoo
from tests.dist import run_ranks
from tests.test_gloo import whole

MIXED = {"data": 2, "tensor": {"mode": "1d", "size": 2}, "zero": 3}


class Bare(nn.Module):
    """One parameter, for scalers without a mesh."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))


def one_step(scaler: autopar.LossScaler, optimizer: torch.optim.Optimizer, value: float) -> None:
    """Backward of a loss whose gradient is `value`, then the scaler's step and update."""
    (weight,) = optimizer.param_groups[0]["params"]
    weight.grad = None
    scaler.scale((weight * value).sum()).backward()
    scaler.step(optimizer)
    scaler.update()


def test_the_scale_follows_every_setting() -> None:
    model = Bare()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = autopar.LossScaler(
        initial_scale=8, min_scale=1, max_scale=16, growth_factor=4, backoff_factor=0.25,
        growth_interval=2, hysteresis=2,
    )  # fmt: skip
    seen = []
    for value in (math.inf, 1, math.inf, math.inf, 1, 1, 1, 1, 1, math.nan, math.inf):
        one_step(scaler, optimizer, value)
        seen.append(scaler.get_scale())
    #               hysteresis   at min_scale   x4       x4, at max_scale   hysteresis anew
    assert seen == [8, 8, 2, 1, 1, 4, 4, 16, 16, 16, 4]
    assert torch.equal(model.weight, torch.full((3,), 1.0 - 6))  # six steps of 1, unscaled
    other = autopar.LossScaler()
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict() and other.get_scale() == 4


def test_misuse_of_a_scaler_is_refused() -> None:
    for settings, match in (
        ({"initial_scale": 0.5}, "min_scale <= initial_scale"),
        ({"growth_factor": 1.0}, "growth_factor > 1"),
        ({"hysteresis": 0}, "count steps"),
    ):
        with pytest.raises(autopar.AutoparError, match=match):
            autopar.LossScaler(**settings)
    scaler = autopar.LossScaler()
    optimizer = torch.optim.SGD(Bare().parameters(), lr=1.0)
    with pytest.raises(autopar.AutoparError, match="without a step"):
        scaler.update()
    scaler.unscale_(optimizer)
    with pytest.raises(autopar.AutoparError, match="unscaled already"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(autopar.AutoparError, match="twice"):
        scaler.step(optimizer)
    with pytest.raises(autopar.AutoparError, match="no growth_tracker"):
        scaler.load_state_dict({"scale": 1.0, "overflows": 0})


def parallel_mlp(world: int, constraints: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (world,))
    return autopar.parallelize(hw.Mlp(), mesh, hw.vectors(), constraints=constraints, **options)


def overflow(rank: int) -> tuple[list[float], list[bool], list[Tensor]]:
    """Scales, and which steps changed the parameters; two ranks poison a gradient each."""
    parallel = parallel_mlp(4, MIXED, precision="fp16")
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    scaler = autopar.LossScaler(parallel, initial_scale=2.0**10, growth_interval=2, hysteresis=2)
    plain = parallel_mlp(4, MIXED, precision="fp16")
    scales, changed, weights = [], [], []
    for step in range(6):
        before = [p.to_local().clone() for p in parallel.parameters()]
        loss = parallel.train_step(**hw.vectors())
        if step == 0:
            assert torch.equal(loss, plain.train_step(**hw.vectors()))
            for mine, other in zip(parallel.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(
                    mine.grad.to_local() / 2**10, other.grad.to_local(), rtol=1e-3, atol=1e-5
                )
        if step in (1, 2) and rank == 2 * step - 1:
            # the last parameter: a rank that asks only the holders of the first would not know
            list(parallel.parameters())[-1].grad.to_local()[0] = math.inf if step == 1 else math.nan
        scaler.unscale_(optimizer)
        parallel.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        after = [p.to_local() for p in parallel.parameters()]
        changed.append(any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)))
    weights = [whole(p).detach().clone() for p in parallel.parameters()]
    return scales, changed, weights


def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    results = run_ranks(overflow, 4)
    for scales, changed, weights in results:
        assert scales == [1024, 1024, 512, 512, 1024, 1024]
        assert changed == [True, False, False, True, True, True]
        assert all(torch.isfinite(w).all() for w in weights)
        assert all(torch.equal(a, b) for a, b in zip(weights, results[0][2], strict=True))


def overflow_by_torch(rank: int, constraints: Any, fused: bool) -> tuple[Any, ...]:
    """Scales and which steps changed what this rank holds, where one rank's gradient overflows."""
    parallel = parallel_mlp(4, constraints)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    scales, changed = [], []
    for poisoned in (None, 3, 0, None):
        before = [p.to_local().clone() for p in parallel.parameters()]
        scaler.scale(parallel(**hw.vectors())).backward()
        if rank == poisoned:
            list(parallel.parameters())[-1].grad.to_local()[-1] = math.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        after = [p.to_local() for p in parallel.parameters()]
        changed.append(any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)))
    return scales, changed


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("constraints", [MIXED, {"pipeline": 2, "data": 2}])
def test_torchs_scaler_skips_a_step_on_all_ranks_too(constraints: Any, fused: bool) -> None:
    for scales, changed in run_ranks(overflow_by_torch, 4, constraints, fused):
        assert scales == [1024, 512, 256, 256]
        assert changed == [True, False, False, True]


def small_gradients(rank: int) -> None:
    """Gradients too small for fp16, unless a step in microbatches is scaled from its start."""
    torch.manual_seed(0)
    model, inputs = zoo.gpt2(layers=2)
    parallel = autopar.parallelize(
        model.train(),
        init_device_mesh("cpu", (2,)),
        inputs,
        constraints={"pipeline": {"size": 2, "microbatches": 2}},
        precision="fp16",
    )

    def gradients(scaler: Any) -> list[torch.Tensor]:
        parallel.zero_grad()
        loss = parallel(**inputs).loss
        (loss if scaler is None else scaler.scale(loss)).backward()
        return [p.grad.to_local().clone() for p in parallel.parameters()]

    ours = autopar.LossScaler(parallel, initial_scale=2.0**13)
    expected = gradients(ours)
    parallel.loss_scaler = None
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)
    gradients(scaler)  # which tells the module that there is a scaler
    for found, wanted in zip(gradients(scaler), expected, strict=True):
        assert torch.equal(found, wanted)
    gradients(None)  # of a step that is scaled for the last time
    assert parallel.torch_scaler is None
    unscaled = gradients(None)
    assert sum(int((g != 0).sum()) for g in unscaled) < sum(int((e != 0).sum()) for e in expected)


def test_torchs_scaler_scales_microbatches_from_their_start() -> None:
    run_ranks(small_gradients, 2)


def accumulated(rank: int, constraints: Any) -> None:
    parallel = parallel_mlp(4, constraints)
    batches = [hw.vectors(), {k: v[:4] for k, v in hw.vectors(16).items()}, hw.vectors(24)]
    singles = []
    for batch in batches:
        parallel.zero_grad()
        parallel.train_step(**batch)
        singles.append([p.grad.to_local().clone() for p in parallel.parameters()])
    parallel.zero_grad()
    for batch in batches:
        parallel.train_step(**batch)
    for parameter, parts in zip(parallel.parameters(), zip(*singles, strict=True), strict=True):
        assert parameter.grad.placements == parameter.placements
        assert torch.equal(parameter.grad.to_local(), (parts[0] + parts[1]) + parts[2])


@pytest.mark.parametrize("constraints", [MIXED, {"data": 4, "zero": 0}], ids=["mixed", "data"])
def test_accumulation_is_the_sum_to_the_last_bit(constraints: Any) -> None:
    run_ranks(accumulated, 4, constraints)


def clipped(rank: int, name: str, constraints: Any) -> set[str]:
    """Our norms, torch's, and those of the whole gradients; the placements that were met."""
    torch.manual_seed(0)
    model, inputs = zoo.gpt2(layers=1) if name == "gpt2" else (hw.Mlp(), hw.vectors())
    mesh = init_device_mesh("cpu", (4,))
    parallel = autopar.parallelize(model.train(), mesh, inputs, constraints=constraints)
    parallel.train_step(**inputs)
    frozen = next(iter(parallel.parameters()))
    frozen.grad = None  # a parameter without a gradient
    grads = {n: p.grad for n, p in parallel.named_parameters() if p.grad is not None}
    full = {n: whole(g).clone() for n, g in grads.items()}
    kinds = {str(x) for p in parallel.parameters() for x in p.placements}
    vector = torch.cat([g.flatten() for g in full.values()]).double()
    for order in (2.0, 1.0, 3.0, math.inf):
        expected = torch.linalg.vector_norm(vector, order).float()
        norm = parallel.clip_grad_norm_(1e9, order)  # clips nothing
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    total = torch.linalg.vector_norm(vector).float()
    of_torch = torch.nn.utils.get_total_norm(
        [p.grad for p in parallel.parameters() if p.grad is not None]
    )
    torch.testing.assert_close(whole(of_torch), total, rtol=1e-6, atol=0)
    limit = float(total) / 3
    parallel.clip_grad_norm_(limit)
    for n, p in parallel.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(whole(p.grad), full[n] * (limit / (total + 1e-6)))
    if rank == 3:
        list(parallel.parameters())[-1].grad.to_local()[0] = math.nan
    with pytest.raises(autopar.AutoparError, match="norm of order 2"):
        parallel.clip_grad_norm_(1.0, error_if_nonfinite=True)
    assert isinstance(frozen, DTensor)
    return kinds


@pytest.mark.parametrize(
    ("name", "constraints"),
    [
        ("gpt2", MIXED),
        ("gpt2", {"tensor": {"mode": "2d", "size": 4}}),
        ("mlp", {"data": 2, "tensor": {"mode": "1d", "size": 2}, "zero": 0}),
    ],
    ids=["strided", "2d", "copies"],
)
def test_the_global_norm_is_that_of_one_device(name: str, constraints: Any) -> None:
    kinds = set().union(*run_ranks(clipped, 4, name, constraints))
    assert any("S" in kind for kind in kinds)
    if name == "gpt2" and constraints is MIXED:
        assert any(kind.startswith("_S") for kind in kinds), kinds


@pytest.mark.parametrize("order", [2.0, math.inf])
def test_one_parameter_alone_is_clipped_as_torch_does(order: float) -> None:
    ours, torchs = (nn.Parameter(torch.zeros(3, 2, dtype=torch.float64)) for _ in range(2))
    for p in (ours, torchs):
        p.grad = torch.arange(6, dtype=torch.float64).view(3, 2)
    found = clip_gradients(ours, 1.0, order)
    expected = nn.utils.clip_grad_norm_(torchs, 1.0, order)
    assert found.dtype is torch.float64
    assert float(found) == pytest.approx(float(expected), rel=1e-14)
    torch.testing.assert_close(ours.grad, torchs.grad, rtol=1e-14, atol=0)


class Branches(nn.Module):
    """A used block, a frozen one, and one that no gradient reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(16, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.unused = nn.Linear(16, 16)
        self.head = nn.Linear(16, 8)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = self.frozen(torch.relu(self.used(x)))
        return nn.functional.cross_entropy(self.head(hidden), labels)


def in_groups(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups = [
        {"params": decayed, "weight_decay": 0.1},
        {"params": rest, "lr": 1e-2, "betas": (0.5, 0.9)},
    ]
    return torch.optim.AdamW(groups, lr=5e-2)


def odd_training(rank: int, precision: str) -> None:
    torch.manual_seed(0)
    model, reference = Branches(), Branches()
    reference.load_state_dict(model.state_dict())
    mesh = init_device_mesh("cpu", (4,))
    batch = hw.vectors()
    parallel = autopar.parallelize(
        model, mesh, batch, constraints={"data": 2, "tensor": {"mode": "1d", "size": 2}, "zero": 3},
        precision=precision,
    )  # fmt: skip
    mine, single = in_groups(parallel), in_groups(reference)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (mine, single)]
    scaler = autopar.LossScaler(parallel, enabled=precision == "fp16", initial_scale=2.0**12)
    before = parallel.unused.weight.to_local().clone()
    for _ in range(3):
        for _ in range(2):
            parallel.train_step(**batch)
            reference(**batch).backward()
        scaler.unscale_(mine)
        mine_norm = parallel.clip_grad_norm_(0.5)
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        bound = 1e-5 if precision == "fp32" else 1e-2
        torch.testing.assert_close(mine_norm, norm, rtol=bound, atol=0)
        scaler.step(mine)
        scaler.update()
        single.step()
        for optimizer, schedule in zip((mine, single), schedules, strict=True):
            optimizer.zero_grad()
            schedule.step()
    assert parallel.unused.weight.grad is None
    assert torch.equal(parallel.unused.weight.to_local(), before)
    for name, value in reference.named_parameters():
        here = parallel.get_parameter(name)
        assert here.requires_grad == value.requires_grad
        if precision == "fp32":
            torch.testing.assert_close(whole(here), value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_unused_frozen_and_grouped_parameters(precision: str) -> None:
    run_ranks(odd_training, 4, precision)


def scaled_losses(rank: int, world: int) -> list[tuple[float, float]]:
    """Loss and scale of fp16 steps; a scale of 2^22 overflows until it has backed off."""
    torch.manual_seed(0)
    model, inputs = zoo.gpt2(layers=1)
    mesh = init_device_mesh("cpu", (world,))
    # sums of gradients in fp16 overflow where those of one device do; in fp32 they need not
    parallel = autopar.parallelize(
        model.train(),
        mesh,
        inputs,
        constraints=MIXED if world > 1 else None,
        precision="fp16",
        reduce_dtype="fp16",
    )
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=5e-3)
    scaler = autopar.LossScaler(parallel, initial_scale=2.0**22, growth_interval=3, hysteresis=1)
    found = []
    for _ in range(12):
        loss = parallel.train_step(**inputs).item()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append((loss, scaler.get_scale()))
    return found


def with_torchs_scaler() -> list[tuple[float, float]]:
    """The same on one device, eagerly, with `torch.amp.GradScaler`."""
    torch.manual_seed(0)
    model, inputs = zoo.gpt2(layers=1)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=5e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=3)
    found = []
    for _ in range(12):
        loss = call_in(torch.float16, model, (), inputs).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append((loss.item(), scaler.get_scale()))
    return found


def test_fp16_training_is_that_of_one_device_with_torchs_scaler() -> None:
    expected = with_torchs_scaler()
    scales = [scale for _, scale in expected]
    assert min(scales) < scales[0] and any(a < b for a, b in itertools.pairwise(scales))
    assert expected[-1][0] < 0.9 * expected[0][0]
    unit = torch.finfo(torch.float16).eps
    for found in run_ranks(scaled_losses, 4, 4):
        assert [scale for _, scale in found] == scales
        assert [loss for loss, _ in found] == pytest.approx([x for x, _ in expected], rel=4 * unit)
