"""The predicted step op by op: its sums are the plan's, folded or not, and its files are small."""

from __future__ import annotations

import gzip
import json
import math
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.core.constraints import Constraints, assign_mesh
from autopar.core.folding import unfolded
from autopar.core.plan import Plan
from autopar.core.timeline import Timeline, executed
from autopar.solver.breakdown import other_states, timeline
from autopar.solver.build import build_problem
from autopar.solver.discrete.problem import evaluate
from autopar.solver.pins import Pins
from autopar.solver.price import Decision, price
from autopar.solver.read_step import build_step
from autopar.solver.solve import solve
from autopar.tracer.trace import trace
from tests import handwritten as hw
from tests.folding import cluster
from tests.test_folding import TEXT, gpt2, llama

CASES: dict[str, tuple[Any, dict[str, Any], tuple[int, ...], dict[str, Any]]] = {
    "llama": (lambda: llama(9), TEXT, (2, 4), {}),
    "gpt2-zero": (lambda: gpt2(8), TEXT, (4,), {"data": 4, "zero": 3, "checkpoint": "selective"}),
    "mlp-2d": (lambda: hw.Mlp(16, 6), hw.vectors(), (2, 2), {"tensor": "2d"}),
}


@pytest.fixture(scope="module", params=CASES)
def planned(request: pytest.FixtureRequest) -> Plan:
    build, inputs, mesh, pins = CASES[request.param]
    return autopar.plan(build(), cluster(*mesh), inputs, constraints=pins)


def test_sums_are_the_plans(planned: Plan) -> None:
    predicted = planned.predicted
    ops = predicted.timeline.ops
    assert {op.name for op in ops} == set(planned.nodes)
    compute_s = sum(op.compute_s * op.times for op in ops)
    assert compute_s == pytest.approx(predicted.compute_time_s, rel=1e-8)
    assert sum(op.comm_s for op in ops) == pytest.approx(predicted.comm_time_s, rel=1e-8)
    found: Counter[tuple[int, str]] = Counter()
    for op in ops:
        for move in op.moves:
            found[move.axis, move.kind] += move.num_bytes * move.times
    expected = {(row.axis, row.kind): row.num_bytes for row in predicted.comm_bytes}
    assert found == expected
    assert max(sum(op.live) for op in ops) == predicted.peak_memory_bytes
    peak = next(op for op in ops if sum(op.live) == predicted.peak_memory_bytes)
    live = dict(zip(predicted.timeline.kinds, peak.live, strict=True))
    assert {k: v for k, v in live.items() if v} == dict(predicted.memory)


def test_communication_is_hidden_or_exposed(planned: Plan) -> None:
    """Each collective's parts add up, per axis and in the step; compute hides at most itself."""
    predicted = planned.predicted
    by_axis = [0.0] * len(planned.axis_names)
    for op in predicted.timeline.ops:
        for move in op.moves:
            assert 0 <= move.hidden_s <= move.seconds
            assert move.hidden_s + move.exposed_s == pytest.approx(move.seconds)
            by_axis[move.axis] += move.hidden_s * move.times
    assert predicted.hidden_comm_s == pytest.approx(tuple(by_axis), rel=1e-8)
    assert 0 <= predicted.hidden_time_s <= predicted.compute_time_s
    assert (predicted.hidden_time_s > 0) == (predicted.comm_time_s > 0)
    assert predicted.step_time_s == pytest.approx(
        predicted.compute_time_s + predicted.exposed_time_s + predicted.update_s, rel=1e-8
    )
    assert predicted.update_s > 0
    counted_s = predicted.serial_time_s - predicted.unseen_compute_s
    assert counted_s - predicted.comm_time_s <= planned.solver.objective <= counted_s


def test_executions_follow_each_other(planned: Plan) -> None:
    predicted = planned.predicted
    runs = list(executed(predicted.timeline))
    now, counts = 0.0, Counter[str]()
    for run in runs:
        assert run.start_s == pytest.approx(now)
        now += run.before_s + run.op.compute_s + run.after_s
        counts[run.op.name] += 1
    assert now + predicted.update_s == pytest.approx(predicted.step_time_s, rel=1e-8)
    assert counts == {op.name: op.times for op in predicted.timeline.ops}
    assert max(sum(run.live) for run in runs) == predicted.peak_memory_bytes
    assert min(min(run.live) for run in runs) >= 0


def test_an_unrolled_block_is_as_the_whole_graph() -> None:
    """Time and live bytes of every execution of a folded graph equal those of the whole one."""
    model, pins = llama(9), Constraints.parse({"data": 2, "tensor": {"mode": "1d", "size": 2}})
    folded = trace(model, TEXT, fold=True)
    where = cluster(2, 2)
    plan = solve(folded, where, constraints=pins)
    assert plan.repeats
    whole = trace(model, TEXT)
    wide = unfolded(plan, folded, whole)
    step = build_step(whole)
    built = build_problem(step, where, Pins(pins, assign_mesh(pins, (2, 2)), whole, step), "adamw")
    chosen: dict[Any, int] = {}
    for name, owner in built.classes.items():
        if name in step.ops:
            node = wide.nodes[name]
            wanted = (node.inputs, node.outputs, node.variants)
            states = [(c.inputs, c.outputs, c.variants) for c in built.candidates[owner]]
            chosen[owner] = states.index(wanted)
        else:
            target = step.parameters[name].target
            chosen[owner] = built.storages[owner].index(wide.parameters[target])
    decision = Decision(
        {n: built.candidates[built.classes[n]][chosen[built.classes[n]]] for n in step.ops},
        {n: built.storages[built.classes[n]][chosen[built.classes[n]]] for n in step.parameters},
    )
    flat = timeline(whole, price(step, where, decision, "adamw"), built, chosen)
    rolled, unrolled = list(executed(flat)), list(executed(plan.predicted.timeline))
    assert len(rolled) == len(unrolled)
    names = plan.predicted.timeline.kinds
    spread_s = sum(
        m.seconds * m.times
        for op in plan.predicted.timeline.ops
        for m in op.moves
        if m.times != op.times
    )
    assert spread_s < 0.02 * plan.predicted.step_time_s
    for a, b in zip(rolled, unrolled, strict=True):
        assert a.op.op == b.op.op
        live, other = (
            {k: v for k, v in zip(kinds, run.live, strict=True) if v}
            for kinds, run in ((flat.kinds, a), (names, b))
        )
        assert live == other, (a.op.name, b.op.name, b.instance)
        # a collective of some instances only is spread over all
        assert b.start_s == pytest.approx(a.start_s, rel=1e-6, abs=spread_s + 1e-9)
    assert rolled[-1].start_s == pytest.approx(unrolled[-1].start_s, rel=1e-6)


def test_round_trip(planned: Plan) -> None:
    found = planned.predicted.timeline
    plain = json.loads(json.dumps(found.to_dict()))
    assert Timeline.from_dict(plain) == found
    assert Plan.from_dict(json.loads(json.dumps(planned.to_dict()))) == planned


def test_sources_are_the_users(planned: Plan) -> None:
    sources = {op.source for op in planned.predicted.timeline.ops if op.source}
    assert sources
    for source in sources:
        assert not source.startswith("/")
        assert "autopar/" not in source


def test_depth_does_not_lengthen_it() -> None:
    sizes = []
    for layers in (9, 40):
        plan = autopar.plan(llama(layers), cluster(4), TEXT)
        sizes.append(len(json.dumps(plan.predicted.timeline.to_dict())))
    # some placements differ
    assert abs(sizes[1] - sizes[0]) < 0.05 * sizes[0]


def test_other_states_cost_what_they_say() -> None:
    """Each alternative, priced by itself as a plan, adds the seconds that it names."""
    traced = trace(hw.Mlp(), hw.vectors())
    step, where = build_step(traced), cluster(2, 2)
    pins = Pins(Constraints(), assign_mesh(Constraints(), (2, 2)), traced, step)
    built = build_problem(step, where, pins, "adamw")
    chosen = dict.fromkeys(built.problem.costs, 0)
    chosen = {n: int(c.argmin()) for n, c in built.problem.costs.items()}
    base = evaluate(built.problem, chosen)
    others = other_states(built.problem, chosen)
    assert len(others) > 10
    checked = 0
    for node, (state, more_s) in others.items():
        changed = {**chosen, node: state}
        assert state != chosen[node]
        if math.isfinite(base):
            assert evaluate(built.problem, changed) - base == pytest.approx(more_s, abs=1e-12)
            for rival in range(len(built.problem.costs[node])):
                if rival != chosen[node]:
                    cost = evaluate(built.problem, {**chosen, node: rival})
                    assert cost - base >= more_s - 1e-12
            checked += 1
    assert checked > 10
    names = {n: built.classes[n] for n in step.ops}
    decision = Decision(
        {n: built.candidates[o][chosen[o]] for n, o in names.items()},
        {n: built.storages[built.classes[n]][chosen[built.classes[n]]] for n in step.parameters},
    )
    assert price(step, where, decision, "adamw").total_s == pytest.approx(base, rel=1e-9)


def events(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        found: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return found


def test_trace_has_a_process_per_rank(planned: Plan, tmp_path: Path) -> None:
    ranks = math.prod(planned.mesh_shape)
    assert planned.to_trace(tmp_path / "t.json.gz") == ranks
    found = events(tmp_path / "t.json.gz")
    names = [e["args"]["name"] for e in found if e["name"] == "process_name"]
    assert names == [f"rank {rank}, predicted" for rank in range(ranks)]
    lanes = [e["args"]["name"] for e in found if e["name"] == "thread_name" and e["pid"] == 0]
    assert lanes == ["compute", *(f"communication on {axis}" for axis in planned.axis_names)]
    spent: dict[tuple[int, bool], float] = defaultdict(float)
    for e in found:
        if e["ph"] == "X":
            spent[e["pid"], e["tid"] == 0] += e["dur"] / 1e6
    for rank in range(ranks):
        predicted = planned.predicted
        assert spent[rank, True] == pytest.approx(predicted.compute_time_s, rel=1e-3)
        assert spent[rank, False] == pytest.approx(predicted.comm_time_s, rel=1e-3)
    for lane in range(1 + len(planned.axis_names)):
        mine = sorted(
            (e["ts"], e["dur"])
            for e in found
            if e["ph"] == "X" and (e["pid"], e["tid"]) == (0, lane)
        )
        assert all(b[0] >= a[0] + a[1] - 1e-3 for a, b in pairwise(mine))
    peak = max(sum(e["args"].values()) for e in found if e["ph"] == "C")
    assert peak == planned.predicted.peak_memory_bytes


def test_trace_of_fewer_ranks(planned: Plan, tmp_path: Path) -> None:
    assert planned.to_trace(tmp_path / "t.json.gz", ranks=1) == 1
    assert {e["pid"] for e in events(tmp_path / "t.json.gz")} == {0}
