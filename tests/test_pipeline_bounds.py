"""Bounds of pipelines: below all that can be pinned, and the time of schedules of equal blocks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autopar.core.constraints import Constraints, PipelinePin
from autopar.core.graph import TracedModel
from autopar.core.list_schedule import RankLoad, list_schedule, most_ahead
from autopar.core.plan import Plan
from autopar.core.schedule import Orders, actions, orders_of
from autopar.cost_model import Cluster, CollectiveKind
from autopar.cost_model.pipeline import simulate_pipeline
from autopar.cost_model.stages import action_seconds, transfer_seconds
from autopar.errors import ConstraintError, InfeasiblePlanError
from autopar.report.summary import render_summary
from autopar.search.pipeline_shapes import Shapes
from autopar.search.pipelining import _Search, plan_step
from autopar.search.shape_bounds import CLOSEST
from autopar.search.stage_planning import StagePlanner
from autopar.search.step_limits import StepLimits
from autopar.solver.fit import UNLIMITED
from autopar.solver.offers import Offers
from autopar.solver.pipelines.balanced_cuts import _on_the_clock, balanced_cuts, expected_seconds
from autopar.solver.pipelines.cuts import least_cuts, runs_of
from autopar.solver.pipelines.floor import Floors
from autopar.solver.pipelines.functionals import functionals
from autopar.solver.pipelines.ideal import BlockWork
from autopar.solver.pipelines.pipeline_shape import (
    PipelineShape,
    least_seconds,
)
from autopar.solver.pipelines.turn import WIDE, Turn
from autopar.solver.pipelines.windows import Window, WindowKind, kinds_for, runs_with
from autopar.tracer.trace import trace
from tests import zoo
from tests.test_critical_stages import near_ranks, planner_of
from tests.test_pipeline_search import nodes_apart, stack

ROUNDING = 1 + 1e-6  # the solver's own tolerance


class Uneven(nn.Module):
    """Blocks of several widths, then a head that is as much as two of them."""

    def __init__(self) -> None:
        super().__init__()
        widths = (64, 256, 64, 128, 512, 64)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(128, w), nn.ReLU(), nn.Linear(w, 128)) for w in widths
        )
        self.head = nn.Linear(128, 1024)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x).square().mean()


@cache
def small(name: str) -> TracedModel:
    if name == "stack":
        return stack(4)[2]
    if name == "folded":
        return stack(9)[2]
    if name == "uneven":
        return trace(Uneven().double().train(), {"x": torch.randn(32, 128).double()})
    model, inputs = zoo.MODELS[name]()
    return trace(model.train(), inputs)


def planned(traced: TracedModel, limit: int | None = None, **pins: Any) -> Plan | None:
    try:
        return plan_step(
            traced, nodes_apart(), constraints=Constraints.parse(pins), memory_limit=limit
        )
    except (ConstraintError, InfeasiblePlanError):
        return None


def pinned(traced: TracedModel, blocks: list[str], turns: tuple[int, ...]) -> list[dict[str, Any]]:
    """Pipelines of all sizes, schedules, some microbatches, and balanced and odd cuts."""
    found: list[dict[str, Any]] = [{"size": 1, "microbatches": m} for m in turns]
    for size, m in itertools.product((2, 4), turns):
        for schedule in ("gpipe", "1f1b", "zero-bubble", "automatic"):
            if m < size:
                continue
            found.append({"size": size, "microbatches": m, "schedule": schedule})
            if size == 2 and not traced.repeats:
                found += [{**found[-1], "cuts": [cut]} for cut in (blocks[1], blocks[-1])]
        if len(blocks) >= 2 * size and m % size == 0:
            found.append({"size": size, "microbatches": m, "schedule": "interleaved"})
    return found


@pytest.mark.parametrize(
    ("name", "share", "turns"),
    [
        ("stack", None, (4,)),
        pytest.param("uneven", None, (4,), marks=pytest.mark.slow),
        pytest.param("stack", 1.02, (4,), marks=pytest.mark.slow),
        *(pytest.param(n, s, (2, 4, 8), marks=pytest.mark.slow)
          for n, s in [("uneven", 1.02), ("folded", None), ("gpt2", None), ("llama", 1.02)]),
    ],
)  # fmt: skip
def test_no_plan_that_can_be_pinned_is_below_the_bound(
    name: str, share: float | None, turns: tuple[int, ...]
) -> None:
    traced = small(name)
    limit = None
    if share is not None:
        free = planned(traced, pipeline={"size": 2, "microbatches": 4, "schedule": "1f1b"})
        assert free is not None
        limit = int(share * free.predicted.peak_memory_bytes)
    best = planned(traced, limit)
    assert best is not None
    report = best.solver
    assert 0 < report.bound <= report.objective
    assert report.gap == pytest.approx(1 - report.bound / report.objective)
    # a plan in one piece has no rivals but those that save as much as is wanted of a pipeline
    share_of_bound = 1.0 if best.pipeline is not None else 0.95
    work = StagePlanner(traced, nodes_apart(), Constraints(), limit, "adamw", Offers(nodes_apart()))
    seen = 0
    loose: dict[str, Plan | None] = {}
    for pin in pinned(traced, work.work.names, turns):
        plan = planned(traced, limit, pipeline=pin)
        if plan is None:
            continue
        seen += 1
        seconds = plan.predicted.step_time_s
        assert plan.solver.bound <= seconds * ROUNDING, pin
        assert share_of_bound * min(report.bound, best.predicted.step_time_s) <= seconds * ROUNDING
        if pin.get("schedule") in ("1f1b", "zero-bubble", "automatic"):
            free_pin = {k: pin[k] for k in ("size", "microbatches")}
            if str(free_pin) not in loose:
                loose[str(free_pin)] = planned(traced, limit, pipeline=free_pin)
            other = loose[str(free_pin)]
            assert other is not None
            assert other.solver.bound <= seconds * ROUNDING, pin
    assert seen > 3


@pytest.mark.parametrize("name", ["stack", "uneven"])
@pytest.mark.parametrize("size", [2, 4])
def test_more_turns_take_no_less(name: str, size: int) -> None:
    planner = StagePlanner(
        small(name), nodes_apart(), Constraints(), None, "adamw", Offers(nodes_apart())
    )
    few = PipelineShape(size=size, microbatches=size, schedule="1f1b")
    assert planner.coarser(few) == []
    before = planner.turn(few)
    for turns in (2 * size, 4 * size):
        many = replace(few, microbatches=turns)
        (coarse, *_) = planner.coarser(many)
        found = planner.turn(many)
        for part, seconds in coarse.found.items():
            assert (seconds <= found.found[part] * ROUNDING).all(), part
        assert (coarse.step == before.step).all()
    assert planner.coarser(replace(few, microbatches=2 * size + 1)) == []


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize(
    "name", ["uneven", "folded", "gpt2", pytest.param("t5", marks=pytest.mark.slow)]
)
def test_no_stage_takes_less_than_its_blocks_and_what_is_around_them(
    name: str, tensor: int
) -> None:
    """Each part of a step, with what the stages have in common (gpt2's head is its embedding)."""
    pins = Constraints.parse({"tensor": {"mode": "1d", "size": tensor}} if tensor > 1 else {})
    planner = StagePlanner(small(name), nodes_apart(), pins, None, "adamw", Offers(nodes_apart()))
    free = StagePlanner(
        small(name), nodes_apart(), Constraints(), None, "adamw", Offers(nodes_apart())
    )
    shape = PipelineShape(size=2, microbatches=4, schedule="zero-bubble")
    turn, names = free.turn(shape), planner.work.names
    plan = planner.plan(shape, free=True)
    assert plan.pipeline is not None
    starts = [names.index(cut) for cut in plan.pipeline.cuts]
    for number, stage in enumerate(plan.pipeline.stages):
        took = action_seconds(stage)
        phases = stage.predicted.phases
        m = shape.microbatches
        inputs = took["I"] if number else took["B"]  # nobody waits for the first one's
        weights = took["B"] - took["I"] if number else 0.0
        once = (phases["finish"], stage.predicted.update_s)
        parts = (phases["prepare"], m * took["F"], m * inputs, m * weights, *once)
        for part, counts in functionals(m, 2 * shape.size - 1).items():
            seconds = sum(a * b for a, b in zip(counts, parts, strict=True))
            if part == "weights" and not number:
                continue
            least = np.split(turn.found[part], starts)[number].sum()
            assert least <= seconds * ROUNDING + 1e-12, (number, part)  # and what breaks ties
        assert np.split(turn.of_turn("backward"), starts)[number].sum() <= took["B"] * ROUNDING
    # the last block's seconds are those of the head, too
    inner, last = turn.step[-2:] if name in ("uneven", "folded") else (0.0, 1.0)
    assert last > inner


@pytest.mark.parametrize("name", ["stack", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_no_stage_takes_less_than_its_blocks_in_a_row(name: str) -> None:
    """What equal blocks hand on to each other is counted, beside what each does."""
    model, inputs = zoo.gpt2(layers=12) if name == "gpt2" else stack(14)[:2]
    traced, cluster = trace(model.train(), inputs, fold=True), near_ranks(2, 1e9)
    planner = planner_of(traced, cluster)
    shape = PipelineShape(size=2, microbatches=4, schedule="automatic")
    alone = planner.turn(shape)
    for part in WIDE:
        planner.widen(shape, WindowKind(part, 4))
        planner.widen(shape, WindowKind(part, 3, last=True))
    wide = planner.turn(shape)
    assert {window.name for window in wide.windows} == {*WIDE}
    if name == "gpt2":  # with embeddings and a head beside the blocks, which windows count, too
        assert wide.beside["step"][0] > 0 and wide.beside["step"][-1] > 0
    plan = planner.plan(shape, free=True)
    assert plan.pipeline is not None
    ends = [0, *(planner.work.names.index(c) for c in plan.pipeline.cuts), len(planner.work.names)]
    higher = False
    for number, stage in enumerate(plan.pipeline.stages):
        run = ends[number], ends[number + 1]
        took = action_seconds(stage)
        phases, m = stage.predicted.phases, shape.microbatches
        inputs = took["I"] if number else took["B"]
        weights = took["B"] - took["I"] if number else 0.0
        once = (phases["finish"], stage.predicted.update_s)
        parts = (phases["prepare"], m * took["F"], m * inputs, m * weights, *once)
        for part in WIDE:
            counts = functionals(m, shape.size * 2 - 1)[part]
            seconds = sum(a * b for a, b in zip(counts, parts, strict=True))
            assert wide.runs(part)[run] <= seconds * ROUNDING + 1e-12, (number, part)
            assert wide.runs(part)[run] >= alone.runs(part)[run] * (1 - 1e-9)
            higher |= bool(wide.runs(part)[run] > alone.runs(part)[run] * (1 + 1e-6))
    assert higher
    least_s = [least_seconds(shape, turn, 0.0, planner.work.joint) for turn in (alone, wide)]
    assert least_s[0] <= least_s[1] <= plan.predicted.step_time_s * ROUNDING


@pytest.mark.parametrize("seed", range(10))
def test_runs_are_the_best_sums_of_blocks_and_windows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    seconds = rng.uniform(0.5, 1.0, 8)
    windows = [
        Window(length, tuple(rng.choice(9 - length, 3, replace=False).tolist()),
               "step", rng.uniform(0.8, 1.2, 3) * length)
        for length in (2, 3)
    ]  # fmt: skip
    found = runs_with(seconds, "step", windows)
    assert (runs_with(seconds, "end", windows) == runs_of(seconds)).all()

    def best(i: int, j: int) -> float:
        if i == j:
            return 0.0
        options = [best(i, j - 1) + seconds[j - 1]]
        for w in windows:
            if j - w.length >= i and j - w.length in w.starts:
                taken = float(w.found[w.starts.index(j - w.length)])
                options.append(best(i, j - w.length) + taken)
        return max(options)

    for i, j in itertools.combinations(range(9), 2):
        assert found[i, j] == pytest.approx(best(i, j), rel=1e-12)
    assert np.isinf(found[np.tril_indices(9)]).all()


def test_what_crosses_takes_no_longer_than_its_transfer() -> None:
    planner = StagePlanner(
        small("folded"), nodes_apart(), Constraints(), None, "adamw", Offers(nodes_apart())
    )
    batch, width, itemsize = 64, 256, 8
    assert planner.work.crossing_bytes == batch * width * itemsize
    plan = planner.plan(PipelineShape(size=2, microbatches=4, schedule="1f1b"), free=True)
    assert plan.pipeline is not None
    parts, mesh = planner.parts(4, plan.pipeline.cuts), planner.rank_cluster(2)
    (took_s,) = transfer_seconds(parts.crossings(), plan.pipeline.stages, mesh, 2)
    line = replace(mesh, mesh_shape=(2, *mesh.mesh_shape), axis_names=("pipeline", "inner"))
    least = planner.work.crossing_bytes // (4 * mesh.num_devices)
    assert line.collective_seconds(CollectiveKind("send_recv"), least, 0) <= took_s


@pytest.mark.parametrize("turns", [2, 8])
def test_a_constant_that_is_repeated_for_each_sample_is_split_over_the_turns(turns: int) -> None:
    """The gradient of a mean is one number, for all elements of what went in."""
    wide = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 4096))

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = wide

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x).square().mean()

    traced = trace(Mean().double().train(), {"x": torch.randn(2048, 64).double()})
    cluster = nodes_apart(1e-9, 1e13)
    planner = planner_of(traced, cluster)
    shape = PipelineShape(size=2, microbatches=turns, schedule="1f1b")
    plan = planner.plan(shape, free=True)
    assert plan.pipeline is not None
    starts = [planner.work.names.index(cut) for cut in plan.pipeline.cuts]
    ideal = Turn.ideal(planner.work, turns, 2, 2)
    for turn in (ideal, planner.turn(shape)):
        least_s = least_seconds(shape, turn, 0.0, planner.work.joint, starts)
        assert 0 < least_s <= plan.predicted.step_time_s * ROUNDING


@pytest.mark.parametrize(("p", "m"), [(2, 2), (2, 8), (4, 4), (4, 16)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_the_bound_of_equal_blocks_is_the_time_of_the_schedule(
    p: int, m: int, schedule: str
) -> None:
    blocks, one = 3 * p, np.full(3 * p, 1.0)
    shape = PipelineShape(size=p, microbatches=m, schedule=schedule)
    turn = Turn.exact(m, p, (0 * one, m * one, m * one, m * one, 0 * one, 0 * one))
    seconds = [{"F": 3.0, "B": 6.0, "I": 3.0, "W": 3.0}] * p
    hop_s = 0.25
    took = simulate_pipeline(actions(schedule, p, m), seconds).step_s
    even = [3 * r for r in range(1, p)]
    joint = [False] * blocks
    assert least_seconds(shape, turn, 0.0, joint, even) == pytest.approx(took, rel=1e-12)
    slower = simulate_pipeline(actions(schedule, p, m), seconds, hop_s).step_s
    assert least_seconds(shape, turn, hop_s, joint, even) <= slower
    # no blocks but three at a time are apart: these cuts are all that there are
    threes = [i % 3 > 0 for i in range(blocks)]
    assert least_seconds(shape, turn, 0.0, threes) == pytest.approx(took, rel=1e-12)


def test_no_exchange_of_unequal_neighbours_makes_the_cuts_faster() -> None:
    """Equal blocks, of which the last one has the head."""
    rng, p, m = np.random.default_rng(0), 8, 16
    shape, gained = PipelineShape(size=p, microbatches=m, schedule="automatic"), 0
    for _ in range(24):
        n, once = int(rng.integers(2 * p, 6 * p)), rng.uniform(0.5, 6.0)
        block = np.array([once, m, m * rng.uniform(1.0, 1.2), m * rng.uniform(0.8, 1.1), once, 0])
        parts = np.repeat(block[:, None], n, axis=1)
        parts[:, -1] *= rng.uniform(1.5, 3.0)
        turn, joint = Turn.exact(m, 2 * p - 1, list(parts)), [False] * n
        work = cast(BlockWork, SimpleNamespace(names=list(map(str, range(n))), joint=joint))
        starts = [int(cut) for cut in balanced_cuts(work, shape, turn)]
        lengths = np.diff([0, *starts, n]).tolist()
        took = _on_the_clock(shape, turn, starts, [0.0] * p)
        for r in range(p - 1):
            other = [*lengths[:r], lengths[r + 1], lengths[r], *lengths[r + 2 :]]
            assert took <= _on_the_clock(shape, turn, np.cumsum(other)[:-1].tolist(), [0.0] * p)
        gained += took < expected_seconds(work, shape, turn) * (1 - 1e-3)
    assert gained


@pytest.mark.parametrize("p", [2, 3])
def test_interleaved_equal_blocks_take_what_the_bound_says(p: int) -> None:
    m, one = 2 * p, np.full(2 * p, 1.0)
    shape = PipelineShape(size=p, microbatches=m, schedule="interleaved", chunks=2)
    turn = Turn.exact(m, p, (0 * one, m * one, m * one, m * one, 0 * one, 0 * one))
    took = simulate_pipeline(
        actions("interleaved", p, m, 2), [{"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}] * 2 * p
    ).step_s
    found = least_seconds(shape, turn, 0.0, [False] * 2 * p, list(range(1, 2 * p)))
    assert found == pytest.approx(took, rel=1e-12)


def orders_for(
    schedule: str,
    seconds: Sequence[Mapping[Any, float]],
    turns: int,
    hop_s: float,
    begin_s: Sequence[float],
    rng: np.random.Generator,
    chunks: int = 1,
) -> Orders:
    """Those of a schedule; of automatic ones any, with less to begin with than they may have."""
    ranks = len(seconds) // chunks
    if schedule != "automatic":
        return actions(schedule, ranks, turns, chunks)
    loads = [
        RankLoad(forward_s=s["F"], input_s=s["I"], weight_s=s["W"], begin_s=b)
        for s, b in zip(seconds, begin_s, strict=True)
    ]
    warmup = [int(rng.integers(1, most + 1)) for most in most_ahead(ranks, turns)]
    if rng.random() < 0.5:
        warmup = list(most_ahead(ranks, turns))
    transfer_s, patience = [hop_s] * (ranks - 1), float(rng.choice([0.0, 0.5, 1.0]))
    listed = list_schedule(loads, turns, transfer_s, warmup=warmup, patience=patience)
    return orders_of(listed.kinds)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble", "automatic"])
def test_no_cut_is_faster_than_the_bound_of_unequal_blocks(seed: int, schedule: str) -> None:
    rng = np.random.default_rng(seed)
    p, blocks = int(rng.integers(2, 5)), 7
    m = int(rng.integers(p, 3 * p))
    forward, inputs, weights = rng.uniform(0.2, 2.0, (3, blocks))
    prepare, finish, update = rng.uniform(0.0, 2.0, (3, blocks))
    shape = PipelineShape(size=p, microbatches=m, schedule=schedule)
    ahead = 2 * p - 1 if schedule == "automatic" else p
    parts = (prepare, m * forward, m * inputs, m * weights, finish, update)
    turn = Turn.exact(m, ahead, parts)
    joint = [False, *(bool(x) for x in rng.random(blocks - 1) < 0.2)]
    took: dict[tuple[int, ...], float] = {}
    for starts in itertools.combinations([i for i in range(1, blocks) if not joint[i]], p - 1):
        parts = [np.split(x, starts) for x in (forward, inputs, weights)]
        seconds = [
            {"F": f.sum(), "I": i.sum(), "W": w.sum(), "B": (i + w).sum()}
            for f, i, w in zip(*parts, strict=True)
        ]
        begin_s = [x.sum() for x in np.split(prepare, starts)]
        orders = orders_for(schedule, seconds, m, 0.1, begin_s, rng)
        ends = simulate_pipeline(orders, seconds, 0.1, begin_s=begin_s).finish_s()
        after = np.split(finish, starts)
        took[starts] = max(e + x.sum() for e, x in zip(ends, after, strict=True))
        took[starts] += max(x.sum() for x in np.split(update, starts))
        alone = least_seconds(shape, turn, 0.1, joint, starts)
        assert alone <= took[starts] * (1 + 1e-12)
    if took:
        found = least_seconds(shape, turn, 0.1, joint)
        each = [least_seconds(shape, turn, 0.1, joint, s) for s in took]
        assert found == pytest.approx(min(each), rel=1e-12)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble", "automatic", "interleaved"])
def test_no_schedule_of_unequal_stages_is_below_the_bound(schedule: str) -> None:
    """Also with fewer microbatches than ranks, several stages on a rank, and slow transfers."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        chunks = 2 if schedule == "interleaved" else 1
        p = int(rng.integers(2, 5))
        turns = {"interleaved": p * np.arange(1, 4), "zero-bubble": np.arange(p, 3 * p)}
        m = int(rng.choice(turns.get(schedule, np.arange(1, 3 * p))))
        stages = p * chunks
        forward, inputs, weights = rng.uniform(0.0, 2.0, (3, stages))
        prepare, finish, update = rng.uniform(0.0, rng.choice([0.1, 10.0]), (3, stages))
        hop_s = float(rng.choice([0.0, 0.3]))
        ahead = 2 * p - 1 if schedule == "automatic" else p
        parts = (prepare, m * forward, m * inputs, m * weights, finish, update)
        turn = Turn.exact(m, ahead, parts)
        shape = PipelineShape(size=p, microbatches=m, schedule=schedule, chunks=chunks)
        seconds = [
            {"F": f, "I": i, "W": w, "B": i + w}
            for f, i, w in zip(forward, inputs, weights, strict=True)
        ]
        begin_s = prepare.reshape(chunks, p).sum(axis=0).tolist()
        orders = orders_for(schedule, seconds, m, hop_s, begin_s, rng, chunks)
        ends = simulate_pipeline(orders, seconds, hop_s, begin_s=begin_s).finish_s()
        took = max(np.array(ends) + finish.reshape(chunks, p).sum(axis=0))
        took += update.reshape(chunks, p).sum(axis=0).max()
        found = least_seconds(shape, turn, hop_s, [False] * stages, list(range(1, stages)))
        assert found <= took * (1 + 1e-12), (p, m)


@pytest.mark.parametrize("seed", range(10))
def test_cuts_are_the_best_of_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    blocks, p = 8, 3
    stages = runs_of(rng.uniform(0.1, 1.0, blocks))
    ranks = [stages + rng.uniform(0.0, 1.0, (blocks + 1, blocks + 1)) for _ in range(p)]
    joint = [False, *(bool(x) for x in rng.random(blocks - 1) < 0.3)]
    known: dict[tuple[int, ...], tuple[float, float]] = {}
    for starts in itertools.combinations([i for i in range(1, blocks) if not joint[i]], p - 1):
        runs = list(zip([0, *starts], [*starts, blocks], strict=True))
        last = max(ranks[r][i, j] for r, (i, j) in enumerate(runs))
        known[starts] = last, sum(stages[i, j] ** 2 for i, j in runs)
    least, found = least_cuts(ranks, stages, joint)
    assert least == pytest.approx(min(last for last, _ in known.values()))
    best = min(s for last, s in known.values() if last <= least * (1 + 1e-9))
    assert known[tuple(found)][1] == pytest.approx(best)


def test_what_was_not_chosen_is_told() -> None:
    traced = stack(4)[2]
    plan = planned(traced)
    assert plan is not None
    assert plan.pipeline is not None
    assert 0 < len(plan.considered) <= 12
    bounds = [row.bound_s for row in plan.considered if row.bound_s is not None]
    assert bounds == sorted(bounds)
    chosen = f"{plan.pipeline.size} ranks, {plan.pipeline.microbatches} microbatches"
    assert chosen not in {row.shape for row in plan.considered}
    assert all(row.why for row in plan.considered)
    assert Plan.from_dict(plan.to_dict()).considered == plan.considered
    again = planned(stack(4)[2])
    assert again is not None
    assert again.considered == plan.considered
    shown = render_summary(plan, 200)
    assert plan.considered[0].shape in shown
    one = planned(traced, pipeline="none")
    assert one is not None
    assert one.considered == ()


def test_what_cannot_be_is_told_with_its_reason() -> None:
    model, inputs = zoo.resnet()
    plan = planned(trace(model.train(), inputs))
    assert plan is not None
    assert plan.pipeline is None
    near = replace(nodes_apart(1e-6, 1e12))
    plain = plan_step(stack(4)[2], near, constraints=Constraints())
    assert plain.pipeline is None
    assert plain.considered
    assert all(row.why.startswith("bound") for row in plain.considered)


def test_a_shape_that_does_not_fit_says_what_it_needs() -> None:
    traced = stack(4, 32)[2]
    one = Cluster.from_profile("cpu-gloo", devices_per_node=1)
    with pytest.raises(InfeasiblePlanError) as told:
        plan_step(traced, one, constraints=Constraints.parse({"pipeline": "none"}), memory_limit=1)
    assert told.value.required_bytes is not None
    pins = Constraints.parse({"pipeline": {"size": 1}})
    plan = plan_step(traced, one, constraints=pins, memory_limit=told.value.required_bytes - 1)
    assert plan.pipeline is not None
    (row,) = (r for r in plan.considered if r.shape == "1 rank, 1 microbatch")
    assert row.why.startswith("needs")


def test_devices_near_each_other() -> None:
    cluster = Cluster.from_profile("cpu-gloo")
    plan = plan_step(small("gpt2"), cluster, constraints=Constraints())
    assert plan.pipeline is None
    assert plan.solver.gap <= 0.01


def test_whole_runs_are_bounded_in_what_tells() -> None:
    """What is left out would hardly raise the bound."""
    traced, cluster = stack(14)[2], near_ranks(4, 1e9)
    search = _Search(StepLimits(traced, cluster, Constraints()), UNLIMITED)
    shapes = Shapes(search.planner, PipelinePin(size=4, microbatches=16), short=True)
    (shape,) = shapes.known
    while not shapes.is_close(shape):
        shapes.closer(shape)
    close_s = shapes.known[shape].bound_s
    shapes.close_least(math.inf)
    known = shapes.known[shape]
    assert known.bound_s > close_s
    every = {kind for name in WIDE for kind in kinds_for(name, 14, 4)}
    assert 0 < len(known.wide) < len(every)
    for kind in every - known.wide:
        search.planner.widen(shape, kind)
    assert shapes._bound(shape, known.level) <= known.bound_s * (1 + 1e-2)


def test_each_level_of_a_bound_tells_more() -> None:
    traced, cluster = stack(14)[2], near_ranks(4, 1e9)
    planner = planner_of(traced, cluster)
    shapes = Shapes(planner, PipelinePin(size=4, microbatches=4), short=False)
    (shape,) = shapes.known
    found = [shapes.known[shape].bound_s]
    while not shapes.is_close(shape):
        shapes.closer(shape)
        found.append(shapes.known[shape].bound_s)
    assert found == sorted(found)
    assert len(set(found)) == CLOSEST + 1


def test_of_shapes_to_be_ruled_out_that_of_the_fewest_turns_comes_first(monkeypatch) -> None:
    traced, cluster = stack(14)[2], near_ranks(4, 1e9)
    planner = planner_of(traced, cluster)
    shapes = Shapes(planner, PipelinePin(size=4), short=False)
    asked: list[PipelineShape] = []
    closer = shapes.closer
    monkeypatch.setattr(shapes, "closer", lambda shape: (asked.append(shape), closer(shape))[1])
    first = min(shapes.known, key=lambda s: shapes.known[s].bound_s)
    shapes.most_promising(1.2 * shapes.known[first].bound_s)
    assert asked[0].microbatches == min(s.microbatches for s in shapes.known)
    assert asked[0].microbatches < first.microbatches


def test_sums_found_behind_those_of_whole_steps_are_those_found_with_them(monkeypatch) -> None:
    traced, cluster = stack(14)[2], near_ranks(4, 1e9)
    shape = PipelineShape(size=4, microbatches=16, schedule="1f1b")
    once, planner = planner_of(traced, cluster), planner_of(traced, cluster)
    whole = once.turn(shape)
    few = planner.turn(shape, ("step",))
    assert np.array_equal(few.step, whole.step)
    assert all((few.found[name] <= seconds).all() for name, seconds in whole.found.items())
    assert any((few.found[name] < seconds).any() for name, seconds in whole.found.items())
    asked: list[set[str]] = []
    found = Floors._found
    monkeypatch.setattr(Floors, "_found", lambda s, a, w: (asked.append(set(w)), found(s, a, w))[1])
    turn = planner.turn(shape)
    assert not any("step" in names for names in asked)  # known
    for mine, theirs in ((turn.found, whole.found), (turn.beside, whole.beside)):
        assert mine.keys() == theirs.keys()
        assert all(np.array_equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize(
    ("blocks", "ranks", "inside", "last"),
    [(126, 32, [3, 4], 4), (96, 32, [3], 3), (96, 16, [3, 6], 6), (80, 16, [4, 5], 5),
     (16, 8, [2], 2), (16, 16, [], 1), (8, 3, [2, 3], 3), (96, 8, [4, 6], 8)],
)  # fmt: skip
def test_windows_are_as_long_as_suits_a_rank(
    blocks: int, ranks: int, inside: list[int], last: int
) -> None:
    found = kinds_for("step", blocks, ranks)
    assert [k.length for k in found if not k.last] == inside
    assert [k.length for k in found if k.last] == list(range(1, last + 1))


@pytest.mark.parametrize("name", ["stack", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_the_last_blocks_take_no_less_than_one_by_one(name: str) -> None:
    """With what is around the last one, such as a head; in the unfolded graph it is the same."""
    model, inputs = zoo.gpt2(layers=8) if name == "gpt2" else stack(8)[:2]
    cluster = near_ranks(2, 1e9)
    shape = PipelineShape(size=2, microbatches=4, schedule="automatic")
    found = []
    for fold in (True, False):
        traced = trace(model.train(), inputs, fold=fold)
        planner = planner_of(traced, cluster)
        alone = planner.turn(shape)
        planner.widen(shape, WindowKind("step", 3, last=True))
        (window,) = planner.turn(shape).windows
        assert window.starts == (len(alone.step) - 3,)
        assert window.found[0] >= alone.step[-3:].sum() * (1 - 1e-9)
        found.append(window.found[0])
    assert found[0] == pytest.approx(found[1], rel=1e-3)
