"""Plans of several stages of a pipeline that are exchanged at once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from autopar.core.constraints import Constraints
from autopar.core.flights import Waits
from autopar.core.list_schedule import RankLoad, list_schedule, most_ahead
from autopar.core.soonest import forwards_ahead, soonest
from autopar.cost_model import Cluster
from autopar.search import critical_stages
from autopar.search.critical_stages import CriticalStages
from autopar.search.stage_planning import StagePlanner
from autopar.search.step_limits import StepLimits
from autopar.solver.pipelines.pipeline_shape import PipelineShape
from autopar.solver.pipelines.stage_mixture import StageLoad, best_mixture
from autopar.tracer.trace import trace
from autopar.verification import verify
from benchmarks.planner import fusion_of
from benchmarks.planner_rows import ROWS
from tests.test_critical_stages import near_ranks, planner_of, tied


def random_loads(rng: np.random.Generator, ranks: int, short: bool = False) -> list[RankLoad]:
    """Of unequal stages; `short`: with memory for a few microbatches."""
    return [
        RankLoad(
            forward_s=f,
            input_s=i,
            weight_s=w,
            begin_s=b,
            waiting=1.0,
            delayed=float(rng.uniform(0.2, 1.0)),
            budget=float(rng.uniform(1.0, 2.0 * ranks)) if short else np.inf,
        )
        for f, i, w, b in rng.uniform(0.2, 2.0, (ranks, 4))
    ]


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_no_order_is_done_sooner(seed: int, short: bool) -> None:
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(1, 7))
    turns = int(rng.integers(1, 14))
    loads = random_loads(rng, ranks, short)
    hops = rng.uniform(0.0, 0.3, ranks - 1).tolist()
    least = soonest(loads, turns, hops)
    most = most_ahead(ranks, turns)
    for share, patience in itertools.product((0.0, 0.5, 1.0), (0.0, 1.0)):
        ahead = [max(1, round(share * n)) for n in most]
        found = list_schedule(loads, turns, hops, warmup=ahead, patience=patience)
        for end_s, least_s in zip(found.ends_s, least, strict=True):
            assert end_s >= least_s * (1 - 1e-9)


def test_equal_stages_with_memory_are_done_as_soon_as_that() -> None:
    """ZB-H2 of equal stages with F = I = W stands idle for nothing but the first microbatch."""
    loads = [RankLoad(forward_s=1.0, input_s=1.0, weight_s=1.0)] * 4
    least = soonest(loads, 12, [0.0] * 3)
    found = list_schedule(loads, 12, [0.0] * 3, warmup=most_ahead(4, 12), patience=1.0)
    assert max(least) == max(found.ends_s) == 3 + 36


def test_memory_for_one_microbatch_makes_them_go_around_one_by_one() -> None:
    load = RankLoad(forward_s=1.0, input_s=2.0, weight_s=1.0, waiting=1.0, delayed=0.0, budget=1.5)
    least = soonest([load] * 3, 5, [0.0] * 2)
    assert least[0] == 5 * 9 + 1.0  # the last weight gradient
    free = soonest([replace(load, budget=np.inf)] * 3, 5, [0.0] * 2)
    assert max(free) < max(least)


# --- mixtures ---------------------------------------------------------------------------------
def options_of(rng: np.random.Generator, ranks: int, short: bool = False) -> list[list[StageLoad]]:
    """Some plans of each stage; `short`: with memory for a few microbatches."""
    return [
        [
            StageLoad(load, *rng.uniform(0.2, 2.0, 2).tolist())
            for load in random_loads(rng, int(rng.integers(1, 4)), short)
        ]
        for _ in range(ranks)
    ]


def pipeline_of(seed: int, short: bool) -> tuple[list[list[StageLoad]], int, list[float]]:
    """Plans of each stage, turns and hops."""
    rng = np.random.default_rng(seed)
    ranks, turns = int(rng.integers(1, 5)), int(rng.integers(1, 10))
    return options_of(rng, ranks, short), turns, rng.uniform(0.0, 0.3, ranks - 1).tolist()


def least_of(plans: Sequence[StageLoad], turns: int, hops: list[float]) -> float:
    """By the formulas, for a plan of each stage."""
    ends = soonest([plan.load for plan in plans], turns, hops)
    done_s = max(end + plan.finish_s for end, plan in zip(ends, plans, strict=True))
    return done_s + max(plan.update_s for plan in plans)


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_a_mixture_is_no_slower_than_any_choice(seed: int, short: bool) -> None:
    options, turns, hops = pipeline_of(seed, short)
    found = best_mixture(options, turns, hops)
    every = [least_of(each, turns, hops) for each in itertools.product(*options)]
    assert found.step_s <= min(every) * (1 + 1e-9)
    # with one plan a stage there is nothing to mix
    first = best_mixture([plans[:1] for plans in options], turns, hops)
    assert first.step_s == pytest.approx(every[0], rel=1e-9)


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_whole_plans_are_the_best_there_are(seed: int, short: bool) -> None:
    options, turns, hops = pipeline_of(seed, short)
    found = best_mixture(options, turns, hops, whole=True)
    least = {each: least_of(each, turns, hops) for each in itertools.product(*options)}
    near_s = min(least.values()) + 1e-3 * max(sum(x[0].seconds(turns)) for x in options)
    assert best_mixture(options, turns, hops).step_s <= found.step_s * (1 + 1e-9)
    assert found.step_s <= near_s
    if not short:  # else microbatches come around as soon as with any plans of the ranks behind
        assert least[tuple(x[i] for x, i in zip(options, found.most, strict=True))] <= near_s


PARTS = ("begin_s", "forward_s", "input_s", "weight_s", "finish_s")


def shifted(options: list[list[StageLoad]], stage: int, part: int, by: float) -> list[Any]:
    """With another number of seconds of a part of all plans of a stage."""
    name, found = PARTS[part], [list(plans) for plans in options]
    for k, plan in enumerate(options[stage]):
        if name == "finish_s":
            found[stage][k] = replace(plan, finish_s=plan.finish_s + by)
        else:
            seconds = {name: getattr(plan.load, name) + by}
            found[stage][k] = replace(plan, load=replace(plan.load, **seconds))
    return found


@pytest.mark.parametrize("seed", range(20))
def test_waits_tell_what_a_second_adds_to_the_step(seed: int) -> None:
    """By differences: a little more of one part of one stage."""
    rng = np.random.default_rng(100 + seed)
    ranks, turns = int(rng.integers(1, 5)), int(rng.integers(2, 10))
    options = options_of(rng, ranks)
    hops = [0.1] * (ranks - 1)
    found = best_mixture(options, turns, hops)
    more = 1e-7
    for stage, part in itertools.product(range(ranks), range(5)):
        often = 1 if part in (0, 4) else turns
        longer_s, shorter_s = (
            best_mixture(shifted(options, stage, part, by), turns, hops).step_s
            for by in (more, -more)
        )
        slope = (longer_s - found.step_s) / more / often
        before = (found.step_s - shorter_s) / more / often
        counted = found.waits[stage][part]
        assert before - 1e-4 <= counted <= slope + 1e-4, Waits._fields[part]


def test_memory_takes_forwards_from_those_ahead() -> None:
    loads = [RankLoad(forward_s=1.0, input_s=1.0, weight_s=1.0, waiting=1.0, budget=2.5)] * 4
    assert forwards_ahead(loads, 8) == [2, 2, 2, 1]
    free = [replace(load, budget=np.inf) for load in loads]
    assert forwards_ahead(free, 8) == list(most_ahead(4, 8))


def test_what_holds_nothing_can_be_held_however_short_memory_is() -> None:
    """A plan without a limit may leave less than nothing of one."""
    load = RankLoad(forward_s=1.0, input_s=1.0, weight_s=1.0, waiting=0.0, budget=-1.0)
    assert forwards_ahead([load] * 4, 8) == list(most_ahead(4, 8))
    assert forwards_ahead([replace(load, waiting=1.0)] * 4, 8) == [1] * 4


# --- exchanges --------------------------------------------------------------------------------
def planner_of_row(name: str) -> StagePlanner:
    """Of a row of the planner's benchmark."""
    row = ROWS[name]
    with torch.device("meta"):
        model = row.build().to(row.dtype).train()
    traced = trace(model, row.inputs(), fold=True)
    cluster = Cluster.from_profile(
        row.profile, nodes=row.nodes, devices_per_node=row.devices_per_node, mesh_shape=row.mesh
    )
    known = StepLimits(traced, cluster, Constraints(), fusion=fusion_of(cluster))
    return known.planner(cluster.memory_bytes)


def test_plans_of_several_stages_are_exchanged_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """126 layers on 32 ranks: none of the first ranks that prepare less is worth it alone."""
    planner = planner_of_row("llama3-405b@64x8")
    plan = planner.plan(PipelineShape(size=32, microbatches=32, schedule="automatic"), free=True)
    together = planner.suited(plan)
    monkeypatch.setattr(CriticalStages, "_regroup", lambda self: None)
    alone = planner.suited(plan)
    assert together.predicted.step_time_s < 0.99 * alone.predicted.step_time_s
    assert together.predicted.peak_memory_bytes <= together.memory_limit_bytes
    assert together.pipeline is not None and alone.pipeline is not None
    pairs = zip(together.pipeline.stages, alone.pipeline.stages, strict=True)
    assert sum(a.solver.waits != b.solver.waits for a, b in pairs) > 1


def test_what_is_exchanged_trains_as_on_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(critical_stages, "_PROMISED", 0.0)
    model, inputs = tied()
    planner = planner_of(trace(model, inputs, fold=True), near_ranks(2, 2e9))
    plan = planner.plan(PipelineShape(size=2, microbatches=2, schedule="automatic"), free=True)
    found = planner.suited(plan)
    monkeypatch.setattr(CriticalStages, "_regroup", lambda self: None)
    assert found.predicted.step_time_s < planner.suited(plan).predicted.step_time_s
    assert verify(found, model, inputs).worst[1] <= 1e-6


def test_where_no_exchange_helps_alone_all_are_made() -> None:
    """16 layers on 8 ranks: the last one begins sooner if the first five gather nothing first."""
    planner = planner_of_row("llama3-405b-16-layers@64x8")
    plan = planner.plan(PipelineShape(size=8, microbatches=16, schedule="automatic"), free=True)
    suited = planner.suited(plan)
    assert suited.predicted.step_time_s < 0.97 * plan.predicted.step_time_s
    assert suited.pipeline is not None
    gathers = [stage.predicted.phases["prepare"] for stage in suited.pipeline.stages]
    assert max(gathers[:4]) < 0.1 * min(gathers[5:])
