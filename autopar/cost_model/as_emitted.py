"""What an emitted program takes beside what the search counts, for a plan.

The search prices no packing, as what is copied depends on the passes: a collective stacks what
ranks send, so that a shard of any dim but the first is copied on the way, and a bucket joins its
members and hands out parts. These seconds go to the ops that the collectives belong to. And it
shares latency among what may be joined, where the program has the buckets that it has.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from autopar.core.plan import Plan
from autopar.core.timeline import PlannedMove, PlannedOp, rounded
from autopar.cost_model.simulator import Simulation, Span

__all__ = ["as_emitted", "collective_key"]

_Key = tuple[str, int, str]  # what a collective belongs to, its axis and its kind
_ONCE = ("prepare", "finish")  # parts of a step in microbatches that run once


def as_emitted(plan: Plan, parts: Mapping[str, Simulation], turns: int = 1) -> Plan:
    """`plan` with the simulated seconds of packing and of its collectives.

    Args:
        plan: with its timeline, and no share of a collective hidden yet.
        parts: simulations of what runs in one go, by name.
        turns: microbatches of a step.
    """
    predicted = plan.predicted
    ops = predicted.timeline.ops
    spans = [span for simulation in parts.values() for span in simulation.spans]
    packing, sent = _packing(spans, ops), _sent(spans, ops)
    priced = tuple(_priced(op, packing.get(op.name, 0.0), sent) for op in ops)
    packing_s = comm_s = 0.0
    phases = dict(predicted.phases)
    for op, now in zip(ops, priced, strict=True):
        packed_s = (now.compute_s - op.compute_s) * op.times
        packing_s += packed_s
        comm_s += now.comm_s - op.comm_s
        if phases:
            often = 1 if op.part in _ONCE else turns
            phases[op.part] += packed_s / often
            for before, after in zip(op.moves, now.moves, strict=True):
                more_s = (after.seconds - before.seconds) * before.times
                once = before.once and op.part != "prepare"
                phases["finish" if once else op.part] += more_s / (1 if once else often)
    return replace(
        plan,
        predicted=replace(
            predicted,
            step_time_s=predicted.step_time_s + packing_s + comm_s,
            compute_time_s=predicted.compute_time_s + packing_s,
            comm_time_s=predicted.comm_time_s + comm_s,
            packing_s=packing_s,
            phases=phases,
            timeline=replace(predicted.timeline, ops=priced),
        ),
    )


def _packing(spans: Iterable[Span], ops: Sequence[PlannedOp]) -> Mapping[str, float]:
    """Seconds of packing in a step, by the op that it counts to."""
    owners = {move.of: op.name for op in ops for move in op.moves if move.leaves}
    owners |= {op.name: op.name for op in ops}
    last = next(reversed(owners.values()), "")
    found: dict[str, float] = defaultdict(float)
    for span in spans:
        if span.packs:
            found[owners.get(span.origin, last)] += span.duration_s * span.times
    return found


def _sent(spans: Iterable[Span], ops: Sequence[PlannedOp]) -> Mapping[_Key, float]:
    """Seconds per byte of the collectives of a step, which members of a bucket share."""
    seconds: dict[_Key, float] = defaultdict(float)
    for span in spans:
        if isinstance(span.stream, int):
            whole = sum(num_bytes for _, num_bytes in span.members)
            for origin, num_bytes in span.members:
                share = num_bytes / whole if whole else 1 / len(span.members)
                seconds[origin, span.stream, span.kind] += share * span.duration_s * span.times
    sizes: Counter[_Key] = Counter()
    for op in ops:
        for move in op.moves:
            sizes[collective_key(op, move)] += move.num_bytes * move.times
    return {key: s / sizes[key] for key, s in seconds.items() if sizes[key]}


def collective_key(op: PlannedOp, move: PlannedMove) -> _Key:
    """By which a collective of a plan is known in its program."""
    return (move.of if move.leaves else op.name), move.axis, move.kind


def _priced(op: PlannedOp, packing_s: float, sent: Mapping[_Key, float]) -> PlannedOp:
    moves = []
    for move in op.moves:
        per_byte = sent.get(collective_key(op, move))
        if per_byte is not None:
            move = move._replace(seconds=rounded(per_byte * move.num_bytes))
        moves.append(move)
    compute_s = rounded(op.compute_s + packing_s / op.times) if packing_s else op.compute_s
    return replace(op, compute_s=compute_s, moves=tuple(moves))
