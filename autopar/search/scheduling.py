"""`scheduled`: a plan with the communication that its program hides behind compute.

The solver has a rough rule of what overlaps (`solver/overlap.py`). Here the program is emitted
with its passes and simulated; each planned collective gets the share of its seconds that hides::

    step = compute + Σ (seconds - hidden)        Σ hidden ≤ compute

What compute waits for of copies with host memory is put in place of the search's estimate. What the
program copies into the order of ranks and into buckets is added, with the buckets that serve best.

The parts of a pipeline stage are simulated one by one, as nothing overlaps across their ends, and
the stages run on the clock of the schedule again with what is left of their seconds. Gradients are
reduced beside the last backward: what that takes longer with them is what is left of `finish`.

Of each program that was simulated, the plan keeps one block of each kind (`codegen/excerpts.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import fx

from autopar.codegen.emit import written
from autopar.codegen.excerpts import Found, Run, excerpts, merged
from autopar.codegen.fusion import Fusion
from autopar.codegen.program import Program
from autopar.codegen.stage_program import StageProgramWriter
from autopar.codegen.stages import staged_as_planned
from autopar.core.calls import BucketBytes
from autopar.core.collector import paused_collector
from autopar.core.graph import TracedModel
from autopar.core.plan import Plan
from autopar.core.schedule import closing_action, split_stages
from autopar.core.timeline import PlannedMove, PlannedOp, rounded
from autopar.cost_model import Cluster
from autopar.cost_model.as_emitted import as_emitted, collective_key
from autopar.cost_model.emitted_ops import node_seconds
from autopar.cost_model.simulator import Simulation, simulate
from autopar.cost_model.stages import pipelined_time, transfer_seconds
from autopar.cost_model.waits import with_waits
from autopar.search.decomposing import decomposed
from autopar.search.trials import Trial, bucketed

__all__ = ["scheduled"]

Shares = dict[tuple[str, int, str], float]


@paused_collector()
def scheduled(
    plan: Plan,
    traced: TracedModel,
    *,
    buckets: Sequence[BucketBytes] = (),
    below_s: float = math.inf,
) -> Plan:
    """`plan` with hidden and exposed communication; as it is, if it has them.

    Args:
        plan: as solved; in one piece where `buckets` are given.
        traced: the graph that it was solved for, folded or not.
        buckets: that are known to serve; default: several are tried.
        below_s: step of another plan; of one that takes much longer few buckets are tried.
    """
    if plan.predicted.hidden_comm_s:
        return plan
    if plan.pipeline is not None:
        return _scheduled_stages(plan, traced)
    cluster, fusion = Cluster.from_dict(plan.cluster), Fusion.of(plan)

    emitter = written(traced, plan, [0] * len(plan.mesh_shape), fusion=fusion)

    def run(trial: Plan) -> Trial:
        program = emitter.program(None, trial.piece_counts(), sizes=trial.bucket_sizes())
        graph = program.joint.graph
        parts = {"step": simulate(graph, cluster)}
        return Trial(graph=graph, parts=parts, code=lambda: _code(program))

    if buckets:
        plan = replace(plan, buckets=tuple(buckets))
    tried = (plan, run(plan)) if buckets else bucketed(plan, run, below_s)
    cut, found = decomposed(*tried, run, cluster)
    cut = as_emitted(with_waits(cut, found.parts), found.parts)
    hiding = _with_hidden(cut, found.shares(), cut.predicted.compute_time_s)
    code = found.code()
    kept = excerpts(code, emitter.traced, _runs(found, code, cluster))
    return replace(hiding, excerpts=merged([((), kept)]))


def _code(program: Program) -> dict[str, fx.Graph]:
    """What a rank runs, by part."""
    found = {"forward": program.forward.graph}
    if program.backward is not None:
        found["backward"] = program.backward.graph
    return found


def _runs(
    trial: Trial, code: Mapping[str, fx.Graph], cluster: Cluster
) -> dict[tuple[str, str], Run]:
    """What each node of a program takes, by part and name."""
    spans = {(part, s.name): s for part, simulated in trial.parts.items() for s in simulated.spans}
    found: dict[tuple[str, str], Run] = {}
    for part, graph in code.items():
        for node in graph.nodes:
            span = spans.get((part if part in trial.parts else "step", node.name))
            if span is not None:
                found[part, node.name] = Run(span.duration_s, span.hidden_s)
            elif "instead_of" in node.meta:  # written when the program was cut into its parts
                found[part, node.name] = Run(node_seconds(node, cluster.device), 0.0)
    return found


def _with_hidden(plan: Plan, shares: Shares, most_s: float) -> Plan:
    """`plan` with the hidden seconds of each collective, no more than `most_s` in all."""
    predicted = plan.predicted
    hidden = sum(
        _hidden(op, m, shares) * m.times for op in predicted.timeline.ops for m in op.moves
    )
    scale = min(1.0, most_s / hidden) if hidden else 1.0
    ops = tuple(
        replace(
            op,
            moves=tuple(
                m._replace(hidden_s=rounded(scale * _hidden(op, m, shares))) for m in op.moves
            ),
        )
        for op in predicted.timeline.ops
    )
    by_axis = [0.0] * len(plan.mesh_shape)
    for op in ops:
        for move in op.moves:
            by_axis[move.axis] += move.hidden_s * move.times
    return replace(
        plan,
        predicted=replace(
            predicted,
            step_time_s=predicted.serial_time_s - sum(by_axis),
            hidden_comm_s=tuple(by_axis),
            timeline=replace(predicted.timeline, ops=ops),
        ),
    )


def _hidden(op: PlannedOp, move: PlannedMove, shares: Shares) -> float:
    """Hidden seconds of one execution; an emitted collective is known by what it belongs to."""
    return move.seconds * shares.get(collective_key(op, move), 0.0)


def _scheduled_stages(plan: Plan, traced: TracedModel) -> Plan:
    p = plan.pipeline
    assert p is not None
    parts = staged_as_planned(traced, p)
    orders = p.actions()
    splits = bool(split_stages(orders))
    ends = (closing_action(orders, rank) for rank in range(len(orders)))
    closing = {end.stage for end in ends if end is not None}
    cluster, fusion = Cluster.from_dict(plan.cluster), Fusion.of(plan)
    tried: dict[int, _Tried] = {}  # equal stages of a folded graph share nodes
    alike: dict[int, list[int]] = {}
    known: dict[tuple[int, bool], Plan] = {}
    stages: list[Plan] = []
    for number, stage in enumerate(p.stages):
        key, closes = id(stage.nodes), number in closing
        alike.setdefault(key, []).append(number)
        if key not in tried:
            own, model = parts.named(number, stage, back=True), parts.model(number)
            tried[key] = _tried(own, model, cluster, fusion, splits)
        if (key, closes) not in known:
            one = tried[key]
            found = _scheduled_stage(one.plan, one.trial, p.microbatches, splits, closes)
            known[key, closes] = parts.named(alike[key][0], found)
        like = known[key, closes]
        stages.append(
            replace(stage, predicted=like.predicted, pieces=like.pieces, buckets=like.buckets)
        )
    transfer_s = transfer_seconds(parts.crossings(), stages, cluster, p.size)
    clock = pipelined_time(stages, orders, transfer_s, plan.predicted.memory)
    pipeline = replace(p, stages=tuple(stages), bubble=clock.bubble, slots=clock.slots)
    kept = merged((numbers, tried[key].excerpts) for key, numbers in alike.items())
    return replace(plan, predicted=clock.predicted, pipeline=pipeline, excerpts=kept)


class _Tried(NamedTuple):
    """A stage's plan with its pieces, its program, and what is kept of that."""

    plan: Plan
    trial: Trial
    excerpts: list[Found]


def _tried(
    plan: Plan,
    model: TracedModel,
    cluster: Cluster,
    fusion: Fusion,
    splits: bool,
) -> _Tried:
    names = ("prepare", "forward", *(("input", "weight") if splits else ("backward",)), "finish")

    writer = StageProgramWriter([model], plan, [0] * len(plan.mesh_shape), fusion=fusion)

    def run(trial: Plan) -> Trial:
        program = writer.program(None, trial.piece_counts(), sizes=trial.bucket_sizes())
        simulated = {
            name: simulate(program.parts[name].module.graph, cluster)
            for name in (*names, "last")
            if name in program.parts
        }
        last = simulated.pop("last", None)
        code = {name: program.parts[name].module.graph for name in simulated}
        return Trial(graph=program.joint.graph, parts=simulated, last=last, code=lambda: code)

    cut, found = decomposed(*bucketed(plan, run), run, cluster)
    code = found.code()
    return _Tried(cut, found, excerpts(code, writer.traced, _runs(found, code, cluster)))


def _scheduled_stage(
    plan: Plan, trial: Trial, microbatches: int, splits: bool, closes: bool
) -> Plan:
    """A stage's plan with what each of its parts hides, taken from the part's seconds.

    Args:
        plan: of the stage.
        trial: its program.
        microbatches: of a step.
        splits: the backward runs in two parts.
        closes: gradients are reduced beside the last backward.
    """
    if not closes:
        trial = replace(trial, last=None)
    found, shares = trial.parts, trial.shares()
    plan = as_emitted(with_waits(plan, found, microbatches), found, microbatches)
    before = plan.predicted.phases
    saved = {
        phase: seconds * (1.0 - _left(found[phase if phase in found else "backward"]))
        for phase, seconds in before.items()
    }
    if trial.last is not None:
        beside_s = trial.last.step_s - found["weight" if splits else "backward"].step_s
        alone_s = _serial_s(found["finish"])
        saved["finish"] = before["finish"] * (1.0 - min(1.0, max(0.0, beside_s / alone_s)))
    most_s = _of_all_microbatches(saved, microbatches)
    hiding = _with_hidden(plan, shares, most_s)
    # what the two have in common: phases and collectives must add up to the same
    known = hiding.predicted.hidden_time_s / most_s if most_s else 0.0
    phases = {phase: before[phase] - known * saved[phase] for phase in before}
    return replace(hiding, predicted=replace(hiding.predicted, phases=phases))


def _left(simulation: Simulation) -> float:
    """The share of a part's serial seconds that it takes."""
    serial_s = _serial_s(simulation)
    return simulation.step_s / serial_s if serial_s else 1.0


def _serial_s(simulation: Simulation) -> float:
    return simulation.compute_s + sum(simulation.comm_s) + simulation.exposed_copy_s


def _of_all_microbatches(phases: Mapping[str, float], microbatches: int) -> float:
    once = phases["prepare"] + phases["finish"]
    return once + microbatches * (phases["forward"] + phases["input"] + phases["weight"])
