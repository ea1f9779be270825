"""Stages that are planned anew for what the critical path of their schedule counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.core.constraints import Constraints
from autopar.core.flights import Waits
from autopar.core.graph import TracedModel
from autopar.core.placement import Replicate, Shard
from autopar.core.plan import Plan
from autopar.core.schedule import actions
from autopar.cost_model import Cluster
from autopar.cost_model.pipeline import simulate_pipeline
from autopar.cost_model.stages import transfer_seconds
from autopar.explanation import explain
from autopar.search.critical_stages import CriticalStages
from autopar.search.pipelining import plan_step
from autopar.search.stage_menus import Aim
from autopar.search.stage_planning import StagePlanner
from autopar.solver.offers import Offers
from autopar.solver.pipelines.pipeline_shape import PipelineShape
from autopar.tracer.trace import trace
from autopar.verification import verify
from tests import zoo
from tests.dist import run_ranks
from tests.test_pipeline_search import Stack


def near_ranks(size: int, bandwidth: float) -> Cluster:
    """Pipeline ranks of two devices each, whose link has so many bytes a second."""
    cluster = Cluster.from_profile("cpu-gloo", nodes=size, devices_per_node=2)
    near = replace(cluster.intra, latency_s=1e-5, base_latency_s=1e-5, bandwidth=bandwidth)
    return replace(cluster, intra=near, inter=replace(near, bandwidth=1e10))


def stack(depth: int = 4, width: int = 512, batch: int = 32) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Stack(depth, width).double().train()
    return model, {"x": torch.randn(batch, width).double()}


def tied() -> tuple[nn.Module, dict[str, Any]]:
    """The last stage's head is the first one's embedding."""
    model, inputs = zoo.gpt2(layers=2)
    return model.double().train(), inputs


def t5() -> tuple[nn.Module, dict[str, Any]]:
    model, inputs = zoo.MODELS["t5"]()
    return model.double().train(), inputs


def planner_of(traced: TracedModel, cluster: Cluster) -> StagePlanner:
    return StagePlanner(traced, cluster, Constraints(), None, "adamw", Offers(cluster))


# --- the critical path ------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble", "interleaved"])
def test_the_critical_path_has_no_gaps(schedule: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    p, chunks = int(rng.integers(2, 5)), 2 if schedule == "interleaved" else 1
    m = p * int(rng.integers(1, 4))
    seconds = [
        {"F": f, "I": i, "W": w, "B": i + w} for f, i, w in rng.uniform(0.2, 2.0, (p * chunks, 3))
    ]
    begin = rng.uniform(0.0, 4.0, p).tolist()
    orders = actions(schedule, p, m, chunks)
    for transfer_s in (0.0, 0.3):
        found = simulate_pipeline(orders, seconds, transfer_s, begin_s=begin)
        for rank, end_s in enumerate(found.finish_s()):
            path = found.critical_path(rank)
            assert path[-1].end_s == end_s and path[-1].rank == rank
            assert path[0].start_s == begin[path[0].rank]
            waits = [b.start_s - a.end_s for a, b in pairwise(path)]
            assert all(wait >= -1e-12 for wait in waits)
            if not transfer_s:
                assert max(waits, default=0.0) <= 1e-12
            for a, b, wait in zip(path, path[1:], waits, strict=False):
                assert wait <= 1e-12 or a.rank != b.rank  # only what is on its way takes longer


def test_a_rank_begins_when_it_has_prepared() -> None:
    seconds = [{"F": 1.0, "B": 2.0}] * 2
    orders = actions("1f1b", 2, 2)
    plain = simulate_pipeline(orders, seconds).step_s
    assert simulate_pipeline(orders, seconds, begin_s=[0.0, 1.0]).step_s == plain  # it waited
    assert simulate_pipeline(orders, seconds, begin_s=[0.0, 1.5]).step_s == plain + 0.5
    assert simulate_pipeline(orders, seconds, begin_s=[1.0, 0.0]).step_s == plain + 1.0


# --- exchanges --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("build", "ranks", "bandwidth", "turns", "schedule", "share"),
    [
        (stack, 2, 1e8, 4, "zero-bubble", 0.98),
        (stack, 4, 1e8, 8, "zero-bubble", 1.0),
        (stack, 2, 1e8, 4, "1f1b", 1.0),
        pytest.param(t5, 2, 1e9, 2, "zero-bubble", 0.96, marks=pytest.mark.slow),
        pytest.param(t5, 2, 1e9, 4, "1f1b", 0.98, marks=pytest.mark.slow),
        (tied, 2, 1e9, 2, "zero-bubble", 0.95),
        (tied, 2, 1e9, 2, "1f1b", 0.9),  # a stage before sends what the last one wants
    ],
)
def test_stages_that_others_wait_for_are_planned_anew(
    build: Callable[[], tuple[nn.Module, dict[str, Any]]],
    ranks: int,
    bandwidth: float,
    turns: int,
    schedule: str,
    share: float,
) -> None:
    model, inputs = build()
    planner = planner_of(trace(model, inputs, fold=True), near_ranks(ranks, bandwidth))
    shape = PipelineShape(size=ranks, microbatches=turns, schedule=schedule)
    plan = planner.plan(shape, free=True)
    found = planner.suited(plan)
    assert found.predicted.step_time_s <= share * plan.predicted.step_time_s
    assert found is plan or found.predicted.step_time_s < plan.predicted.step_time_s
    assert verify(found, model, inputs).worst[1] <= (1e-6 if build is tied else 1e-9)
    again = Plan.from_dict(found.to_dict())
    assert again.pipeline == found.pipeline
    assert planner.suited(found).predicted.step_time_s <= found.predicted.step_time_s


def test_a_stage_that_cannot_make_the_step_shorter_is_not_planned_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where stages are left as they are by their bounds, no plan of them makes the step shorter."""
    model, inputs = stack()
    planner = planner_of(trace(model, inputs, fold=True), near_ranks(4, 1e9))
    plan = planner.plan(PipelineShape(size=4, microbatches=16, schedule="zero-bubble"), free=True)
    tried: list[tuple[float, float]] = []
    at_best, kept = CriticalStages._at_best, CriticalStages._kept

    def noted(self: CriticalStages, stage: int) -> float:
        tried.append((at_best(self, stage), self.time.step_s))
        return 0.0  # as if all could be

    monkeypatch.setattr(CriticalStages, "_at_best", noted)

    def checked(self: CriticalStages, aims: Any, plans: list[Plan] | None) -> bool:
        if plans is not None:
            least_s, now_s = tried[-1]
            assert self._time(plans).step_s >= min(least_s, now_s) * (1 - 1e-9)
        return kept(self, aims, plans)

    monkeypatch.setattr(CriticalStages, "_kept", checked)
    every = planner.suited(plan)
    assert tried and min(least_s / now_s for least_s, now_s in tried) < 1
    assert any(least_s >= now_s * (1 - 1e-3) for least_s, now_s in tried)
    monkeypatch.undo()
    assert planner.suited(plan).predicted.step_time_s == every.predicted.step_time_s


def test_what_does_not_fit_is_not_taken() -> None:
    """GPT-2's faster stages need more memory."""
    model, inputs = tied()
    planner = planner_of(trace(model, inputs, fold=True), near_ranks(2, 1e9))
    plan = planner.plan(PipelineShape(size=2, microbatches=2, schedule="1f1b"), free=True)
    faster = planner.suited(plan)
    assert plan.pipeline is not None and faster.pipeline is not None
    assert faster.predicted.step_time_s < plan.predicted.step_time_s
    need = max(faster.pipeline.peaks)
    assert need > max(plan.pipeline.peaks)
    within = planner.under(need - 1).suited(plan)
    assert within.pipeline is not None
    assert max(within.pipeline.peaks) < need
    assert within.predicted.step_time_s > faster.predicted.step_time_s


@pytest.mark.parametrize(
    "share",
    [0.85, *(pytest.param(share, marks=pytest.mark.slow) for share in (0.98, 0.7))],
)
def test_stages_that_a_limit_binds_stay_as_they_are(share: float) -> None:
    model, inputs = t5()
    traced, cluster = trace(model, inputs, fold=True), near_ranks(2, 1e9)
    pins = Constraints.parse({"pipeline": {"size": 2, "microbatches": 2, "schedule": "1f1b"}})
    free = plan_step(traced, cluster, constraints=pins)
    limit = int(share * free.predicted.peak_memory_bytes)
    plan = plan_step(traced, cluster, constraints=pins, memory_limit=limit)
    assert plan.pipeline is not None
    assert max(plan.pipeline.peaks) <= limit
    assert plan.predicted.peak_memory_bytes <= limit
    assert plan.predicted.step_time_s >= free.predicted.step_time_s * (1 - 1e-9)


def test_values_that_a_stage_chooses_are_sent_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends of each transfer agree, and the seconds of transfers are those of the plan."""
    wanted: list[int] = []
    own = CriticalStages._wanted

    def noted(self: CriticalStages, stage: int, aim: Any) -> Any:
        found = own(self, stage, aim)
        wanted.extend(found or ())
        return found

    monkeypatch.setattr(CriticalStages, "_wanted", noted)
    model, inputs = tied()
    cluster = near_ranks(2, 1e9)
    planner = planner_of(trace(model, inputs, fold=True), cluster)
    plan = planner.plan(PipelineShape(size=2, microbatches=2, schedule="1f1b"), free=True)
    found = planner.suited(plan)
    assert set(wanted) == {0} and found.pipeline is not None
    parts = planner.parts(2, found.pipeline.cuts)
    changed = 0
    for transfer in parts.crossings():
        ends = [found.pipeline.stages[s] for s in (transfer.source, transfer.target)]
        sent = next(o for o in parts.model(transfer.source).outputs if o.target == transfer.value)
        before = plan.pipeline.stages[transfer.target] if plan.pipeline is not None else None
        assert ends[0].inputs[sent.port] == ends[1].inputs[transfer.value]
        assert before is not None
        changed += before.inputs[transfer.value] != ends[1].inputs[transfer.value]
    assert changed
    seconds = transfer_seconds(parts.crossings(), found.pipeline.stages, planner.rank_cluster(2), 2)
    assert len(seconds) == 1 and seconds[0] > 0


def test_a_stage_is_explained_as_it_was_planned() -> None:
    model, inputs = stack()
    cluster = near_ranks(2, 1e8)
    pins = {"pipeline": {"size": 2, "microbatches": 4, "schedule": "zero-bubble"}}
    plan = autopar.plan(model, cluster, inputs, constraints=pins, fusion=False)
    assert plan.pipeline is not None
    waits = [stage.solver.waits for stage in plan.pipeline.stages]
    assert len(set(waits)) == 2
    assert plan.solver.bound <= plan.predicted.step_time_s
    for number, stage in enumerate(plan.pipeline.stages):
        name = next(iter(stage.parameters))
        found = explain(plan, param=name, model=model, example_inputs=inputs)
        assert found.stage == number
        assert found.unlimited is not None and found.unlimited.plan is not None
        own_s = stage.solver.objective
        assert found.unlimited.plan.solver.objective == pytest.approx(own_s, rel=1e-6)


def test_ranks_that_each_planned_agree() -> None:
    """Solving takes other seconds each time; layouts of one stage are another plan."""
    model, inputs = stack()
    pins = {"pipeline": {"size": 2, "microbatches": 4, "schedule": "zero-bubble"}}
    first, second = (
        autopar.plan(model, near_ranks(2, 1e8), inputs, constraints=pins, cache=False)
        for _ in range(2)
    )
    assert first.pipeline is not None and second.pipeline is not None
    seconds = [s.solver.seconds for p in (first, second) for s in p.pipeline.stages]
    assert len(set(seconds)) == len(seconds)
    assert first.digest() == second.digest() == Plan.from_dict(first.to_dict()).digest()
    one, *others = first.pipeline.stages
    name, layout = next(iter(one.parameters.items()))
    other = tuple(Replicate() if p.is_shard else Shard(0) for p in layout)
    changed = replace(one, parameters=one.parameters | {name: other})
    other_plan = replace(first, pipeline=replace(first.pipeline, stages=(changed, *others)))
    assert other_plan.digest() != first.digest()


def _train(rank: int) -> dict[str, float]:
    from torch.distributed.device_mesh import init_device_mesh

    model, inputs = stack()
    single, _ = stack()
    cluster = near_ranks(2, 1e8)
    pins = {"pipeline": {"size": 2, "microbatches": 4, "schedule": "zero-bubble"}}
    plan = autopar.plan(model, cluster, inputs, constraints=pins, fusion=False, cache=False)
    assert plan.pipeline is not None
    assert len({stage.solver.waits for stage in plan.pipeline.stages}) == 2
    mesh = init_device_mesh("cpu", (4,))
    parallel = autopar.parallelize(model, mesh, inputs, plan=plan, cache=False)
    ours = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    theirs = torch.optim.AdamW(single.parameters(), lr=1e-3)
    for _ in range(3):
        loss, expected = parallel.train_step(**inputs), single(**inputs)
        expected.backward()
        assert abs(float(loss) - float(expected)) <= 1e-9 * abs(float(expected))
        ours.step(), theirs.step()
        ours.zero_grad(), theirs.zero_grad()
    named = dict(single.named_parameters())
    return {
        name: float((p.full_tensor() - named[name]).norm() / named[name].norm())
        for name, p in parallel.named_parameters()
    }


def test_uneven_stages_train_on_gloo_ranks() -> None:
    errors = {n: e for result in run_ranks(_train, 4, timeout=300) for n, e in result.items()}
    assert len(errors) == len(list(stack()[0].parameters()))
    assert max(errors.values()) <= 1e-9


class Skipped(nn.Module):
    """What the first stage makes is read by the last one, and handed on by those between."""

    def __init__(self, depth: int, width: int = 64) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        kept = self.first(x)
        y = kept
        for layer in self.layers:
            y = torch.tanh(layer(y))
        return (y + kept).square().mean()


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_what_is_handed_on_in_another_layout_counts_in_the_part_that_it_is_priced_in(
    schedule: str,
) -> None:
    """The search's seconds are compared with the plan's own where a stage is solved."""
    model, inputs = Skipped(7).double().train(), {"x": torch.randn(32, 64).double()}
    planner = planner_of(trace(model, inputs, fold=True), near_ranks(4, 1e8))
    plan = planner.plan(PipelineShape(size=4, microbatches=4, schedule=schedule), free=True)
    assert plan.pipeline is not None
    parts, cluster = planner.parts(4, plan.pipeline.cuts), planner.rank_cluster(4)
    stage = parts.stages.models[1]
    received = [s.node for s in stage.inputs if s.kind == "received"]
    # a value and its gradient on the way back share the layout of a port, at each end
    ends = {o.node: o.port for o in stage.outputs if o.kind == "sent" and o.node in received}
    assert len(ends) == 2 and set(ends) == set(ends.values())
    first = next(n for n in received if n in ends)
    seconds = set[float]()
    for arrives, leaves in ((Shard(0), Shard(1)), (Shard(1), Replicate()), (Replicate(), Shard(0))):
        settled = dict.fromkeys(received, (Shard(0),))
        settled |= {first: (arrives,), ends[first]: (leaves,)}
        aim = Aim(Waits(forward=0.5, inputs=0.25, weights=0.125))
        found = planner.solve(parts, plan.pipeline.cuts, 1, cluster, settled, None, aim)
        assert (found.inputs[first], found.inputs[ends[first]]) == ((arrives,), (leaves,))
        seconds.add(found.solver.objective)
    assert len(seconds) > 1
