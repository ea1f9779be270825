"""Bounds of pipelines under a memory limit against the plans that are found within it."""

from __future__ import annotations

import itertools
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
from autopar.solver.pipelines.held_runs import HeldRuns, Priced
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


def held(planner: StagePlanner, shape: PipelineShape) -> dict[str, list[HeldRuns]]:
    return {name: [runs] for name, runs in planner.within(shape).items()}


@pytest.mark.parametrize("host_bandwidth", [0.0, 5e8, 5e10])
def test_no_plan_within_the_limit_is_below_the_bound(host_bandwidth: float) -> None:
    step, devices = traced(), cluster(host_bandwidth)
    states = 16 * sum(p.numel() for p in Deep().parameters())
    places = places_of(devices, Constraints(), "adamw")
    assert len(places) == (2 if host_bandwidth else 1)
    raised = 0
    limit = int(0.35 * states)
    for size, turns, schedule, starts in (
        (1, 2, "1f1b", None), (2, 2, "1f1b", None), (2, 2, "interleaved", [1, 2, 3]),
    ):  # fmt: skip
        planner = StagePlanner(step, devices, Constraints(), limit, "adamw", Offers(devices))
        chunks = 1 if starts is None else 2
        shape = PipelineShape(size=size, microbatches=turns, schedule=schedule, chunks=chunks)
        turn, within = planner.turn(shape), held(planner, shape)
        free_s = least_seconds(shape, turn, 0.0, planner.work.joint, starts)
        known = replace(turn, within=within)
        bound_s = least_seconds(shape, known, 0.0, planner.work.joint, starts)
        assert bound_s >= free_s
        given = {"size": size, "microbatches": turns, "schedule": schedule, "chunks": chunks}
        pin = {"pipeline": given}
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
    within = replace(turn, within=held(planner, shape))
    assert least_seconds(shape, within, 0.0, planner.work.joint) > 100 * free_s


def test_a_limit_that_nothing_reaches_tells_nothing() -> None:
    devices = cluster(5e10)
    planner = StagePlanner(traced(), devices, Constraints(), 1 << 40, "adamw", Offers(devices))
    shape = PipelineShape(size=2, microbatches=2, schedule="1f1b")
    assert not planner.within(shape)


def test_an_optimizer_that_only_the_host_has_memory_for_bounds_without_a_price() -> None:
    """Its transfers take longer than all else, in one run a rank and in two."""
    step, devices = traced(), cluster(5e8)
    limit = int(0.2 * 16 * sum(p.numel() for p in Deep().parameters()))
    planner = StagePlanner(step, devices, Constraints(), limit, "adamw", Offers(devices))
    for schedule, chunks, starts in (("1f1b", 1, None), ("interleaved", 2, [1, 2, 3])):
        shape = PipelineShape(size=2, microbatches=2, schedule=schedule, chunks=chunks)
        turn = planner.turn(shape)
        free_s = least_seconds(shape, turn, 0.0, planner.work.joint, starts)
        within = replace(turn, within=held(planner, shape))
        assert least_seconds(shape, within, 0.0, planner.work.joint, starts) > 2 * free_s


def test_runs_of_a_rank_share_its_limit_and_may_have_the_optimizer_in_unlike_places() -> None:
    rng = np.random.default_rng(0)
    prices = []
    for limit_s in (0.0, 3.0, 9.0):
        prices.append(Priced((rng.random(8) * limit_s + 1.0, rng.random(8) + 2.0), limit_s))
    runs = HeldRuns(tuple(prices))
    firsts, ends = [0, 2, 3, 6], [2, 3, 6, 8]
    for rank, (a, b) in enumerate(((0, 2), (1, 3))):
        each = [
            min(
                priced.places[i][firsts[a] : ends[a]].sum()
                + priced.places[j][firsts[b] : ends[b]].sum()
                for i, j in itertools.product(range(2), repeat=2)
            )
            - priced.limit_s
            for priced in prices
        ]
        assert runs.together(firsts, ends, 2)[rank] == pytest.approx(max(each))
    for i, j in itertools.combinations(range(9), 2):
        least = [max(p.places[k][i:j].sum() - p.limit_s for p in prices) for k in range(2)]
        assert runs.alone[i, j] == pytest.approx(min(least))
        one_known = HeldRuns((prices[0], prices[1]._replace(places=(None, prices[1].places[1]))))
        assert one_known.alone[i, j] <= HeldRuns((prices[0], prices[1])).alone[i, j]
        assert one_known.alone[i, j] >= HeldRuns((prices[0],)).alone[i, j]
    assert one_known.together(firsts, ends, 2) == pytest.approx(
        HeldRuns((prices[0],)).together(firsts, ends, 2)
    )
