"""Where a step in one piece does not fit: what comes first, pipelines or it within the limit."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autopar.core.constraints import Constraints, PipelinePin
from autopar.core.plan import Plan
from autopar.search import pipelining
from autopar.search.fitting_cuts import FittingCuts
from autopar.search.one_piece import OnePiece
from autopar.search.pipeline_shapes import Shapes
from autopar.search.pipelining import _Search
from autopar.search.plan_seconds import GAIN, counted_s
from autopar.search.step_limits import StepLimits
from autopar.solver.fit import UNLIMITED
from autopar.solver.overlap import NotBelow
from tests.test_limited_stages import cluster, traced
from tests.test_limited_stages import free as free_pipeline


@pytest.mark.parametrize(("unseen_s", "left_s"), [(-0.1, 1.1), (0.02, 0.98), (0.4, 0.97)])
def test_of_what_no_search_counts_a_pipeline_is_thought_to_have_a_little(
    unseen_s: float, left_s: float
) -> None:
    """A plan in one piece that copies for a tenth of its step is no faster for that."""
    plan = free_pipeline()
    predicted = replace(plan.predicted, step_time_s=1.0, unseen_compute_s=unseen_s)
    assert counted_s(replace(plan, predicted=predicted)) == pytest.approx(left_s)
    assert counted_s(None) == math.inf


@pytest.mark.parametrize(("share", "soon"), [(0.9, False), (0.97, True), (1.2, True)])
def test_nothing_is_searched_within_the_limit_where_a_pipeline_is_faster_than_without_one(
    share: float, soon: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = StepLimits(traced(), cluster(), Constraints())
    free = known.free(UNLIMITED)
    free_s = free.solver.objective
    pipeline = free_pipeline()
    predicted = replace(pipeline.predicted, step_time_s=share * free_s, unseen_compute_s=0.0)
    pipeline = replace(pipeline, predicted=predicted)
    limits: list[float] = []
    asked: list[int] = []

    def climb(search: _Search, shapes: object, limit_s: float) -> Plan | None:
        limits.append(limit_s)
        return pipeline if share * free_s < limit_s else None

    def glance(whole: OnePiece, limit: int) -> None:
        asked.append(limit)

    monkeypatch.setattr(_Search, "_climb", climb)
    monkeypatch.setattr(_Search, "_alone_s", lambda search, enough_s: 0.0)
    monkeypatch.setattr(_Search, "_reported", lambda search, plan, *rest: plan)
    monkeypatch.setattr(_Search, "_against_limited", lambda search, found, shapes: found)
    monkeypatch.setattr(OnePiece, "soon", glance)
    found = _Search(known, free.predicted.peak_memory_bytes - 1).unasked()
    assert found is pipeline
    assert limits == [free_s, math.inf][: 1 + soon]
    assert len(asked) == soon


def test_a_pipeline_that_was_too_slow_for_one_look_counts_in_the_next() -> None:
    """Its shape is not planned again."""
    search = _Search(StepLimits(traced(), cluster(), Constraints()), UNLIMITED)
    shapes = Shapes(search.planner, PipelinePin(), short=True)
    for shape in list(shapes.known):
        shapes.settle(shape, "planned")
    search.pipeline = free_pipeline()
    took_s = counted_s(search.pipeline)
    assert search._climb(shapes, 0.9 * took_s) is None
    assert search._climb(shapes, 1.1 * took_s) is free_pipeline()


def test_a_pipeline_that_is_too_slow_is_suited_only_for_a_look_that_it_may_help(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search = _Search(StepLimits(traced(), cluster(), Constraints()), UNLIMITED)
    shapes = Shapes(search.planner, PipelinePin(), short=True)
    first = shapes.most_promising(math.inf)
    assert first is not None
    for shape in set(shapes.known) - {first}:
        shapes.settle(shape, "planned")
    slow = free_pipeline()
    suited: list[Plan] = []

    def suit(search: _Search, plan: Plan) -> Plan:
        suited.append(plan)
        return plan

    monkeypatch.setattr(FittingCuts, "fitting", lambda cuts, *given: slow)
    monkeypatch.setattr(_Search, "_with_schedule", lambda search, shape, plan, *rest: plan)
    monkeypatch.setattr(_Search, "_suited", suit)
    monkeypatch.setattr(Shapes, "close_least", lambda shapes, *given, **named: None)
    monkeypatch.setattr(
        Shapes, "most_promising", lambda shapes, s: first if shapes.is_open(first) else None
    )
    took_s = counted_s(slow)
    assert search._climb(shapes, took_s / 1.2) is None
    assert not suited
    assert search._climb(shapes, took_s / 1.05) is None
    assert search._climb(shapes, 1.1 * took_s) is slow
    assert suited == [slow]


def a_search(share: float, monkeypatch: pytest.MonkeyPatch) -> tuple[_Search, Plan]:
    """Of a step that does not fit; a pipeline that takes a share of what it takes without limit."""
    known = StepLimits(traced(), cluster(), Constraints())
    free = known.free(UNLIMITED)
    pipeline = free_pipeline()
    seconds = share * counted_s(known.free_program(UNLIMITED))
    predicted = replace(pipeline.predicted, step_time_s=seconds, unseen_compute_s=0.0)
    monkeypatch.setattr(_Search, "_reported", lambda search, plan, *rest: plan)
    search = _Search(known, free.predicted.peak_memory_bytes - 1)
    return search, replace(pipeline, predicted=predicted)


@pytest.mark.parametrize(
    ("share", "written", "least", "proved"),
    [
        (0.9, 2.0, 2.0, None),
        (0.98, 1.0, 2.0, None),
        (0.98, 1.1, 2.0, False),
        (1.5, 1.0, 2.0, True),
        (1.5, 1.0, 1.0, False),
    ],
)
def test_within_the_limit_a_bound_is_asked_for_where_it_tells(
    share: float,
    written: float,
    least: float,
    proved: bool | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not of a pipeline that is as fast as plans without a limit, nor where other ones may be.

    One that saves enough without a limit is not asked about, nor one whose programs, which take so
    many times what was counted, are no slower; else plans must stay below it.
    """
    search, pipeline = a_search(share, monkeypatch)
    seconds = written * pipeline.predicted.step_time_s
    as_written = replace(pipeline.predicted, step_time_s=seconds)
    monkeypatch.setattr(
        pipelining, "scheduled", lambda plan, _: replace(plan, predicted=as_written)
    )
    asked: list[tuple[float, bool]] = []

    def best(
        whole: OnePiece, limit: int, plan: object = None, below_s: float = 0.0, proved: bool = True
    ) -> Plan:
        asked.append((below_s, proved))
        raise NotBelow(0.0)

    free, free_s = search.known.free(search.limit), counted_s(search.known.free_program(UNLIMITED))
    search.known._free = UNLIMITED, replace(free, solver=replace(free.solver, bound=free_s))
    shapes = Shapes(search.planner, PipelinePin(), short=True)
    monkeypatch.setattr(Shapes, "least_s", lambda shapes: least * free_s)
    monkeypatch.setattr(OnePiece, "best", best)
    assert search._against_limited(pipeline, shapes) is pipeline
    expected = [] if proved is None else [(counted_s(pipeline) / (1 - GAIN), proved)]
    assert asked == expected


@pytest.mark.parametrize("least", [0.5, 2.0])
def test_a_plan_within_the_limit_that_a_pipeline_does_not_beat_is_taken(
    least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its own bound, or that without a limit where pipelines are bounded lower."""
    search, pipeline = a_search(10.0, monkeypatch)
    shapes = Shapes(search.planner, PipelinePin(), short=True)
    free_s = search.known.free(search.limit).solver.bound
    monkeypatch.setattr(Shapes, "least_s", lambda shapes: least * free_s)
    asked: list[bool] = []
    best = OnePiece.best

    def noted(
        whole: OnePiece,
        limit: int,
        plan: Plan | None = None,
        below_s: float = math.inf,
        proved: bool = True,
    ) -> Plan:
        asked.append(proved)
        return best(whole, limit, plan, below_s, proved)

    monkeypatch.setattr(OnePiece, "best", noted)
    found = search._against_limited(pipeline, shapes)
    assert found.pipeline is None
    assert found.predicted.peak_memory_bytes <= search.limit
    assert free_s <= found.solver.bound <= found.solver.objective
    assert asked == [least > 1]
