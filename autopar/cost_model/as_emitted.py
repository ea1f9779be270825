"""What an emitted program takes in place of what the search counts, for a plan.

The search prices copies of parameters and gradients into the order of ranks, as if each collective
were alone; a bucket joins its members and hands out parts, and activations are copied as well. What
the program copies goes to the ops that the collectives belong to. The search shares latency among
what may be joined, where the program has the buckets that it has; and it knows the strides of
whole tensors, and takes fused kernels for the sum of their ops, where the program knows strides and
what each kernel reads and writes.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from autopar.core.plan import Plan
from autopar.core.timeline import Packing, PlannedMove, PlannedOp, is_once, rounded
from autopar.cost_model.simulator import Simulation, Span

__all__ = ["as_emitted", "collective_key"]

_Key = tuple[str, int, str]  # what a collective belongs to, its axis and its kind
_SAME = 1e-6  # of seconds, which are rounded in plans
_ONCE = ("prepare", "finish")  # parts of a step in microbatches that run once


def as_emitted(plan: Plan, parts: Mapping[str, Simulation], turns: int = 1) -> Plan:
    """`plan` with the simulated seconds of its ops, of packing and of its collectives.

    Args:
        plan: with its timeline, and no share of a collective hidden yet.
        parts: simulations of what runs in one go, by name.
        turns: microbatches of a step.
    """
    predicted = plan.predicted
    ops = predicted.timeline.ops
    spans = [span for simulation in parts.values() for span in simulation.spans]
    computed, packing, sent = _computed(spans, ops), _packing(spans, ops), _sent(spans, ops)
    priced = tuple(
        _priced(op, computed.get(op.name), packing.get(op.name, Packing()), sent) for op in ops
    )
    packing_s = more_s = comm_s = 0.0
    phases = dict(predicted.phases)
    for op, now in zip(ops, priced, strict=True):
        packing_s += now.packing.total_s
        more_s += (now.compute_s - op.compute_s) * op.times
        comm_s += now.comm_s - op.comm_s
        if phases:
            often = 1 if op.part in _ONCE else turns
            once = "prepare" if op.part == "prepare" else "finish"
            # copies of gradients count to the slots of the op that their seconds are shown with
            at_turns_s = (now.compute_s - op.compute_s) * op.times + op.packing.once_s
            phases[op.part] += at_turns_s / often
            phases[once] -= op.packing.once_s
            for before, after in zip(op.moves, now.moves, strict=True):
                sent_s = (after.seconds - before.seconds) * before.times
                phases[once if before.once else op.part] += sent_s / (1 if before.once else often)
    return replace(
        plan,
        predicted=replace(
            predicted,
            step_time_s=predicted.step_time_s + more_s + comm_s,
            compute_time_s=predicted.compute_time_s + more_s,
            comm_time_s=predicted.comm_time_s + comm_s,
            packing_s=packing_s,
            unseen_compute_s=predicted.unseen_compute_s + more_s,
            phases=phases,
            timeline=replace(predicted.timeline, ops=priced),
        ),
    )


def _computed(spans: Iterable[Span], ops: Sequence[PlannedOp]) -> Mapping[str, float]:
    """Seconds of a step of ops without packing, of those that differ in the program.

    A fused kernel is run for one of its ops: what the ops of kernels take together, of a part and
    of blocks alike, is shared as it was counted.
    """
    program: dict[str, float] = defaultdict(float)
    for span in spans:
        if span.stream == "compute" and not span.packs:
            program[span.origin] += span.duration_s * span.times
    found: dict[str, float] = {}
    differing: dict[tuple[str, int], list[tuple[str, float]]] = defaultdict(list)
    for op in ops:
        counted_s = max(0.0, op.compute_s * op.times - op.packing.total_s)
        if op.op_class != "host" and not math.isclose(counted_s, program[op.name], rel_tol=_SAME):
            if counted_s > 0:
                differing[op.part, op.times].append((op.name, counted_s))
            else:  # a view that must copy
                found[op.name] = program[op.name]
    for members in differing.values():
        ratio = sum(program[name] for name, _ in members) / sum(s for _, s in members)
        found |= {name: ratio * counted_s for name, counted_s in members}
    return found


def _packing(spans: Iterable[Span], ops: Sequence[PlannedOp]) -> Mapping[str, Packing]:
    """Seconds of packing in a step, by the op that it counts to."""
    owners = {move.of: op.name for op in ops for move in op.moves if move.leaves}
    owners |= {op.name: op.name for op in ops}
    last = next(reversed(owners.values()), "")
    found: dict[str, Packing] = defaultdict(Packing)
    for span in spans:
        if span.packs:
            owner, seconds = owners.get(span.origin, last), span.duration_s * span.times
            found[owner] = found[owner].plus(seconds, is_once(span.origin))
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


def _priced(
    op: PlannedOp, computed_s: float | None, packing: Packing, sent: Mapping[_Key, float]
) -> PlannedOp:
    """An op with what it computes in a step, if that differs, its packing and its collectives."""
    moves = []
    for move in op.moves:
        per_byte = sent.get(collective_key(op, move))
        if per_byte is not None:
            move = move._replace(seconds=rounded(per_byte * move.num_bytes))
        moves.append(move)
    packing = Packing(*map(rounded, packing))
    compute_s = op.compute_s
    if computed_s is not None or packing != op.packing:
        if computed_s is None:
            computed_s = compute_s * op.times - op.packing.total_s
        compute_s = rounded((computed_s + packing.total_s) / op.times)
    return replace(op, compute_s=compute_s, moves=tuple(moves), packing=packing)
