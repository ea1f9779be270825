"""Hand-written modules on virtual ranks: outputs, every gradient and buffer, in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.verification import _compared
from tests import handwritten as hw

BUILDERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]]]] = {
    "unet": (hw.UNet, hw.images),
    "lstm": (hw.Sequence, functools.partial(hw.tokens, length=4)),
    "recommender": (hw.Recommender, hw.clicks),
    "custom function": (hw.Clamped, hw.vectors),
    "weight used twice": (hw.SharedWeight, hw.tokens),
    "unused": (hw.Unused, hw.vectors),
    "frozen": (hw.Frozen, hw.vectors),
    "side outputs": (hw.SideOutputs, hw.vectors),
    "dropout": (hw.Dropped, hw.vectors),
}
PLANS: dict[str, tuple[tuple[int, ...], Any]] = {
    "data": ((2,), {"data": 2}),
    "zero": ((4,), {"data": 4, "zero": 3}),
    "data and tensor": ((2, 2), {"data": 2, "tensor": {"mode": "1d", "size": 2}}),
    "2d": ((2, 2), {"tensor": {"mode": "2d", "size": 4}}),
}


def build(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A module of float64 and its inputs."""
    torch.manual_seed(0)
    make, inputs = BUILDERS[name]
    double = {k: v.double() if v.is_floating_point() else v for k, v in inputs().items()}
    return make().double(), double


def plan_for(
    model: nn.Module, inputs: Any, mesh: tuple[int, ...], constraints: Any, **options: Any
) -> autopar.Plan:
    size = 1
    for n in mesh:
        size *= n
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=size, mesh_shape=mesh)
    return autopar.plan(model, cluster, inputs, constraints=constraints, **options)


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("how", ["zero", "data and tensor"])
def test_equals_the_single_device_module(name: str, how: str) -> None:
    model, inputs = build(name)
    mesh, constraints = PLANS[how]
    plan = plan_for(model, inputs, mesh, constraints)
    result = autopar.verify(plan, model, inputs)
    assert result.worst[1] < 1e-9, result.worst
    trainable = {n for n, p in model.named_parameters() if p.requires_grad}
    idle = {"idle", "spare.weight", "spare.bias"} if name == "unused" else set()
    assert set(result.gradients) == trainable - idle
    assert len(result.outputs) == (4 if name == "side outputs" else 1) - (name == "side outputs")


def test_batch_norm_buffers_are_compared() -> None:
    model, inputs = build("unet")
    plan = plan_for(model, inputs, *PLANS["data"])
    result = autopar.verify(plan, model, inputs)
    changed = {n for n, _ in model.named_buffers()}
    assert set(result.buffers) == changed
    assert result.worst[1] < 1e-9, result.worst


def test_submodule_in_evaluation_mode_stays_so() -> None:
    model, inputs = build("frozen")
    plan = plan_for(model, inputs, *PLANS["data"])
    result = autopar.verify(plan, model, inputs)
    assert not result.buffers  # batch norm in eval mode updates nothing
    assert result.worst[1] < 1e-9, result.worst
    assert not model.norm.training


def test_dropout_draws_the_same_masks_under_every_plan() -> None:
    from autopar.tracer.trace import trace

    model, inputs = build("dropout")
    traced = trace(model, inputs)
    seen = []
    for mesh, constraints in PLANS.values():
        plan = plan_for(model, inputs, mesh, constraints)
        for seed in (0, 1):
            result = autopar.verify(plan, model, inputs, seed=seed, traced=traced)
            assert result.worst[1] < 1e-9, result.worst
            seen.append(plan.mesh_shape)
    assert len(set(seen)) > 2


def test_verify_notices_a_wrong_number(monkeypatch: pytest.MonkeyPatch) -> None:
    from autopar.runtime import lockstep

    model, inputs = build("custom function")
    plan = plan_for(model, inputs, *PLANS["data"])
    right = lockstep._run_group

    def slightly_wrong(target: Any, args: Any) -> list[Tensor]:
        return [x * (1 + 1e-6) if x.is_floating_point() else x for x in right(target, args)]

    monkeypatch.setattr(lockstep, "_run_group", slightly_wrong)
    assert autopar.verify(plan, model, inputs).worst[1] > 1e-7


@pytest.mark.parametrize(
    ("dtype", "left", "bound"), [(torch.float32, 3e-10, 1e-5), (torch.float64, 1e-16, 1e-9)]
)
def test_what_rounding_leaves_of_zero_is_no_error(
    dtype: torch.dtype, left: float, bound: float
) -> None:
    one = torch.ones(4, dtype=dtype)
    expected = {("gradient", "one"): one, ("gradient", "none"): one * left}
    found = _compared({("gradient", "one"): one, ("gradient", "none"): -one * left}, expected)
    assert found.gradients["none"] < bound
    assert _compared({**expected, ("gradient", "none"): one * 1e-4}, expected).worst[1] > 0.9
    # one that the single device does not have counts as zeros there
    assert _compared({**expected, ("gradient", "more"): one}, expected).worst[1] > 0.9
