"""Bounds of pipelines under a memory limit against the plans that are found within it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autopar.core.constraints import Constraints
from autopar.core.graph import TracedModel
from autopar.cost_model import Cluster
from autopar.errors import InfeasiblePlanError
from autopar.search.pipelining import plan_step
from autopar.search.stage_planning import StagePlanner
from autopar.solver.known import places_of
from autopar.solver.offers import Offers
from autopar.solver.pipelines.pipeline_shape import PipelineShape, least_seconds
from autopar.tracer.trace import trace

WIDTH, ROUNDING = 256, 1 + 1e-6


class Deep(nn.Module):
    """Blocks whose states are most of what a step holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def traced() -> TracedModel:
    return trace(Deep().train(), {"x": torch.randn(16, WIDTH)})


def cluster(host_bandwidth: float) -> Cluster:
    given = Cluster.from_profile("h100-sxm", devices_per_node=4)
    link = {"host_bandwidth": host_bandwidth, "host_memory_bandwidth": 2 * host_bandwidth}
    return replace(given, device=replace(given.device, **link))


@pytest.mark.parametrize("host_bandwidth", [0.0, 5e10])
def test_no_plan_within_the_limit_is_below_the_bound(host_bandwidth: float) -> None:
    step, devices = traced(), cluster(host_bandwidth)
    states = 16 * sum(p.numel() for p in Deep().parameters())
    places = places_of(devices, Constraints(), "adamw")
    assert len(places) == (2 if host_bandwidth else 1)
    raised = 0
    limit = int(0.35 * states)
    for size, turns in ((1, 2), (2, 2)):
        planner = StagePlanner(step, devices, Constraints(), limit, "adamw", Offers(devices))
        shape = PipelineShape(size=size, microbatches=turns, schedule="1f1b")
        turn, within = planner.turn(shape), planner.within(shape)
        free_s = least_seconds(shape, turn, 0.0, planner.work.joint)
        bound_s = least_seconds(shape, replace(turn, within=within), 0.0, planner.work.joint)
        assert bound_s >= free_s
        pin = {"pipeline": {"size": size, "microbatches": turns, "schedule": "1f1b"}}
        try:
            plan = plan_step(step, devices, constraints=Constraints.parse(pin), memory_limit=limit)
        except InfeasiblePlanError:
            continue
        assert bound_s <= plan.predicted.step_time_s * ROUNDING
        raised += bound_s > 1.02 * free_s
    assert raised or host_bandwidth  # where states may leave the device for next to nothing


def test_what_cannot_be_held_is_bounded_beyond_any_use() -> None:
    devices = cluster(0.0)
    step = traced()
    states = 16 * sum(p.numel() for p in Deep().parameters())
    limit = states // 8  # each rank has a fourth of them at least
    planner = StagePlanner(step, devices, Constraints(), limit, "adamw", Offers(devices))
    shape = PipelineShape(size=2, microbatches=2, schedule="1f1b")
    turn = planner.turn(shape)
    free_s = least_seconds(shape, turn, 0.0, planner.work.joint)
    within = replace(turn, within=planner.within(shape))
    assert least_seconds(shape, within, 0.0, planner.work.joint) > 100 * free_s


def test_a_limit_that_nothing_reaches_tells_nothing() -> None:
    devices = cluster(5e10)
    planner = StagePlanner(traced(), devices, Constraints(), 1 << 40, "adamw", Offers(devices))
    shape = PipelineShape(size=2, microbatches=2, schedule="1f1b")
    turn = planner.turn(shape)
    for name, runs in planner.within(shape).items():
        assert np.all(np.isneginf(runs) | (runs <= turn.runs(name)))
