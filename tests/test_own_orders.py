"""Automatic schedules: orders that are made for the seconds and the memory of a plan's stages."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import autopar
from autopar.core.constraints import Constraints
from autopar.core.plan import Plan
from autopar.core.schedule import AUTOMATIC, actions, kinds_of, orders_of
from autopar.cost_model import Cluster
from autopar.cost_model.rank_memory import rank_memory
from autopar.cost_model.stages import ranks_time
from autopar.errors import PlanMismatchError
from autopar.search.own_orders import fastest_orders, least_held
from autopar.search.stage_planning import StagePlanner
from autopar.solver.fit import UNLIMITED
from autopar.solver.offers import Offers
from autopar.solver.pipelines.pipeline_shape import PipelineShape
from autopar.tracer.trace import trace
from autopar.verification import verify
from tests import zoo
from tests.test_critical_stages import near_ranks, stack

SIZE, TURNS = 4, 8


def planner(depth: int = 9, limit: int | None = None) -> StagePlanner:
    """More blocks than four ranks share evenly."""
    model, inputs = stack(depth, 256)
    cluster = near_ranks(SIZE, 1e9)
    traced = trace(model, inputs, fold=True)
    return StagePlanner(traced, cluster, Constraints(), limit, "adamw", Offers(cluster))


def shape(schedule: str, cuts: tuple[str, ...] | None = None) -> PipelineShape:
    return PipelineShape(size=SIZE, microbatches=TURNS, schedule=schedule, cuts=cuts)


def test_automatic_orders_are_no_slower_than_fixed_ones() -> None:
    planner_ = planner()
    plan = planner_.plan(shape(AUTOMATIC), free=True)
    assert plan.pipeline is not None
    assert [len(kinds) for kinds in plan.pipeline.orders] == [3 * TURNS] * SIZE
    assert kinds_of(plan.pipeline.actions()) == plan.pipeline.orders
    for schedule in ("1f1b", "zero-bubble"):
        other = planner_.plan(shape(schedule, plan.pipeline.cuts), free=True)
        assert plan.predicted.step_time_s <= other.predicted.step_time_s * (1 + 1e-9)
    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again.pipeline == plan.pipeline
    assert again.solver.waits == plan.solver.waits


def test_a_search_finds_orders_of_unlike_stages_that_are_faster() -> None:
    plan = planner().plan(shape(AUTOMATIC), free=True)
    assert plan.pipeline is not None
    hops, faster = [1e-3] * (2 * SIZE - 1), {0.0: 0, 0.5: 0}
    for seed in range(10):
        rng, share = np.random.default_rng(seed), 0.5 * (seed % 2)
        stages = []
        for rank, stage in enumerate(plan.pipeline.stages * 2):
            phases = {name: float(rng.uniform(0.02, 0.03)) for name in stage.predicted.phases}
            phases["prepare"] = 0.1 * (rank > SIZE)
            predicted = replace(stage.predicted, phases=phases)
            stages.append(replace(_sending(stage, share), predicted=predicted))
        first_s, found_s, again_s = (
            ranks_time(stages, orders, hops).step_s
            for search in (False, True, True)
            if (orders := fastest_orders(stages, hops, TURNS, None, search=search)) is not None
        )
        assert found_s <= first_s and found_s == again_s
        faster[share] += found_s < 0.999 * first_s
    assert sum(faster.values()) >= 3 and all(faster.values())


def _sending(stage: Plan, share: float) -> Plan:
    """A stage whose sends take a share of the compute beside them."""
    link = {**stage.cluster["intra"], "compute_share": share}
    return replace(stage, cluster={**stage.cluster, "intra": link})


def test_sends_take_of_the_compute_beside_them() -> None:
    """As in a program: a rank loses the measured share while it sends and receives."""
    plan = planner().plan(shape("1f1b"), free=True)
    assert plan.pipeline is not None
    orders, sends_s = plan.pipeline.actions(), [1e-3] * (SIZE - 1)

    def busy(share: float) -> tuple[float, ...]:
        stages = [_sending(stage, share) for stage in plan.pipeline.stages]
        return ranks_time(stages, orders, sends_s).busy_s

    more = [b - a for a, b in zip(busy(0.0), busy(0.5), strict=True)]
    # a microbatch passes each cut twice: an end has one, others two
    both = 0.5 * 2 * TURNS * 1e-3 / 2
    assert more == pytest.approx([both, *[2 * both] * (SIZE - 2), both])


def test_orders_keep_to_the_memory_that_there_is() -> None:
    """Less memory holds fewer microbatches in flight, also fewer than 1F1B does."""
    free = planner().plan(shape(AUTOMATIC), free=True)
    assert free.pipeline is not None
    stages = free.pipeline.stages
    none = [0.0] * (SIZE - 1)
    held = [stage.predicted.held for stage in stages]

    def peak(orders: Any) -> int:
        return max(sum(kinds.values()) for kinds in rank_memory(orders, held))

    least, most = peak(least_held(SIZE, TURNS)), peak(free.pipeline.actions())
    assert least < most
    seconds = []
    for limit in (least - 1, least, (least + most) // 2, most, UNLIMITED):
        orders = fastest_orders(stages, none, TURNS, limit)
        assert orders is not None and peak(orders) <= limit
        seconds.append(ranks_time(stages, orders, none).step_s)
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1]
    assert fastest_orders(stages, none, TURNS, 1) is None


def test_a_limit_that_binds_is_kept_by_the_plan() -> None:
    free = planner().plan(shape(AUTOMATIC), free=True)
    least = planner().plan(shape("1f1b"), free=True)
    assert free.pipeline is not None and least.pipeline is not None
    limit = (max(free.pipeline.peaks) + max(least.pipeline.peaks)) // 2
    assert limit < max(free.pipeline.peaks)
    found = planner(limit=limit).plan(shape(AUTOMATIC, free.pipeline.cuts))
    assert found.pipeline is not None
    assert max(found.pipeline.peaks) <= limit
    assert found.predicted.step_time_s >= free.predicted.step_time_s * (1 - 1e-9)


@pytest.mark.parametrize("build", [stack, lambda: zoo.gpt2(layers=4)])
def test_numbers_are_those_of_one_device(build: Any) -> None:
    torch.manual_seed(0)
    model, inputs = build()
    model = model.double().train()
    pins = {"pipeline": {"size": 2, "microbatches": 4, "schedule": AUTOMATIC}}
    cluster = Cluster.from_profile("cpu-gloo", devices_per_node=4)
    plan = autopar.plan(model, cluster, inputs, constraints=pins, cache=False)
    assert plan.pipeline is not None and plan.pipeline.orders
    assert verify(plan, model, inputs).worst[1] <= 1e-6


@pytest.mark.parametrize(
    ("orders", "said"),
    [
        (["FFIWIW", "FIWFI"], "rank 1 has not F, I, W once a microbatch"),
        (["FIWFIW", "FFIIWW"], "wait for each other for ever"),
        (["FFWIIW", "FIWFIW"], "wait for each other for ever"),
        (["FFIWIW"], "wait for each other for ever"),
    ],
)
def test_orders_that_do_not_end_are_refused(orders: list[str], said: str, tmp_path: Path) -> None:
    model, inputs = stack(4, 64)
    pins = {"pipeline": {"size": 2, "microbatches": 2, "schedule": AUTOMATIC}}
    plan = autopar.plan(model, near_ranks(2, 1e9), inputs, constraints=pins, cache=False)
    assert plan.pipeline is not None
    broken = replace(plan, pipeline=replace(plan.pipeline, orders=tuple(orders)))
    broken.save(tmp_path / "plan.json")
    with pytest.raises(PlanMismatchError, match=said):
        Plan.load(tmp_path / "plan.json")
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").pipeline == plan.pipeline


def test_text_of_orders_is_read_as_it_was_written() -> None:
    for schedule in (AUTOMATIC, "zero-bubble", "1f1b"):
        orders = actions(schedule, 3, 5)
        assert orders_of(kinds_of(orders)) == orders
    assert kinds_of(least_held(2, 2)) == ("FFIWIW", "FIWFIW")
