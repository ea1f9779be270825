"""What solves share equals what each would make for itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

from autopar.codegen.microbatch import localise
from autopar.codegen.stages import Staged, batch_bytes, cut_body, flying
from autopar.core.constraints import Constraints
from autopar.core.flights import Waits, flights
from autopar.core.graph import TracedModel
from autopar.core.placement import Layout, Partial, Placement, Replicate, Shard
from autopar.core.plan import Plan
from autopar.core.schedule import actions
from autopar.cost_model import Cluster
from autopar.search.pipeline_stages import Pipeliner, Stopped
from autopar.search.pipelining import plan_step
from autopar.search.stage_planning import StagePlanner
from autopar.solver.candidates import Pricer, expand
from autopar.solver.fit import UNLIMITED
from autopar.solver.microbatch import split_in_time
from autopar.solver.moves import MoveCosts
from autopar.solver.offers import Offers
from autopar.solver.pipelines.pipeline_shape import PipelineShape
from autopar.solver.read_step import build_step
from autopar.solver.rules.own_order import note_orders
from autopar.solver.solve import StepSearch, in_other_flights
from autopar.tracer.trace import trace
from tests import zoo
from tests.test_pipeline_search import nodes_apart, stack

MESH = (4, 2, 2)
CLUSTER = Cluster.from_profile("h100-sxm", nodes=2, devices_per_node=8, mesh_shape=MESH)


@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt2"])
def test_offers_are_those_of_each_op(name: str) -> None:
    model, inputs = zoo.MODELS[name]()
    traced = trace(model, inputs)
    note_orders(traced.graph)
    offers, pricer = Offers(CLUSTER), Pricer(CLUSTER)
    for op in build_step(traced).ops.values():
        every = expand(op.call, MESH)
        known = offers.of(op.call)
        candidates = known.candidates
        seconds = pricer.compute(op.call, every) + pricer.inner(every)
        # of ways to run it that differ in nothing else, the fastest
        least: dict[object, float] = {}
        for each, took_s in zip(every, seconds, strict=True):
            layouts = (each.inputs, each.outputs)
            least[layouts] = min(took_s, least.get(layouts, took_s))
        offered = zip(candidates, known.seconds, strict=True)
        assert {(c.inputs, c.outputs): took_s for c, took_s in offered} == least, op.name
        assert len(candidates) == len(least) and set(candidates) <= set(every)
        for candidate in candidates[::7]:
            (one,) = pricer.compute(op.call, [candidate])
            assert offers.seconds(op.call, candidate) == one


class _Dropped(nn.Module):
    """Two dropouts of one shape and share, and one of another share."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for share in (0.1, 0.1, 0.2):
            x = nn.functional.dropout(x, share)
        return x.sum()


def test_ops_that_differ_in_their_salt_alone_share_an_offer() -> None:
    with torch.device("meta"):
        traced = trace(_Dropped(), (torch.empty(16, 8, requires_grad=True),))
    offers, drops = Offers(CLUSTER), torch.ops.autopar.dropout.default
    calls = [op.call for op in build_step(traced).ops.values() if op.call.target is drops]
    salts = {call.args[3] for call in calls}
    first, second, other = (offers.of(call) for call in calls[:3])
    assert len(salts) == 3
    assert first is second
    assert other is not first


def test_pairs_of_layouts_cost_what_each_costs() -> None:
    rng = np.random.default_rng(0)
    forms = [Replicate(), Partial(), *(Shard(d) for d in range(3)), Shard(0, 4), Shard(1, 2),
             Placement("S", 0, own=True)]  # fmt: skip
    layouts: list[Layout] = [
        tuple(forms[k] for k in rng.integers(0, len(forms), 3)) for _ in range(90)
    ]
    moves, single = MoveCosts(CLUSTER), MoveCosts(CLUSTER)
    for part in (layouts[:40], layouts):  # the second asks for more
        table = moves.matrix(part, part[::-1], 1e6)
        for i, src in enumerate(part):
            for j, dst in enumerate(part[::-1]):
                known = single.coefficients(src, dst)
                wanted = sum(a for _, a, _ in known) + sum(b for _, _, b in known) * 1e6
                assert table[i, j] == wanted


@cache
def halves() -> tuple[Staged, int]:
    """A stack in two, and the bytes of its batch."""
    _, _, traced = stack(6)
    micro = localise(traced, split_in_time(traced, nodes_apart(), 4), 4)
    return cut_body(micro, ["layers.3"]), batch_bytes(traced, micro)


def staged(schedule: str, stage: int) -> TracedModel:
    """One of them, by schedule."""
    parts, batch = halves()
    return flying(parts, flights(actions(schedule, 2, 4, 1)), batch).stages.models[stage]


def test_a_stage_in_another_schedule_is_as_if_solved_anew() -> None:
    cluster = replace(nodes_apart(), mesh_shape=(2,), axis_names=("a",))
    for stage in range(2):
        known = StepSearch(staged("1f1b", stage), cluster, memory_limit=UNLIMITED).run()
        found = in_other_flights(known, staged("gpipe", stage)).plan
        fresh = StepSearch(staged("gpipe", stage), cluster, memory_limit=UNLIMITED).run().plan
        assert found == replace(fresh, solver=found.solver)  # which has seconds
        assert found.predicted != known.plan.predicted


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_is_planned_for_what_other_ranks_wait_for(stage: int) -> None:
    """Of its plans for several schedules, none is better than its own in what that one counts."""
    cluster = replace(nodes_apart(), mesh_shape=(2,), axis_names=("a",))
    plans: dict[Waits, Plan] = {}
    models = [staged(schedule, stage) for schedule in ("1f1b", "zero-bubble")]
    for waits in (Waits(prepare=4.0, finish=0.1), Waits(prepare=0.1, finish=4.0)):
        models.append(replace(models[0], flight=replace(models[0].flight, waits=waits)))
    for model in models:
        plan = StepSearch(model, cluster, memory_limit=UNLIMITED).run().plan
        plans[model.flight.waits] = plan
        assert plan.solver.objective == pytest.approx(counted(plan, model.flight.waits))
        assert Plan.from_dict(plan.to_dict()).solver.waits == model.flight.waits
    assert len(plans) == 4
    for waits, own in plans.items():
        for other in plans.values():
            assert counted(own, waits) <= counted(other, waits) * (1 + 1e-6)
    whole, split, *_ = plans
    assert whole.weights > 1 > split.weights


def counted(plan: Plan, waits: Waits) -> float:
    """Seconds of a stage in four microbatches, with what others wait for."""
    phases = plan.predicted.phases
    at_turns = (phases[part] for part in ("forward", "input", "weight"))
    once = waits.prepare * phases["prepare"] + waits.finish * phases["finish"]
    turns_s = 4 * sum(w * s for w, s in zip(waits[1:4], at_turns, strict=True))
    return once + turns_s + plan.predicted.update_s


def test_a_shape_is_given_up_only_where_its_plan_is_of_no_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, _, traced = stack(8)
    cluster = nodes_apart()
    bounds: list[float] = []
    least = Pipeliner._least_seconds

    def noted(self: Pipeliner, plans: Sequence[Plan]) -> float:
        bounds.append(least(self, plans))
        return bounds[-1]

    monkeypatch.setattr(Pipeliner, "_least_seconds", noted)
    shape = PipelineShape(size=2, microbatches=4, schedule="1f1b")

    def planner(limit: int | None = None) -> StagePlanner:
        return StagePlanner(traced, cluster, Constraints(), limit, "adamw", Offers(cluster))

    whole = planner().plan(shape, free=True, below_s=1e9)
    step_s = whole.predicted.step_time_s
    assert len(bounds) == 2
    assert bounds == sorted(bounds)
    assert 0 < bounds[0] <= bounds[1] <= step_s * (1 + 1e-9)
    assert planner().plan(shape, free=True, below_s=step_s * 1.001).predicted == whole.predicted
    with pytest.raises(Stopped) as slow:
        planner().plan(shape, free=True, below_s=bounds[0] * 0.99)
    assert slow.value.least_s == bounds[0]
    assert not slow.value.kinds
    assert whole.pipeline is not None
    peaks, peak = whole.pipeline.peaks, whole.predicted.peak_memory_bytes
    assert planner(peak).plan(shape, free=True, below_s=math.inf).predicted == whole.predicted
    with pytest.raises(Stopped) as large:
        planner(peak - 1).plan(shape, free=True, below_s=math.inf)
    assert sum(large.value.kinds.values()) == peak
    assert large.value.rank == peaks.index(peak)


def test_a_pinned_recomputation_is_planned_for_each_schedule() -> None:
    _, _, traced = stack(8)
    pins = Constraints.parse({"pipeline": {"size": 2, "microbatches": 4}, "checkpoint": "full"})
    plan = plan_step(traced, nodes_apart(), constraints=pins)
    assert plan.pipeline is not None
    assert {stage.checkpoint for stage in plan.pipeline.stages} == {"full"}
