"""What a pipeline stage is predicted to run in each slot of its schedule, op by op.

Of a slot's seconds its ops take theirs, and what is left is what they stand still for, which their
exposed collectives share::

    slot = Σ compute + stretch · Σ exposed

Collectives stay in the slot, in order on each axis, where they are shortened if they would not fit;
those of a stage's gradients, which are reduced once, end when the stage does, and what is hidden of
them lies beside its last backward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from autopar.core.plan import PipelinePlan
from autopar.core.timeline import PipelineSlot, PlannedMove, PlannedOp, Timeline

__all__ = ["SlotOp", "slot_ops"]

_PARTS = {
    "P": ("prepare",),
    "F": ("forward",),
    "B": ("input", "weight"),
    "I": ("input",),
    "W": ("weight",),
}


class SlotOp(NamedTuple):
    """An execution of an op, or of one of its collectives.

    Attributes:
        op: that runs, or that the collective belongs to.
        move: the collective; None for the op itself.
        start_s, seconds: from the start of the step; while templates are made, of the slot.
    """

    op: PlannedOp
    move: PlannedMove | None
    start_s: float
    seconds: float


def slot_ops(
    pipeline: PipelinePlan, rank: int, microbatches: int | None = None
) -> Iterator[tuple[PipelineSlot, list[SlotOp]]]:
    """Ops and collectives of each slot of a rank; ops without cost (views) are left out.

    Args:
        pipeline: whose stages have timelines; the ops of older ones, which have no `part`, are
            left out.
        rank: of the pipeline.
        microbatches: how many of the first to show; default: all.
    """
    own = [slot for slot in pipeline.slots if slot.rank == rank]
    turns = [slot for slot in own if slot.kind in "FBIW"]
    ends = {slot.stage: slot for slot in own if slot.kind == "R"}
    lasts = {slot.stage: slot for slot in turns}  # slots are in order of start
    known: dict[tuple[int, str], list[SlotOp]] = {}
    for slot in own:
        if slot.kind == "R" or (microbatches is not None and slot.microbatch >= microbatches):
            continue
        key = slot.stage, slot.kind
        if key not in known:
            line = pipeline.stages[slot.stage].predicted.timeline
            known[key] = _in_slot(line, _PARTS[slot.kind], slot.seconds)
        yield slot, [o._replace(start_s=slot.start_s + o.start_s) for o in known[key]]
    for stage, last in lasts.items():
        end = ends.get(stage, last)
        # gradients of a rank's other stages are reduced when all its stages are done
        beside = last is turns[-1]
        begin_s = last.start_s if beside else end.start_s
        found = _at_end(pipeline.stages[stage].predicted.timeline, begin_s, end)
        if found:
            yield end, found


def _in_slot(timeline: Timeline, parts: Sequence[str], slot_s: float) -> list[SlotOp]:
    """What a slot of so many seconds holds, from its start."""
    runs = list(_runs(timeline, parts))
    compute_s = sum(op.compute_s for op in runs)
    exposed_s = sum(_each(op, m.exposed_s, m) for op in runs for m in op.moves if _turns(op, m))
    shrink = min(1.0, slot_s / compute_s) if compute_s else 1.0
    stretch = max(0.0, slot_s - compute_s) / exposed_s if exposed_s else 0.0
    computed: list[SlotOp] = []
    moved: dict[int, list[SlotOp]] = defaultdict(list)
    now = 0.0
    for op in runs:
        moves = [m for m in op.moves if _turns(op, m)]
        for move in (m for m in moves if not m.leaves):
            now += stretch * _each(op, move.exposed_s, move)
            seconds = _each(op, move.seconds, move)
            moved[move.axis].append(SlotOp(op, move, now - seconds, seconds))
        if op.compute_s:
            computed.append(SlotOp(op, None, now, shrink * op.compute_s))
            now += shrink * op.compute_s
        for move in (m for m in moves if m.leaves):
            moved[move.axis].append(SlotOp(op, move, now, _each(op, move.seconds, move)))
            now += stretch * _each(op, move.exposed_s, move)
    return computed + [o for lane in moved.values() for o in _fitted(lane, 0.0, slot_s)]


def _at_end(timeline: Timeline, begin_s: float, end: PipelineSlot) -> list[SlotOp]:
    """Collectives that happen once, behind all microbatches."""
    moved: dict[int, list[SlotOp]] = defaultdict(list)
    end_s = end.start_s + end.seconds
    for op in timeline.ops:
        if op.part in ("", "prepare"):
            continue
        for move in (m for m in op.moves if m.once):
            moved[move.axis] += [SlotOp(op, move, end_s, move.seconds)] * move.times
    return [o for lane in moved.values() for o in _fitted(lane, begin_s, end_s)]


def _turns(op: PlannedOp, move: PlannedMove) -> bool:
    """True for a collective of a slot of its op's part."""
    return op.part == "prepare" or not move.once


def _each(op: PlannedOp, seconds: float, move: PlannedMove) -> float:
    """Seconds in one execution of an op: a collective of some of them is spread over all."""
    return seconds * move.times / op.times


def _runs(timeline: Timeline, parts: Sequence[str]) -> Iterator[PlannedOp]:
    """Ops of some parts in order, those of repeated blocks block by block."""
    span_of = {name: span for span in timeline.spans for name in span.ops}
    ops: Iterable[PlannedOp] = (op for op in timeline.ops if op.part in parts)
    for span, grouped in groupby(ops, key=lambda op: span_of.get(op.name)):
        block = list(grouped)
        for _ in range(span.times if span is not None else 1):
            yield from block


def _fitted(lane: Sequence[SlotOp], begin_s: float, end_s: float) -> list[SlotOp]:
    """Collectives of an axis one behind the other, each as near to its start as there is room."""
    total_s = sum(each.seconds for each in lane)
    room = min(1.0, (end_s - begin_s) / total_s) if total_s else 1.0
    lane = [each._replace(seconds=room * each.seconds) for each in lane]
    starts = []
    limit = end_s
    for each in reversed(lane):  # the latest start at which all that follow end in time
        limit -= each.seconds
        starts.append(limit)
    found, now = [], begin_s
    for each, latest in zip(lane, reversed(starts), strict=True):
        now = max(now, min(each.start_s, latest))
        found.append(each._replace(start_s=now))
        now += each.seconds
    return found
