"""Stages of pipelines that are planned for the memory limit by placements alone."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

from autopar.core.constraints import Constraints, PipelinePin
from autopar.core.graph import TracedModel
from autopar.core.plan import Plan
from autopar.cost_model import Cluster
from autopar.errors import InfeasiblePlanError
from autopar.search.pipeline_shapes import Shapes
from autopar.search.pipelining import _Search
from autopar.search.stage_planning import StagePlanner
from autopar.search.step_limits import StepLimits
from autopar.solver.fit import UNLIMITED
from autopar.solver.offers import Offers
from autopar.solver.pipelines.pipeline_shape import PipelineShape
from autopar.tracer.trace import trace
from tests.test_mixed_bound import Deep

SHAPE = PipelineShape(size=2, microbatches=4, schedule="automatic")
ONE_BY_ONE = PipelineShape(size=2, microbatches=4, schedule="1f1b")


@lru_cache(maxsize=1)
def traced() -> TracedModel:
    with torch.device("meta"):
        model = Deep(2048, 8).to(torch.bfloat16).train()
        return trace(model, {"x": torch.empty(8192, 2048, dtype=torch.bfloat16)}, fold=True)


def cluster() -> Cluster:
    return Cluster.from_profile("h100-sxm", nodes=2, devices_per_node=4, mesh_shape=(2, 4))


def planner(limit: int, **pins: Any) -> StagePlanner:
    devices, constraints = cluster(), Constraints.parse(pins)
    return StagePlanner(traced(), devices, constraints, limit, "adamw", Offers(devices))


@lru_cache(maxsize=1)
def free() -> Plan:
    return planner(UNLIMITED).plan(SHAPE, free=True)


def peaks(plan: Plan) -> tuple[int, ...]:
    assert plan.pipeline is not None
    return plan.pipeline.peaks


def kinds(plan: Plan) -> set[tuple[str, str]]:
    assert plan.pipeline is not None
    return {(str(stage.checkpoint), stage.offload) for stage in plan.pipeline.stages}


@pytest.mark.parametrize("share", [0.7, 0.8])
def test_stages_hold_less_by_placements_and_are_suited_within_the_limit(share: float) -> None:
    limit = int(share * max(peaks(free())))
    given = planner(limit)
    plan = given.plan(SHAPE, as_is=True)
    suited = given.suited(plan)
    for found in (plan, suited):
        assert max(peaks(found)) <= limit
        assert kinds(found) == {("none", "none")}
    assert suited.predicted.step_time_s < 0.98 * plan.predicted.step_time_s


def test_what_placements_cannot_hold_is_not_recomputed_as_it_is() -> None:
    limit = int(0.35 * max(peaks(free())))
    with pytest.raises(InfeasiblePlanError):
        planner(limit).plan(SHAPE, as_is=True)
    assert kinds(planner(limit).plan(SHAPE)) != {("none", "none")}


def test_a_pinned_place_of_the_optimizer_is_kept() -> None:
    limit = int(0.7 * max(peaks(free())))
    plan = planner(limit, offload="optimizer").plan(SHAPE, as_is=True)
    assert kinds(plan) == {("none", "optimizer")}


def test_a_shape_that_is_too_large_is_planned_for_the_limit() -> None:
    limit = int(0.7 * max(peaks(free())))
    search = _Search(StepLimits(traced(), cluster(), Constraints()), limit)
    shapes = Shapes(search.planner, PipelinePin(), short=True)
    while not shapes.is_close(ONE_BY_ONE):
        shapes.closer(ONE_BY_ONE)
    found = search.cuts.fitting(ONE_BY_ONE, shapes, float("inf"))
    assert found is not None
    assert max(peaks(found)) <= limit
    assert kinds(found) == {("none", "none")}
    assert ONE_BY_ONE not in search.cuts.tried, "no other cuts"
