"""`autopar.AdamW` against torch's AdamW behind clipping and unscaling on one device, in float64."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import autopar
from autopar.cost_model import optimizer_name, optimizer_state_bytes
from autopar.kernels.registry import KERNELS
from autopar.runtime import local_step
from autopar.runtime.offload import is_offloaded
from tests import handwritten as hw
from tests.dist import run_ranks
from tests.test_gloo import whole

PLANS: dict[str, dict[str, Any]] = {
    "hybrid": {"data": 2, "tensor": {"mode": "1d", "size": 2}, "zero": 1},
    "offload": {"data": 4, "zero": 3, "offload": "optimizer"},
    "pipeline": {"pipeline": {"size": 2, "microbatches": 2}, "data": 2, "zero": 1},
}
BOUND = {"rtol": 1e-9, "atol": 1e-12}


def batch() -> dict[str, Tensor]:
    return {k: v.double() if v.is_floating_point() else v for k, v in hw.vectors().items()}


def parameters(seed: int = 0) -> list[nn.Parameter]:
    """A matrix and its transpose's memory, a vector, a number, and two that no gradient reaches."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((7, 5), (5, 3), (33,), (), (4,), (6,))
    found = [nn.Parameter(torch.randn(s, generator=generator).double()) for s in shapes]
    found[1] = nn.Parameter(found[1].detach().t())
    found[-1].requires_grad_(False)
    return found


def groups(params: list[nn.Parameter], **options: Any) -> list[dict[str, Any]]:
    return [
        {"params": params[:2], "lr": 3e-2, "weight_decay": 0.1, **options},
        {"params": params[2:], "betas": (0.8, 0.95), "eps": 1e-6},
    ]


def give_gradients(params: list[nn.Parameter], seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params[:-2]:
        p.grad = torch.randn(p.shape, generator=generator).double() * scale


def same(ours: optim.Optimizer, theirs: optim.Optimizer) -> None:
    pairs = zip(ours.param_groups, theirs.param_groups, strict=True)
    for mine, other in (
        (a, b) for g, h in pairs for a, b in zip(g["params"], h["params"], strict=True)
    ):
        torch.testing.assert_close(mine, other, **BOUND)
        assert ours.state.get(mine, {}).keys() == theirs.state.get(other, {}).keys()
        for key, value in theirs.state.get(other, {}).items():
            torch.testing.assert_close(ours.state[mine][key], value, **BOUND)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_clips_too(copied: Callable[[Any], Any]) -> None:
    """Torch's optimizers pickle groups and states alone."""
    params = parameters()
    first = autopar.AdamW(params, lr=1e-2, max_norm=0.1)
    give_gradients(params, 1)
    both = copied((first, params))
    for optimizer, owned in ((first, params), both):
        give_gradients(owned, 2)
        optimizer.step()
    assert both[0].norm == first.norm
    for a, b in zip(params, both[1], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("max_norm", [None, 0.5, 1e9])
@pytest.mark.parametrize("scaling", ["none", "folded", "unscaled before"])
def test_three_steps_as_torch(max_norm: float | None, scaling: str) -> None:
    """Groups with one norm, a schedule, maximisation, and gradients that stay as they are."""
    mine, other = parameters(), parameters()
    ours = autopar.AdamW(groups(mine, maximize=True), lr=1e-2, max_norm=max_norm)
    theirs = optim.AdamW(groups(other, maximize=True), lr=1e-2)
    schedules = [optim.lr_scheduler.ExponentialLR(o, 0.7) for o in (ours, theirs)]
    scaler = autopar.LossScaler(initial_scale=1024.0, enabled=scaling != "none")
    for step in range(3):
        give_gradients(mine, step, scaler.get_scale())
        give_gradients(other, step)
        given = [p.grad.clone() for p in mine[:-2] if p.grad is not None]
        if scaling == "unscaled before":
            scaler.unscale_(ours)
            given = [g / 1024.0 for g in given]
        scaler.step(ours)
        scaler.update() if scaler.enabled else None
        assert all(torch.equal(p.grad, g) for p, g in zip(mine, given, strict=False))
        norm = torch.nn.utils.clip_grad_norm_(other, max_norm or math.inf)
        theirs.step()
        for schedule in schedules:
            schedule.step()
        same(ours, theirs)
        assert (ours.norm is None) == (max_norm is None)
        if ours.norm is not None:
            torch.testing.assert_close(ours.norm, norm, **BOUND)


def test_an_overflow_changes_nothing() -> None:
    mine = parameters()
    ours = autopar.AdamW(groups(mine), lr=1e-2, max_norm=1.0)
    scaler = autopar.LossScaler(initial_scale=8.0, hysteresis=1)
    for step, bad in enumerate((0.0, math.inf, math.nan, 0.0)):
        give_gradients(mine, step, 8.0)
        mine[2].grad[3] += bad  # type: ignore[index]
        before = copy.deepcopy((ours.state_dict()["state"], mine))
        scaler.step(ours)
        with pytest.raises(autopar.AutoparError, match="twice"):
            scaler.step(ours)
        scaler.update()
        unchanged = all(map(torch.equal, before[1], mine)) and all(
            torch.equal(value, ours.state_dict()["state"][i][key])
            for i, states in before[0].items()
            for key, value in states.items()
        )
        assert unchanged is bool(bad)
    assert scaler.get_scale() == 2.0
    assert {float(s["step"]) for s in ours.state.values()} == {2.0}


def test_torchs_own_scaler_folds_too() -> None:
    mine, other = parameters()[:1], parameters()[:1]
    ours, theirs = autopar.AdamW(mine, lr=1e-2), optim.AdamW(other, lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for value in (3.0, math.inf, 2.0):
        mine[0].grad = None
        scaler.scale((mine[0] * value).sum()).backward()
        scaler.step(ours)
        scaler.update()
        if math.isfinite(value):
            other[0].grad = torch.full_like(other[0], value)
            theirs.step()
        same(ours, theirs)


@pytest.mark.parametrize("ours_first", [True, False])
def test_states_go_both_ways(ours_first: bool) -> None:
    kinds = [autopar.AdamW, optim.AdamW]
    first, second = kinds if ours_first else kinds[::-1]
    mine, other = parameters(), parameters()
    reference = optim.AdamW(groups(other), lr=1e-2)
    optimizer: optim.Optimizer = first(groups(mine), lr=1e-2)
    for step in range(4):
        if step == 2:
            saved = copy.deepcopy(optimizer.state_dict())
            assert {k for s in saved["state"].values() for k in s} == {
                "step", "exp_avg", "exp_avg_sq",
            }  # fmt: skip
            optimizer = second(groups(mine), lr=5.0)
            optimizer.load_state_dict(saved)
        for params, each in ((mine, optimizer), (other, reference)):
            give_gradients(params, step)
            each.step()
        same(optimizer, reference)


def test_what_is_not_offered_is_refused() -> None:
    for option in ("amsgrad", "capturable", "differentiable"):
        with pytest.raises(autopar.AutoparError, match=rf"no {option}.*torch\.optim\.AdamW"):
            autopar.AdamW(parameters(), **{option: True})
    with pytest.raises(autopar.AutoparError, match="max_norm is 0"):
        autopar.AdamW(parameters(), max_norm=0.0)
    params = parameters()
    ours = autopar.AdamW(params)
    ours.load_state_dict(optim.AdamW(params, amsgrad=True).state_dict())
    with pytest.raises(autopar.AutoparError, match="no amsgrad"):
        ours.step()
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(autopar.AutoparError, match="sparse"):
        autopar.AdamW(table.parameters()).step()


def test_the_kernel_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    calls: list[int] = []

    def kernel(*args: Any) -> None:
        calls.append(args[0].numel())
        (KERNELS["adamw_"].triton if KERNELS["adamw_"].takes(*args) else KERNELS["adamw_"].aten)(
            *args
        )

    monkeypatch.setattr(torch.ops.autopar_kernels, "adamw_", kernel)
    mine, other = parameters(), parameters()
    ours, theirs = autopar.AdamW(groups(mine), max_norm=0.5), optim.AdamW(groups(other))
    for step in range(2):
        for params in (mine, other):
            give_gradients(params, step)
        ours.step()
        torch.nn.utils.clip_grad_norm_(other, 0.5)
        theirs.step()
    same(ours, theirs)
    assert calls == [35, 15, 33, 1] * 2


def test_priced_as_torchs() -> None:
    assert optimizer_name(autopar.AdamW) == "adamw"
    assert optimizer_state_bytes(autopar.AdamW, 8) == optimizer_state_bytes("adamw", 8)


def on_ranks(rank: int) -> None:
    local_step._BUCKET_BYTES = 256  # so that an offloaded group has several
    for plan in PLANS:
        three_steps(rank, plan)
    on_dtensors()


def three_steps(rank: int, plan: str) -> None:
    """Clipped and scaled, with an overflow on one rank between them."""
    torch.manual_seed(0)
    single = hw.Mlp().double()
    mesh = init_device_mesh("cpu", (4,))
    parallel = autopar.parallelize(
        copy.deepcopy(single), mesh, batch(), constraints=PLANS[plan], optimizer=autopar.AdamW
    )
    mine = dict(parallel.named_parameters())
    ours = autopar.AdamW(mine.values(), lr=1e-2, max_norm=0.05)
    theirs = optim.AdamW(single.parameters(), lr=1e-2)
    scaler = autopar.LossScaler(parallel, initial_scale=256.0)
    assert all(is_offloaded(p) for p in mine.values()) is (plan == "offload")
    assert (len(mine) < len(list(single.parameters()))) is (plan == "pipeline")
    for step in range(3):
        parallel.train_step(**batch())
        if step == 1:  # is skipped on all ranks
            poisoned = next(iter(mine.values())).grad.to_local()  # type: ignore[union-attr]
            if rank == 1:
                poisoned.view(-1)[0] = math.inf
            before = [whole(p).detach().clone() for p in mine.values()]
            scaler.step(ours)
            scaler.update()
            assert all(map(torch.equal, before, (whole(p) for p in mine.values())))
            ours.zero_grad()
            parallel.train_step(**batch())
        scaler.step(ours)
        scaler.update()
        ours.zero_grad()
        theirs.zero_grad()
        loss = single(**batch())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(single.parameters(), 0.05)
        assert norm > 0.05
        theirs.step()
        torch.testing.assert_close(ours.norm, norm, **BOUND)
        for name, expected in single.named_parameters():
            if name in mine:
                torch.testing.assert_close(whole(mine[name]).detach(), expected.detach(), **BOUND)
        states = [ours.state[p] for p in mine.values()]
        assert {float(s["step"]) for s in states} == {step + 1.0}
        assert all(isinstance(s["exp_avg"], DTensor) for s in states)


def on_dtensors() -> None:
    """Closures and gradients that are placed otherwise: the step on DTensors."""
    torch.manual_seed(0)
    single = hw.Mlp().double()
    mesh = init_device_mesh("cpu", (4,))
    pins = {"data": 4, "zero": 3}
    parallel = autopar.parallelize(copy.deepcopy(single), mesh, batch(), constraints=pins)
    ours = autopar.AdamW(parallel.parameters(), lr=1e-2, max_norm=0.05)
    theirs = optim.AdamW(single.parameters(), lr=1e-2)

    def closure(module: Any, optimizer: Any) -> Any:
        optimizer.zero_grad()
        loss = module(**batch())
        loss.backward()
        if optimizer is theirs:
            torch.nn.utils.clip_grad_norm_(single.parameters(), 0.05)
        return loss

    for module, optimizer in ((single, theirs), (parallel, ours)):
        optimizer.step(lambda m=module, o=optimizer: closure(m, o))
        closure(module, optimizer)
    for p in parallel.parameters():
        assert isinstance(p.grad, DTensor)
        p.grad = p.grad.redistribute(placements=[Replicate()])
    for optimizer in (theirs, ours):
        optimizer.step()
    for name, expected in single.named_parameters():
        found = whole(parallel.get_parameter(name))
        torch.testing.assert_close(found.detach(), expected.detach(), **BOUND)


def test_on_ranks() -> None:
    run_ranks(on_ranks, 4)
