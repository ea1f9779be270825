"""Pipelines are cut so that their ranks fit: those that hold more microbatches get fewer blocks."""

from __future__ import annotations

import itertools
import math
from functools import lru_cache
from typing import Any

import pytest
import torch

from autopar.core.constraints import Constraints, PipelinePin
from autopar.core.flights import ALONE
from autopar.core.graph import TracedModel
from autopar.core.plan import Plan
from autopar.cost_model import Cluster
from autopar.errors import InfeasiblePlanError
from autopar.search.pipeline_shapes import Shapes
from autopar.search.pipeline_stages import Stopped
from autopar.search.pipelining import _Search, plan_step
from autopar.search.stage_planning import StagePlanner
from autopar.search.step_limits import StepLimits
from autopar.solver.fit import UNLIMITED
from autopar.solver.pipelines.pipeline_shape import PipelineShape
from autopar.tracer.trace import trace
from tests.test_folding import llama

LAYERS = 8
NAMES = [f"model.layers.{i}" for i in range(LAYERS)]
TWO: dict[str, Any] = {"size": 2, "microbatches": 4, "schedule": "1f1b"}


@lru_cache(maxsize=1)
def traced() -> TracedModel:
    """Mostly activations: many tokens, and few parameters."""
    ids = 1 + torch.arange(512).reshape(4, 128) % 95
    return trace(llama(LAYERS), {"input_ids": ids, "labels": ids}, training=True, fold=True)


def planned(limit: int | None = None, checkpoint: str | None = None, **pipeline: Any) -> Plan:
    pins: dict[str, Any] = {"pipeline": {**TWO, **pipeline}}
    if checkpoint is not None:
        pins["checkpoint"] = checkpoint
    cluster = Cluster.from_profile("cpu-gloo", devices_per_node=2)
    return plan_step(traced(), cluster, constraints=Constraints.parse(pins), memory_limit=limit)


def blocks_of(plan: Plan) -> list[int]:
    """Blocks of each rank."""
    assert plan.pipeline is not None
    starts = [0, *(NAMES.index(cut) for cut in plan.pipeline.cuts), LAYERS]
    return [end - start for start, end in itertools.pairwise(starts)]


def peaks(plan: Plan) -> tuple[int, ...]:
    assert plan.pipeline is not None
    return plan.pipeline.peaks


def seconds_of_cuts(limit: int, checkpoint: str) -> dict[int, float]:
    """Seconds of the plans that fit, by the first block of the second rank."""
    found = {}
    for start in range(1, LAYERS):
        try:
            plan = planned(limit, checkpoint, cuts=[NAMES[start]])
        except InfeasiblePlanError:
            continue
        found[start] = plan.predicted.step_time_s
    return found


def test_the_best_cut_that_fits_is_found() -> None:
    free = planned(checkpoint="none")
    limit = int(0.9 * max(peaks(free)))
    best = seconds_of_cuts(limit, "none")
    assert free.pipeline is not None
    assert NAMES.index(free.pipeline.cuts[0]) not in best, "the limit binds"
    plan = planned(limit, "none")
    assert max(peaks(plan)) <= limit
    assert blocks_of(plan)[0] < blocks_of(plan)[1]
    assert plan.predicted.step_time_s <= min(best.values()) * 1.001


def test_a_shape_that_is_too_large_waits_for_its_turn_with_other_cuts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unasked, such a shape is expected to take as long as with the cuts that fit."""
    expected: list[float] = []
    expect = Shapes.expect

    def noted(self: Shapes, shape: PipelineShape, seconds: float) -> None:
        expected.append(seconds)
        expect(self, shape, seconds)

    monkeypatch.setattr(Shapes, "expect", noted)
    shape = PipelineShape(size=2, microbatches=4, schedule="1f1b")
    cluster = Cluster.from_profile("cpu-gloo", devices_per_node=2)
    limit = int(0.9 * max(peaks(planned(checkpoint="none"))))
    search = _Search(StepLimits(traced(), cluster, Constraints()), limit)
    shapes = Shapes(search.planner, PipelinePin(), short=True)
    while not shapes.is_close(shape):
        shapes.closer(shape)
    before = shapes.known[shape].expected_s
    assert search.cuts.fitting(shape, shapes, math.inf) is None
    assert shapes.is_open(shape)
    (seconds,) = expected
    assert shapes.known[shape].expected_s == max(before, seconds) > 0
    found = search.cuts.fitting(shape, shapes, math.inf)
    assert found is not None and found.pipeline is not None
    assert [found.pipeline.cuts] == search.cuts.tried[shape]
    assert max(peaks(found)) <= limit
    assert blocks_of(found)[0] < blocks_of(found)[1]


def test_stages_are_planned_for_their_own_seconds_where_others_do_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster.from_profile("cpu-gloo", devices_per_node=2)
    search = _Search(StepLimits(traced(), cluster, Constraints()), UNLIMITED)
    shapes = Shapes(search.planner, PipelinePin(), short=True)
    shape = PipelineShape(size=2, microbatches=4, schedule="1f1b")
    tried: list[tuple[str, bool]] = []
    plan = StagePlanner.plan

    def full(
        self: StagePlanner, shape: PipelineShape, *, alone: bool = False, **given: Any
    ) -> Plan:
        tried.append((shape.schedule, alone))
        if not alone:
            raise Stopped(kinds={"parameters": 1}, cuts=("model.layers.1",))
        return plan(self, shape, alone=alone, **given)

    monkeypatch.setattr(StagePlanner, "plan", full)
    found = search.cuts.fitting(shape, shapes, math.inf)
    assert tried == [("automatic", False), ("1f1b", False), ("automatic", True)]
    assert found is not None and found.pipeline is not None
    assert {stage.solver.waits for stage in found.pipeline.stages} == {ALONE}
    for stage in found.pipeline.stages:
        assert stage.solver.objective == pytest.approx(stage.predicted.step_time_s)


# --- where recomputation is needed ---------------------------------------------------------------
DEEP = [f"model.layers.{i}" for i in range(24)]
FOUR: dict[str, Any] = {"size": 4, "microbatches": 8, "schedule": "1f1b"}


def deep(limit: int | None, **pins: Any) -> Plan:
    """24 blocks on four ranks."""
    cluster = Cluster.from_profile("cpu-gloo", devices_per_node=4)
    wanted = Constraints.parse({"pipeline": FOUR, **pins})
    return plan_step(traced_deep(), cluster, constraints=wanted, memory_limit=limit)


@lru_cache(maxsize=1)
def traced_deep() -> TracedModel:
    ids = 1 + torch.arange(1024).reshape(8, 128) % 95
    return trace(llama(24), {"input_ids": ids, "labels": ids}, training=True, fold=True)


def evenly() -> dict[str, Any]:
    """Pins of the cuts of time alone."""
    return {"pipeline": {**FOUR, "cuts": DEEP[6::6]}}


@pytest.mark.slow
def test_less_is_recomputed_where_blocks_go_elsewhere() -> None:
    free, full = deep(None), deep(None, checkpoint="full")
    assert free.pipeline is not None
    assert free.pipeline.cuts == tuple(DEEP[6::6])
    limit = int(0.7 * max(peaks(full)) + 0.3 * max(peaks(free)))
    plan = deep(limit)
    assert plan.pipeline is not None
    assert max(peaks(plan)) <= limit
    assert DEEP.index(plan.pipeline.cuts[0]) < 6
    assert plan.predicted.step_time_s < 0.99 * deep(limit, **evenly()).predicted.step_time_s


@pytest.mark.slow
def test_what_does_not_fit_even_recomputed_goes_elsewhere() -> None:
    limit = int(0.98 * max(peaks(deep(None, checkpoint="full"))))
    with pytest.raises(InfeasiblePlanError, match="stage 0") as error:
        deep(limit, **evenly())
    assert error.value.stage == 0
    plan = deep(limit)
    assert plan.pipeline is not None
    assert max(peaks(plan)) <= limit
    assert DEEP.index(plan.pipeline.cuts[0]) < 6
