"""What scripts do with a parallel module: the numbers of one device, or an error that says why."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, update_bn

import autopar
from tests.dist import run_ranks

SPLIT = {"data": 2}
SLOW = pytest.mark.slow


@dataclass
class Found:
    loss: Tensor
    logits: Tensor


class Net(nn.Module):
    """Takes two inputs of one shape, so that only their names tell them apart."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Found:
        logits = self.head(self.body(x)) * y[:, :4].sin()
        return Found(logits.square().mean(), logits)


class StaysFrozen(Net):
    def train(self, mode: bool = True) -> StaysFrozen:
        super().train(mode)
        self.body[1:].eval()
        return self


def batch(rows: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return {
        name: torch.randn(rows, 8, dtype=torch.float64, generator=generator) for name in ("x", "y")
    }


def build(kind: type[Net], **kwargs: Any) -> tuple[autopar.ParallelModule, Net]:
    torch.manual_seed(0)
    model = kind().double()
    model.body[2].p = 0.0
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    single = copy.deepcopy(model)
    return autopar.parallelize(model, mesh, batch(), cache=False, **kwargs), single


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def apart(parallel: nn.Module, single: nn.Module) -> float:
    """The largest distance of gradients and buffers."""
    mine = {**dict(parallel.named_parameters()), **dict(parallel.named_buffers())}
    found = [torch.dist(whole(mine[n].grad), p.grad) for n, p in single.named_parameters()]
    found += [torch.dist(mine[n].double(), b.double()) for n, b in single.named_buffers()]
    return max(float(x) for x in found)


def alike(parallel: nn.Module, single: nn.Module, act: Callable[[Any], Any]) -> float:
    for module in (parallel, single):
        module.zero_grad()
        act(module)
    return apart(parallel, single)


def freeze(module: Any) -> None:
    module.body[1].eval() if isinstance(module, Net) else module.body._modules["1"].eval()
    module(**batch()).loss.backward()


def followed(rank: int) -> dict[str, float]:
    parallel, single = build(Net, constraints=SPLIT)
    found: dict[str, float] = {}

    def step(name: str, act: Callable[[Any], Any]) -> None:
        found[name] = alike(parallel, single, act)

    backwards = dict(reversed(batch().items()))
    part = {name: torch.full_like(p, 0.1) for name, p in single.head.state_dict().items()}
    step("inputs in another order", lambda m: m(**backwards).loss.backward())
    rows = batch()
    step("by position and keyword", lambda m: m(rows["x"], y=rows["y"]).loss.backward())
    step("a norm beside", lambda m: (m(**batch()).loss + m.head.weight.square().sum()).backward())
    step("a part loaded", lambda m: (m.head.load_state_dict(part), m(**batch()).loss.backward()))
    copies = copy.deepcopy(parallel), copy.deepcopy(single)
    assert all(p.grad is None for p in copies[0].parameters())  # as torch copies parameters
    found["a copy"] = alike(*copies, lambda m: m(**batch()).loss.backward())
    step("in shared memory", lambda m: m.share_memory()(**batch()).loss.backward())
    assert all(p.is_shared() for p in (*parallel.parameters(), *parallel.buffers()))
    step("a frozen part", freeze)
    for given in (batch(6), {}):
        with torch.inference_mode():
            rows = given or batch(4)  # made before that mode, or in it
            away = torch.dist(whole(parallel(**rows).logits), single(**rows).logits)
            found[f"inference of {len(rows['x'])} rows"] = float(away)
    step("training on rows seen in inference", lambda m: m(**batch(4)).loss.backward())
    step("all in training again", lambda m: m.train()(**batch()).loss.backward())
    return found


def followed_longer(rank: int) -> dict[str, float]:
    parallel, single = build(Net, constraints=SPLIT)
    found = {"a frozen part": alike(parallel, single, freeze)}
    act = lambda m: m(**batch(6)).loss.backward()  # noqa: E731
    found["with other rows"] = alike(parallel, single, act)
    for loader in (parallel.shard_dataloader([batch(), batch(7)]), [batch(), batch(7)]):
        module = single if isinstance(loader, list) else parallel
        module.zero_grad()
        for rows in loader:
            module(**rows).loss.backward()
    found["a short batch"] = apart(parallel, single)
    own, other = build(StaysFrozen, constraints=SPLIT)
    found["its own train"] = alike(own, other, lambda m: m.train()(**batch()).loss.backward())
    return found


class Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 4))


def followed_norms(rank: int) -> dict[str, float]:
    """Statistics of batch norms over all batches, as of averaged weights, or with a momentum."""
    torch.manual_seed(0)
    single, rows = Normed().double(), [batch(size)["x"] for size in (8, 6, 10)]
    mesh = init_device_mesh("cpu", (2,))
    given = {"constraints": SPLIT, "cache": False}
    parallel = autopar.parallelize(copy.deepcopy(single), mesh, (rows[0],), **given)
    found: dict[str, float] = {}

    def step(name: str, act: Callable[[Any], Any]) -> None:
        found[name] = alike(
            parallel, single, lambda m: (act(m), [m(x).square().mean().backward() for x in rows])
        )

    step("of all batches", lambda m: None)
    step("of all since", lambda m: m[1].reset_running_stats())
    step("with a momentum", lambda m: setattr(m[1], "momentum", 0.01))
    copies = AveragedModel(parallel), AveragedModel(single)
    for averaged in copies:
        update_bn(rows, averaged)
        assert averaged.module[1].momentum == 0.01
    names = "running_mean", "running_var", "num_batches_tracked"
    mine, other = (copied.module[1] for copied in copies)
    apart = [torch.dist(getattr(mine, n).double(), getattr(other, n).double()) for n in names]
    return {**found, "update_bn": float(max(apart))}


def averaged(rank: int) -> dict[str, float]:
    """Statistics of batch norms, of all batches (SWA) or with another momentum."""
    kinds = AveragedModel, Net
    single, rows = Net().double(), [batch(), batch(6), batch(10)]
    single.body[2].p, single.body[1].momentum = 0.0, None
    mesh = init_device_mesh("cpu", (2,))
    parallel = autopar.parallelize(
        copy.deepcopy(single), mesh, batch(), constraints=SPLIT, cache=False
    )
    found = {}
    for name in ("none", "reset", "update_bn", "less"):
        for module in (parallel, single):
            averaging = kinds[0](module)
            if name == "update_bn":
                update_bn(map(Rows, rows), averaging)
                module.load_state_dict(averaging.module.state_dict())
                continue
            if name == "reset":
                module.body[1].reset_running_stats()
            if name == "less":
                module.body[1].momentum = 0.01
            module.zero_grad()
            for given in rows:
                module(**given).loss.backward()
        found[name] = apart(parallel, single)
    return found


class Rows(dict[str, Tensor]):
    """A batch that `update_bn` passes on as the only input."""

    def to(self, *args: Any) -> Rows:
        return self


@pytest.mark.parametrize(
    "follow", [followed, followed_norms, pytest.param(followed_longer, marks=SLOW)]
)
def test_what_scripts_do_has_the_numbers_of_one_device(follow: Any) -> None:
    for found in run_ranks(follow, 2):
        assert {name: error for name, error in found.items() if not error < 1e-12} == {}


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.tail = nn.Sequential(nn.BatchNorm1d(8), nn.ReLU())
        self.heads = nn.ModuleDict({"a": nn.Linear(8, 4), "b": nn.Linear(8, 4)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (self.heads["a"](self.tail(x)) * self.heads["b"](x)).square().mean()


def picked(m: Any) -> list[Any]:
    """What scripts ask of parts; freezes, fills and stops some of them on the way."""
    for part in m.modules():
        if isinstance(part, nn.BatchNorm1d):
            part.eval()
    m.apply(lambda p: nn.init.eye_(p.weight) if "Linear" in p.__class__.__name__ else None)
    for layer in m.layers[:2]:
        layer.requires_grad_(False)
    decayed = [n for n, part in m.named_modules() if isinstance(part, nn.Linear | nn.Conv2d)]
    counted = len(m.layers), len(m.tail), len(m.heads), bool(m.layers[0]), bool(m)
    named = list(m.heads), list(m.heads.keys()), [n for n, _ in m.heads.items()]
    kinds = [p.__class__.__name__ for p in (*m.layers, *m.tail, *m.heads.values(), m.layers[-1])]
    return [decayed, counted, named, kinds]


def parts(rank: int) -> float:
    torch.manual_seed(0)
    single, x = Parts().double(), batch()["x"]
    mesh = init_device_mesh("cpu", (2,))
    given = {"constraints": SPLIT, "cache": False}
    parallel = autopar.parallelize(copy.deepcopy(single), mesh, (x,), **given)
    assert picked(parallel) == picked(single)
    for module in (parallel, single):
        module(x).backward()
    with pytest.raises(TypeError, match=r"layers\.0 of a parallel .*Linear, is not iterable"):
        list(parallel.layers[0])
    others = dict(parallel.named_parameters())
    pairs = [(others[n].grad, p.grad) for n, p in single.named_parameters()]
    assert all((a is None) == (b is None) for a, b in pairs)
    return max(float(torch.dist(whole(a), b)) for a, b in pairs if b is not None)


def test_parts_are_of_the_kinds_of_the_models_parts() -> None:
    assert max(run_ranks(parts, 2)) < 1e-12


def refused(rank: int) -> None:
    parallel, _ = build(Net)
    rows = batch()

    def says(words: str, act: Callable[[], Any]) -> None:
        with pytest.raises((autopar.AutoparError, AttributeError), match=words):
            act()

    says(r"reaches the output \.logits", lambda: parallel(**rows).logits.sum().backward())
    says("gradients of inputs", lambda: parallel(**{**rows, "x": rows["x"].requires_grad_()}))
    rows = batch()
    loss = parallel(**rows).loss
    weights = list(parallel.parameters())
    says("second deriv", lambda: torch.autograd.grad(loss, weights, create_graph=True))
    says("input 'x' of Net.forward.*by position and by", lambda: parallel(rows["x"], **rows))
    says("3 inputs .* names for 2", lambda: parallel(*rows.values(), rows["x"], y=rows["y"]))
    with torch.autocast("cpu", torch.bfloat16):
        says("computes in fp32: pass precision='bf16'", lambda: parallel(**rows))
        says("computes in fp32: pass precision='bf16'", lambda: parallel.train_step(**rows))
    named = dict(parallel.named_parameters())
    called = lambda p: torch.func.functional_call(parallel, p, (), rows).loss  # noqa: E731
    says("inside of a transform of torch.func", lambda: torch.func.grad(called)(named))
    says("DistributedDataParallel around a", lambda: DistributedDataParallel(parallel))
    parallel.eval()
    says(r"\.train\(\) first", lambda: parallel(**rows).loss.backward())
    says("pickled", lambda: pickle.dumps(parallel))
    says("float32 on cpu, but", parallel.float)
    says("part body", lambda: parallel.body(rows["x"]))
    says(
        "part head.* hook|hook on the part head", lambda: parallel.head.register_forward_hook(print)
    )
    says("'weight' of the part head", lambda: setattr(parallel.head, "weight", weights[0]))
    says("'head' of a parallel", lambda: setattr(parallel, "head", nn.Linear(8, 4)))
    says("'out_features' of Linear", lambda: parallel.head.out_features)
    says("leave assign=", lambda: parallel.load_state_dict(parallel.state_dict(), assign=True))


SHARPNESS = 1.0
ARGS = SimpleNamespace(slope=1.0)


def changed_settings(rank: int) -> None:
    class Scaled(Net):
        scale, mode = 2.0, "mean"

        def __init__(self) -> None:
            super().__init__()
            self.gain = 1.0

        def forward(self, x: Tensor, y: Tensor) -> Found:
            found = super().forward(x * self.gain * self.scale * SHARPNESS * ARGS.slope, y)
            return Found(found.loss, found.logits)

    parallel, _ = build(Scaled)
    plain = parallel._original
    parallel.gain = 1.0  # as it is
    parallel.note = "a name that the model does not have"
    parallel.note = "another"
    for name, value in (("gain", 0.5), ("scale", 1.0), ("gain", 0.1)):
        with pytest.raises(autopar.AutoparError, match=f"{name!r} of a parallel.*register_buffer"):
            setattr(parallel, name, value)
    global SHARPNESS
    plain.gain, SHARPNESS, ARGS.slope = 0.5, 3.0, 2.0
    with pytest.warns(autopar.FrozenValueWarning) as warned:
        parallel(**batch())
    texts = sorted(str(w.message) for w in warned)
    assert len(texts) == 3 and "ARGS.slope, which" in texts[1]
    assert "gain, which the forward can read, is 0.5 now" in texts[0]
    assert "SHARPNESS, which the forward can read, is 3.0 now, and was 1.0" in texts[2]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallel(**batch())  # said once
    weight = parallel.head.weight
    before = weight.full_tensor().clone()
    with torch.no_grad():
        parallel.head.weight += 1
        parallel.head.weight *= 2
    assert parallel.head.weight is weight
    assert torch.equal(weight.full_tensor(), (before + 1) * 2)


def predicted(rank: int) -> None:
    mesh = init_device_mesh("cpu", (1,))
    torch.manual_seed(0)
    model, x, target = nn.Linear(8, 4), torch.randn(6, 8), torch.randint(0, 4, (6,))
    weighted = nn.CrossEntropyLoss(weight=torch.arange(4.0))
    given = {"loss_fn": weighted, "cache": False}
    parallel = autopar.parallelize(model, mesh, (x, target), **given)
    assert torch.allclose(parallel.train_step(x, target), weighted(model(x), target))
    parallel.eval()
    assert torch.allclose(parallel(x), model(x))  # without a target, what the model returns
    named = {"input": x, "target": target}
    parallel = autopar.parallelize(model.eval(), mesh, named, **given)
    assert torch.allclose(parallel(**named), weighted(model(x), target))
    assert torch.allclose(parallel(input=x), model(x))
    learned = nn.Bilinear(4, 4, 1)
    with pytest.raises(autopar.TraceError, match="loss_fn has parameters of its own, weight"):
        autopar.parallelize(model, mesh, (x, target), loss_fn=learned)
    drop = autopar.parallelize(nn.Dropout(0.5), mesh, x, cache=False)
    with torch.no_grad():
        assert not torch.equal(drop(x), drop(x))


def cast_twice(rank: int) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)), torch.randn(8, 8)
    mesh = init_device_mesh("cpu", (2,))
    given = {"constraints": SPLIT, "cache": False, "precision": "bf16"}
    parallel = autopar.parallelize(model, mesh, (x,), **given)
    found = []
    for enabled in (False, True):
        parallel.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = parallel(x)
            out.float().square().mean().backward()
        found.append([out, *(whole(p.grad) for p in parallel.parameters())])
    assert found[0][0].dtype is torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_autocast_around_a_step_of_its_precision_changes_nothing() -> None:
    run_ranks(cast_twice, 2)


def shared(rank: int) -> None:
    mesh, body, x = init_device_mesh("cpu", (1,)), nn.Linear(8, 8), torch.randn(4, 8)
    first, second = nn.Sequential(body, nn.Tanh()), nn.Sequential(body, nn.Linear(8, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            autopar.parallelize(first, mesh, (x,), cache=False)
    with pytest.warns(UserWarning, match="0.weight and 1 more of Sequential belong to Seq.* too"):
        autopar.parallelize(second, mesh, (x,), cache=False)


def test_parameters_of_two_parallel_modules_are_warned_of() -> None:
    run_ranks(shared, 1)


def test_what_scripts_may_not_do_says_so() -> None:
    run_ranks(refused, 1)


def test_settings_that_a_script_changes_are_refused_or_named() -> None:
    run_ranks(changed_settings, 1)


def test_losses_with_weights_and_predictions_without_targets() -> None:
    run_ranks(predicted, 1)
