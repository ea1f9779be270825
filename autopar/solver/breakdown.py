"""The timeline of a decided plan: seconds, collectives, live bytes and other choices of each op.

An op's alternative changes its class alone. With every other choice fixed, state t of node i costs

    cost_i[t] + Σ_j C_ij[t, s_j]

and the least of these over t ≠ s_i is a real plan's cost, an upper bound of the best plan without
s_i. Excluding s_i and solving again gives the latter (`solve(..., without=…)`).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Hashable, Mapping
from functools import cache
from pathlib import Path

import numpy as np

from autopar.core.graph import NodeInfo, TracedModel
from autopar.core.timeline import (
    Alternative,
    OpPhase,
    Packing,
    PlannedOp,
    PlannedSpan,
    Timeline,
    rounded,
)
from autopar.core.work import op_class
from autopar.solver.build import StepProblem
from autopar.solver.discrete.problem import Assignment, ChoiceProblem
from autopar.solver.footprint import Schedule
from autopar.solver.order import parts_of_turns
from autopar.solver.price import Price, Pricing
from autopar.solver.step import Op
from autopar.solver.twins import Twins

__all__ = ["other_states", "timeline"]


def timeline(
    traced: TracedModel, priced: Price, built: StepProblem, chosen: Assignment
) -> Timeline:
    """The predicted step of a decision, op by op.

    Args:
        traced: the graph that the step was read from; it knows modules and source lines.
        priced: the decision.
        built, chosen: the problem and the assignment that the decision is.
    """
    pricing = priced.pricing
    schedule, _ = priced.footprint.highest
    live, kinds = _live(schedule)
    others = other_states(built.problem, chosen)
    order = schedule.buffers.order
    parts = parts_of_turns(pricing.step) if pricing.step.in_turns else {}
    ops = tuple(
        _planned(op, traced.info.get(op.name), pricing, live.get(op.name, ()), others, built, parts)
        for op in order
    )
    return Timeline(
        ops=ops,
        kinds=kinds,
        spans=tuple(_span(twins, schedule, kinds) for twins in schedule.buffers.twins),
        alternatives={
            spec.target: Alternative((), (built.storages[owner][other[0]],), rounded(other[1]))
            for name, spec in pricing.step.parameters.items()
            if (other := others.get(owner := built.classes[name])) is not None
        },
    )


def _live(schedule: Schedule) -> tuple[dict[str, tuple[int, ...]], tuple[str, ...]]:
    """Bytes by kind at the highest moment of each op, and the kinds, longest-lived first."""
    of_others = {part: schedule.of_others(part) for part in range(-1, 4)}
    highest: dict[str, tuple[int, Counter[str]]] = {}
    for index, name, num_bytes, alone in schedule.levels():
        if num_bytes >= highest.get(name, (0,))[0]:
            kinds = Counter(alone)
            kinds.update(of_others[schedule.buffers.part(index)])
            highest[name] = num_bytes, kinds
    found = dict.fromkeys(kind for _, kinds in highest.values() for kind in kinds)
    last = [k for k in ("gradients", "activations", "backward", "gathered", "transient")
            if k in found]  # fmt: skip
    order = (*(k for k in found if k not in last), *last)
    rows = {name: tuple(held[kind] for kind in order) for name, (_, held) in highest.items()}
    return rows, order


def _planned(
    op: Op,
    info: NodeInfo | None,
    pricing: Pricing,
    live: tuple[int, ...],
    others: Mapping[Hashable, tuple[int, float]],
    built: StepProblem,
    parts: Mapping[str, str],
) -> PlannedOp:
    phase: OpPhase = "recompute" if op.recomputed else "backward" if op.backward else "forward"
    owner = built.classes[op.name]
    alternative = None
    if owner in others:
        state, more_s = others[owner]
        candidate = built.candidates[owner][state]
        alternative = Alternative(candidate.inputs, candidate.outputs, rounded(more_s))
    times = pricing.blocks.weight(op.name)
    packing = Packing(*(rounded(s) for s in pricing.packed.get(op.name, Packing())))
    return PlannedOp(
        name=op.name,
        op=str(op.call.target),
        op_class=op_class(op.call),
        phase=phase,
        module=info.module if info is not None else "",
        source=_portable(info.source) if info is not None else "",
        operands=tuple(pricing.step.label(name) for name, _ in op.operands),
        shapes=tuple(spec.shape for spec in op.call.outputs),
        dtype=str(op.call.outputs[0].dtype).removeprefix("torch.") if op.call.outputs else "",
        times=times,
        compute_s=rounded(pricing.seconds(op) + packing.total_s / times),
        moves=tuple(pricing.planned.get(op.name, ())),
        live=live,
        alternative=alternative,
        part=parts.get(op.name, ""),
        packing=packing,
    )


@cache
def _roots() -> tuple[str, ...]:
    """Folders that modules are imported from, the deepest first."""
    found = {str(Path(entry or ".").resolve()) + "/" for entry in sys.path}
    return tuple(sorted(found, key=len, reverse=True))


def _portable(source: str) -> str:
    """`file:line` with the file as seen from the folder that it is imported from."""
    return next((source[len(r) :] for r in _roots() if source.startswith(r)), source)


def _span(twins: Twins, schedule: Schedule, kinds: tuple[str, ...]) -> PlannedSpan:
    """What one instance adds, from what is added for all others."""
    span, step = twins.span, schedule.step
    saved = dict.fromkeys(kinds, 0)
    for buffer, num_bytes in twins.alloc:
        saved[schedule.kinds[buffer]] += num_bytes
    gradients = sum(num_bytes for _, num_bytes in twins.kept)
    others = max(span.times - 1, 1)
    repeat = step.blocks.repeat_of(span.saved[0]) if span.saved else None
    inside = (
        op.name
        for op in schedule.buffers.order
        if repeat and step.blocks.repeat_of(op.name) == repeat
    )
    each = tuple(num_bytes // others for num_bytes in saved.values())
    return PlannedSpan(span.times, each, gradients // others, frozenset(inside))


def other_states(problem: ChoiceProblem, chosen: Assignment) -> dict[Hashable, tuple[int, float]]:
    """The best other state of each node while all others keep theirs, and the seconds it adds.

    Nodes without another possible state are left out.
    """
    total = {node: cost.copy() for node, cost in problem.costs.items()}
    for (i, j), matrix in problem.edges.items():
        total[i] = total[i] + matrix[:, chosen[j]]
        total[j] = total[j] + matrix[chosen[i], :]
    found: dict[Hashable, tuple[int, float]] = {}
    for node, cost in total.items():
        now = cost[chosen[node]]
        cost[chosen[node]] = np.inf
        state = int(np.argmin(cost))
        if np.isfinite(cost[state]):
            found[node] = (state, float(cost[state] - now))
    return found
