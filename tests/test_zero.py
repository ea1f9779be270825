"""ZeRO stages on the data axis: the same gradients, and the gathers that each stage stands for."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch

import autopar
from autopar.core.placement import shard_factor
from autopar.core.plan import Plan
from autopar.cost_model import Cluster
from autopar.errors import ConstraintError
from autopar.solver.read_step import build_step
from autopar.tracer.trace import trace
from tests import zoo
from tests.test_matrix import BOUND

RANKS = 4
CLUSTER = Cluster.from_profile("cpu-gloo", devices_per_node=RANKS)


@cache
def planned(name: str, stage: int) -> tuple[torch.nn.Module, dict[str, torch.Tensor], Plan]:
    """A plan with all ranks on the data axis, and what it is for."""
    torch.manual_seed(0)
    model, inputs = zoo.MODELS[name]()
    model = copy.deepcopy(model).double()
    pins = {"data": RANKS, "zero": stage, "checkpoint": "none"}
    return model, inputs, autopar.plan(model, CLUSTER, inputs, constraints=pins)


def moved(plan: Plan, kind: str) -> int:
    return sum(c.num_bytes for c in plan.predicted.comm_bytes if c.kind == kind)


def sharded_bytes(model: torch.nn.Module, plan: Plan) -> int:
    return sum(
        p.numel() * p.itemsize
        for name, p in model.named_parameters()
        if shard_factor(plan.parameters[name], plan.mesh_shape) > 1
    )


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("gpt2", 1),
        ("gpt2", 3),
        *(
            pytest.param(n, s, marks=pytest.mark.slow)
            for n, s in [("gpt2", 0), ("gpt2", 2), ("t5", 2)]
        ),
    ],
)
def test_every_stage_has_the_gradients_of_one_device(name: str, stage: int) -> None:
    model, inputs, plan = planned(name, stage)
    assert autopar.verify(plan, model, inputs).worst[1] <= BOUND[name]
    assert (sharded_bytes(model, plan) > 0) == (stage > 0)


def test_stage_2_gathers_once_and_stage_3_at_each_use() -> None:
    model, inputs, once = planned("gpt2", 2)
    _, _, each = planned("gpt2", 3)
    step = build_step(trace(model, inputs))
    copies = {copy_: step.parameters[node].target for copy_, node in step.copies.items()}
    blocks = {n for n, p in model.named_parameters() if ".h." in n and p.dim() > 1}
    assert blocks <= set(copies.values())
    assert sharded_bytes(model, once) == sharded_bytes(model, each)
    for copy_, name in copies.items():
        assert once.nodes[copy_].outputs[0][0].is_replicate, name
        assert each.nodes[copy_].outputs[0][0].is_shard, name
    assert moved(once, "all_gather") < moved(each, "all_gather")


def test_stages_trade_memory_for_time() -> None:
    plans = [planned("gpt2", stage)[2] for stage in (0, 2, 3)]
    peaks = [p.predicted.peak_memory_bytes for p in plans]
    assert peaks == sorted(peaks, reverse=True)
    states = [p.predicted.memory.get("optimizer", 0) for p in plans]
    assert states[1] * RANKS == states[0] == states[2] * RANKS
    assert plans[1].predicted.step_time_s < plans[2].predicted.step_time_s


def test_the_stage_is_in_the_mode_names() -> None:
    for stage, name in ((2, "ZeRO-2"), (3, "ZeRO-3")):
        modes = planned("gpt2", stage)[2].modes
        assert name in modes["transformer.h.0.mlp.c_fc.weight"]
    assert not any("ZeRO" in mode for mode in planned("gpt2", 0)[2].modes.values())


def test_a_stage_that_does_not_exist() -> None:
    with pytest.raises(ConstraintError, match="the stages are 0, 1, 2 and 3"):
        planned("gpt2", 4)


@pytest.mark.parametrize(
    "pins", [{"data": 1}, {"tensor": {"mode": "1d", "size": 1}, "sequence": "megatron"}]
)
def test_a_mode_on_one_device_pins_nothing(pins: dict[str, Any]) -> None:
    model, inputs = zoo.gpt2()
    alone = Cluster.from_profile("cpu-gloo", devices_per_node=1)
    plan = autopar.plan(model, alone, inputs, constraints=pins)
    assert plan.predicted.comm_bytes == ()
    rest = autopar.plan(model, CLUSTER, inputs, constraints={"data": 1})
    assert rest.mesh_shape == (1, RANKS)
