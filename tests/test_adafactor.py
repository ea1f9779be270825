"""Adafactor and Muon of torch on sharded parameters: what they sum over shards is whole."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Adafactor
from torch.overrides import TorchFunctionMode

import autopar
from autopar.runtime.offload import is_offloaded
from autopar.runtime.summed import Summed
from autopar.verification import relative_error
from tests import handwritten as hw
from tests.dist import run_ranks
from tests.test_gloo import whole
from tests.test_training_matrix import BOUND, HOST, RANKS, STEPS, InFloat64, build

TWO = {"size": 2, "microbatches": 2}
PLANS: dict[str, dict[str, Any]] = {
    "zero1": {"data": 4, "zero": 1},
    "zero3": {"data": 4, "zero": 3},
    "tp": {"tensor": {"mode": "1d", "size": 4}},
    "2d": {"tensor": {"mode": "2d", "size": 4}},
    "dp2-tp2": {"data": 2, "tensor": {"mode": "1d", "size": 2}, "zero": 3},
    "pp2-dp2": {"pipeline": TWO, "data": 2, "zero": 3},
    "pp2-tp2": {"pipeline": TWO, "tensor": "1d"},
    "pp4-interleaved": {"pipeline": {"size": 4, "microbatches": 4, "chunks": 2}},
    "offload-dp2-tp2": {"data": 2, "tensor": {"mode": "1d", "size": 2}, "zero": 3, **HOST},
    "offload-pp2-dp2": {"pipeline": TWO, "data": 2, "zero": 1, **HOST},
}
_QUICK = (("gpt2", "pp2-tp2"),)
_FLAGS = ((False, False), (True, True))  # foreach, maximize


def adafactor(parameters: Any, foreach: bool, maximize: bool) -> Adafactor:
    """For training in float64.

    A gradient that is 0 but for rounding, of a key's bias, is not to be made a whole step by the
    first eps.
    """
    flags = {"foreach": foreach, "maximize": maximize, "weight_decay": 0.1}
    return Adafactor(parameters, lr=1e-2, eps=(1e-8, 1e-3), **flags)


def errors_of_training(rank: int, name: str, plan: str) -> dict[str, float]:
    """Relative errors of parameters and states that this rank holds, by flags and name."""
    (single, batch), (model, _) = build(name, plan), build(name, plan)
    initial = {k: v.detach().clone() for k, v in single.state_dict().items()}
    pins, mesh = PLANS[plan], init_device_mesh("cpu", (RANKS,))
    with InFloat64():
        module = autopar.parallelize(model, mesh, batch, constraints=pins, optimizer="adafactor")
    assert all(is_offloaded(p) == ("offload" in pins) for p in module.parameters())
    expected, errors = dict(single.named_parameters()), {}
    for flags in _FLAGS:
        module.load_state_dict(initial)
        single.load_state_dict(initial)
        ours, theirs = adafactor(module.parameters(), *flags), adafactor(expected.values(), *flags)
        for _ in range(STEPS):
            with InFloat64():
                single(**batch).loss.backward()
            module.train_step(**batch)
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        for n, p in module.named_parameters():
            errors[f"{flags} {n}"] = relative_error(whole(p.detach()), expected[n].detach())
            for key, value in ours.state.get(p, {}).items():
                if key != "step":
                    assert type(value) is DTensor
                    reference = theirs.state[expected[n]][key]
                    errors[f"{flags} {n} {key}"] = relative_error(whole(value), reference, 1e-20)
    return errors


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        pytest.param(name, plan, marks=[] if (name, plan) in _QUICK else [pytest.mark.slow])
        for name in ("gpt2", "llama", "vit", "mixtral")
        for plan in PLANS
    ],
)
def test_three_steps_are_those_of_one_device(name: str, plan: str) -> None:
    ranks = run_ranks(errors_of_training, RANKS, name, plan, timeout=400.0)
    checked = {key for errors in ranks for key in errors}
    names = [n for n, p in build(name, plan)[0].named_parameters() if p.requires_grad]
    assert {f"{flags} {n}" for n in names for flags in _FLAGS} <= checked
    key, error = max((e for errors in ranks for e in errors.items()), key=lambda e: e[1])
    assert error <= BOUND, f"{key}: {error:.3g}"


class Lamb(torch.optim.Optimizer):
    """A user's own: each parameter moves by a part of its norm."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for group in self.param_groups:
            for p in group["params"]:
                ratio = p.norm().item() / max(p.grad.norm().item(), 1e-12)
                p.add_(p.grad, alpha=-0.1 * ratio)


class Unrounded(TorchFunctionMode):
    """What Muon would compute in bfloat16 is in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (Tensor.double if func is Tensor.bfloat16 else func)(*args, **(kwargs or {}))


def muon(parameters: Any) -> torch.optim.Muon:
    return torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=1e-2)


class Own(Adafactor):
    """A user's own, of torch's: hooks are run around both steps."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def in_float64() -> dict[str, Tensor]:
    return {k: v.double() if v.is_floating_point() else v for k, v in hw.vectors().items()}


def odd_steps(rank: int) -> None:
    """Closures, gradients placed otherwise, an optimizer of a user's own, a step that fails."""
    torch.manual_seed(0)
    single, batch = hw.Mlp().double(), in_float64()
    model, mesh = copy.deepcopy(single), init_device_mesh("cpu", (4,))
    pins = {"data": 2, "tensor": {"mode": "1d", "size": 2}, "zero": 3}
    made = autopar.parallelize(model, mesh, batch, constraints=pins)
    assert any(type(x).__name__ == "_StridedShard" for p in made.parameters() for x in p.placements)

    def equal() -> None:
        for n, p in single.named_parameters():
            mine = made.get_parameter(n).detach().full_tensor()
            assert relative_error(mine, p.detach()) <= BOUND, n
        for p in made.parameters():
            values = (p, p.grad, *ours.state[p].values())
            assert not any(isinstance(value, Summed) for value in values)

    for make in (partial(Lamb, defaults={}), muon, partial(Own, eps=(1e-8, 1e-3))):
        ours, theirs = make(made.parameters()), make(single.parameters())
        for module, optimizer in ((made, ours), (single, theirs)):
            module(**batch).backward()
            with Unrounded():
                optimizer.step()
        equal()
    for module, optimizer in ((made, ours), (single, theirs)):

        def closure(module: Any = module, optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad()
            loss = module(**batch)
            loss.backward()
            return loss

        optimizer.step(closure)
        optimizer.step(closure=closure)
    equal()
    for p in made.parameters():
        p.grad = p.grad.redistribute(placements=[Replicate()] * 2)
    for optimizer in (ours, theirs):
        optimizer.step()
    equal()
    last, first = list(made.parameters())[-1], next(made.parameters())
    kept, ours.state[last]["variance"] = ours.state[last]["variance"], "not a tensor"
    with pytest.raises(AttributeError, match="lerp_"):
        ours.step()
    ours.state[last]["variance"] = kept
    norm = torch.randn(3, dtype=torch.float64).norm()  # no mode is left behind
    assert type(norm) is torch.Tensor and ours.param_groups[0]["params"][0] is first
    made.load_state_dict(single.state_dict())
    for p, q in zip(made.parameters(), single.parameters(), strict=True):
        ours.state[p].clear(), theirs.state[q].clear()
    for optimizer in (ours, theirs):
        optimizer.step()
    equal()


def test_what_is_not_elementwise_reads_whole_sums() -> None:
    run_ranks(odd_steps, 4)
