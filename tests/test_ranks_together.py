"""Bounds of all ranks of a pipeline together, against every choice for every block and all cuts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from autopar.core.constraints import Constraints
from autopar.core.list_schedule import RankLoad
from autopar.core.schedule import actions
from autopar.core.soonest import soonest
from autopar.cost_model.pipeline import simulate_pipeline
from autopar.search.stage_planning import StagePlanner
from autopar.solver.discrete.problem import Array
from autopar.solver.offers import Offers
from autopar.solver.pipelines.functionals import functionals
from autopar.solver.pipelines.pipeline_shape import PipelineShape, least_seconds, line_of, open_runs
from autopar.solver.pipelines.ranks_together import Plane, least_together
from autopar.solver.pipelines.turn import Turn
from autopar.tracer.trace import trace
from tests.test_critical_stages import near_ranks
from tests.test_pipeline_bounds import stack

HOP_S = 0.1


class Menus:
    """Blocks that have a few plans each: seconds of a step, (blocks, plans, parts)."""

    def __init__(self, plans: Array) -> None:
        self.plans = plans

    def least(self, weights: Sequence[float]) -> Array:
        return (self.plans @ np.asarray(weights)).min(axis=1)

    def turn(self, turns: int, ahead: int) -> Turn:
        found = {name: self.least(w) for name, w in functionals(turns, ahead).items()}
        found["backward"] = self.least((0, 0, 1, 1, 0, 0))
        return Turn(found, turns, ahead)

    def steps(self, shape: PipelineShape, starts: Sequence[int]) -> list[float]:
        """Seconds of a step with some cuts, of each choice for each block."""
        m, found = shape.microbatches, []
        for chosen in itertools.product(range(self.plans.shape[1]), repeat=len(self.plans)):
            parts = self.plans[np.arange(len(self.plans)), chosen]
            stages = [x.sum(axis=0) for x in np.split(parts, starts)]
            if shape.schedule == "automatic":
                loads = [
                    RankLoad(begin_s=p, forward_s=f / m, input_s=i / m, weight_s=w / m)
                    for p, f, i, w, *_ in stages
                ]
                ends: Sequence[float] = soonest(loads, m, [HOP_S] * (shape.size - 1))
                finish = [s[4] for s in stages]
            else:
                seconds = [
                    {"F": f / m, "I": i / m, "W": w / m, "B": (i + w) / m}
                    for _, f, i, w, *_ in stages
                ]
                ranks = [stages[r :: shape.size] for r in range(shape.size)]
                begin = [sum(s[0] for s in each) for each in ranks]
                orders = actions(shape.schedule, shape.size, m, shape.chunks)
                ends = simulate_pipeline(orders, seconds, HOP_S, begin_s=begin).finish_s()
                finish = [sum(s[4] for s in each) for each in ranks]
            update_s = max(sum(s[5] for s in stages[r :: shape.size]) for r in range(shape.size))
            found.append(max(map(sum, zip(ends, finish, strict=True))) + update_s)
        return found


def blocks_that_trade(rng: np.random.Generator, blocks: int) -> Menus:
    """What runs once, in front of the turns or behind them, may save a little at each turn."""
    plans = rng.uniform(0.2, 2.0, (blocks, 2, 6))
    plans[:, :, 1:4] = plans[:, :1, 1:4] * rng.uniform(1.0, 1.3, (blocks, 2, 1))
    plans[:, :, [0, 4]] *= 2.0
    return Menus(plans)


def bound_of(
    menus: Menus, shape: PipelineShape, limit_s: float, starts: Sequence[int] | None
) -> tuple[float, float]:
    """Rank by rank, and together."""
    ahead = 2 * shape.size - 1 if shape.schedule == "automatic" else shape.size
    turn, joint = menus.turn(shape.microbatches, ahead), [False] * len(menus.plans)
    alone = least_seconds(shape, turn, HOP_S, joint, starts)
    sums = functionals(shape.microbatches, ahead)
    planes = [Plane(w, turn.runs(name)) for name, w in sums.items()]
    limit_s, runs = open_runs(shape, turn, HOP_S, joint, limit_s, starts)
    return alone, least_together(line_of(shape, HOP_S), runs, planes, limit_s)


@pytest.mark.parametrize("schedule", ["automatic", "1f1b", "zero-bubble", "gpipe"])
def test_no_choice_with_any_cuts_is_faster(schedule: str) -> None:
    rng = np.random.default_rng(0)
    for _ in range(12):
        p = int(rng.integers(2, 4))
        shape = PipelineShape(size=p, microbatches=int(rng.integers(p, 9)), schedule=schedule)
        menus = blocks_that_trade(rng, 5)
        cuts = itertools.combinations(range(1, 5), p - 1)
        least_s = min(min(menus.steps(shape, starts)) for starts in cuts)
        alone_s, found_s = bound_of(menus, shape, 1.2 * least_s, None)
        assert found_s <= least_s * (1 + 1e-9)
        if schedule == "automatic":  # of others more is known rank by rank
            assert found_s >= alone_s * (1 - 2e-3)  # up to the gap of the ILP


@pytest.mark.parametrize("schedule", ["automatic", "1f1b", "zero-bubble", "gpipe", "interleaved"])
def test_no_choice_with_given_cuts_is_faster(schedule: str) -> None:
    rng, raised = np.random.default_rng(0), 0
    for _ in range(24):
        chunks = 2 if schedule == "interleaved" else 1
        menus = blocks_that_trade(rng, 4)
        shape = PipelineShape(size=4 // chunks, microbatches=4, schedule=schedule, chunks=chunks)
        least_s = min(menus.steps(shape, [1, 2, 3]))
        alone_s, found_s = bound_of(menus, shape, 2 * least_s, [1, 2, 3])
        assert found_s <= least_s * (1 + 1e-9)
        raised += found_s > alone_s * (1 + 1e-3)
    assert raised >= 3


@pytest.mark.parametrize("seed", range(10))
def test_open_runs_are_those_of_cuts_below_the_limit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    menus, p = blocks_that_trade(rng, 7), 3
    shape = PipelineShape(size=p, microbatches=6, schedule="automatic")
    turn = menus.turn(6, 2 * p - 1)
    joint = [False, *(bool(x) for x in rng.random(6) < 0.3)]
    least_s = least_seconds(shape, turn, HOP_S, joint)
    if not np.isfinite(least_s):
        return
    limit_s = 1.3 * least_s
    _, runs = open_runs(shape, turn, HOP_S, joint, limit_s)
    ends = [i for i in range(1, 7) if not joint[i]]
    wanted: list[set[tuple[int, int]]] = [set() for _ in range(p)]
    for starts in itertools.combinations(ends, p - 1):
        if least_seconds(shape, turn, HOP_S, joint, starts) < limit_s:
            for r, run in enumerate(itertools.pairwise([0, *starts, 7])):
                wanted[r].add(run)
    # with what the first rank does behind the last gradient, fewer cuts are below
    assert all(want <= set(open_) for want, open_ in zip(wanted, runs, strict=True))
    assert open_runs(shape, turn, HOP_S, joint, 0.5 * least_s)[1] == [[]] * p


def test_no_plan_of_a_model_is_below_the_bound() -> None:
    model, inputs = stack(14)[:2]
    traced, cluster = trace(model.train(), inputs, fold=True), near_ranks(2, 1e9)
    planner = StagePlanner(traced, cluster, Constraints(), None, "adamw", Offers(cluster))
    shape = PipelineShape(size=2, microbatches=2, schedule="automatic")
    turn, plan = planner.turn(shape), planner.plan(shape, free=True)
    step_s = min(planner.suited(plan).predicted.step_time_s, plan.predicted.step_time_s)
    alone_s = least_seconds(shape, turn, 0.0, planner.work.joint)
    found_s = planner.together(shape, turn, 0.0, 2 * step_s, None)
    assert alone_s * (1 + 1e-3) < found_s <= step_s * (1 + 1e-9)


@pytest.mark.parametrize("schedule", ["interleaved", "gpipe"])
def test_of_known_seconds_the_bound_is_the_time_of_the_order(schedule: str) -> None:
    rng = np.random.default_rng(1)
    for _ in range(8):
        p, m = int(rng.integers(2, 4)), int(rng.integers(1, 4))
        shape = PipelineShape(size=p, microbatches=p * m, schedule=schedule, chunks=2)
        menus, starts = Menus(rng.uniform(0.2, 2.0, (2 * p, 1, 6))), list(range(1, 2 * p))
        (step_s,) = menus.steps(shape, starts)
        without = Menus(menus.plans * [0, 1, 1, 1, 0, 0])  # of what runs once only sums are known
        (least_s,) = without.steps(shape, starts)
        _, found_s = bound_of(menus, shape, 2 * step_s, starts)
        assert least_s * (1 - 1e-5) <= found_s <= step_s * (1 + 1e-9)
        _, found_s = bound_of(without, shape, 2 * step_s, starts)
        assert found_s == pytest.approx(least_s, rel=1e-5)
