"""Chrome traces of a step: one process per rank, one lane for compute and one per mesh axis.

A rank of a pipeline has such lanes for each of its stages, under one for the stage's microbatches.
The format is the Trace Event Format that Perfetto and `chrome://tracing` read. The predicted and
the measured step share it, so that they can be looked at beside each other. Intervals of one lane
must not overlap there: what does goes to a further lane.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from autopar.core.plan import Plan
from autopar.core.slot_ops import slot_ops
from autopar.core.timeline import PlannedMove, PlannedOp, executed
from autopar.core.units import format_bytes

__all__ = [
    "COMPUTE",
    "MAX_EVENTS",
    "Event",
    "event",
    "lane_names",
    "lanes",
    "predicted_count",
    "predicted_events",
    "ranks_shown",
    "slot_name",
    "spread",
    "stage_lane",
    "write_predicted",
    "write_trace",
]

COMPUTE = 0
"""Lane of compute; axis `a` has lane `1 + a`."""

Event = dict[str, Any]
MAX_EVENTS = 400_000
_TOUCH_US = 0.05
"""Overlap that comes of rounding: an interval ends where the next one begins."""


def lane_names(plan: Plan, rank: int = 0) -> list[str]:
    """Names of the lanes of a rank; `rank` is that of the pipeline, where there is one."""
    plain = ["compute", *(f"communication on {axis}" for axis in plan.axis_names)]
    p = plan.pipeline
    if p is None:
        return plain
    found = []
    for stage in range(rank, len(p.stages), p.size):
        found += [f"stage {stage}", *(f"stage {stage}: {name}" for name in plain)]
    return found


def stage_lane(plan: Plan, stage: int) -> int:
    """The lane of a stage's microbatches; those of its ops and collectives follow."""
    assert plan.pipeline is not None
    return stage // plan.pipeline.size * (2 + len(plan.axis_names))


def slot_name(kind: str, microbatch: int) -> str:
    """What a stage does for one microbatch, such as `"F 3"`; or once, in words."""
    once = {"P": "before the microbatches", "R": "behind the microbatches"}
    return once.get(kind, f"{kind} {microbatch}")


def lanes(pid: int, name: str, threads: Sequence[str], order: int) -> list[Event]:
    """Names of a process and its lanes.

    Args:
        pid: of the process.
        name: what it shows, such as `"rank 3, predicted"`.
        threads: of the lanes.
        order: its place among the processes, from the top.
    """
    found: list[Event] = [
        {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}},
        {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": order}},
    ]
    for tid, thread in enumerate(threads):
        found.append(
            {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": thread}}
        )
        found.append(
            {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index",
             "args": {"sort_index": tid}}
        )  # fmt: skip
    return found


def event(
    pid: int, lane: int, name: str, start_s: float, seconds: float, args: Event | None = None
) -> Event:
    """One interval of a lane."""
    found: Event = {
        "ph": "X",
        "pid": pid,
        "tid": lane,
        "name": name,
        "ts": round(start_s * 1e6, 4),
        "dur": round(seconds * 1e6, 4),
    }
    return {**found, "args": args} if args else found


def spread(names: Sequence[str], steps: Sequence[Sequence[Event]]) -> list[str]:
    """Put intervals that overlap in their lane on further lanes, which are the same in all steps.

    Args:
        names: of the lanes.
        steps: events of processes that have these lanes; their `"tid"` is written anew.

    Returns:
        The names of the lanes that there are now, a further one `"communication on dp, 2"`.
    """
    rows = [_rows(step) for step in steps]
    most = [1] * len(names)
    for step, row_of in zip(steps, rows, strict=True):
        for found, row in zip(step, row_of, strict=True):
            if found["ph"] == "X":
                most[found["tid"]] = max(most[found["tid"]], row + 1)
    first = [sum(most[:lane]) for lane in range(len(names))]
    for step, row_of in zip(steps, rows, strict=True):
        for found, row in zip(step, row_of, strict=True):
            if found["ph"] == "X":
                found["tid"] = first[found["tid"]] + row
    return [
        name if row == 0 else f"{name}, {row + 1}"
        for name, count in zip(names, most, strict=True)
        for row in range(count)
    ]


def _rows(step: Sequence[Event]) -> list[int]:
    """The first row of its lane in which each interval overlaps with none before it."""
    found = [0] * len(step)
    lasts: dict[int, list[Event]] = {}
    intervals = (i for i, each in enumerate(step) if each["ph"] == "X")
    for index in sorted(intervals, key=lambda i: step[i]["ts"]):
        now = step[index]
        rows = lasts.setdefault(now["tid"], [])
        for row, last in enumerate(rows):
            room = now["ts"] - last["ts"]
            if last["dur"] <= room + _TOUCH_US:
                last["dur"] = min(last["dur"], round(room, 4))
                rows[row] = now
                break
        else:
            row = len(rows)
            rows.append(now)
        found[index] = row
    return found


def predicted_count(plan: Plan, rank: int = 0) -> int:
    """How many events `predicted_events` makes."""
    if plan.pipeline is None:
        return sum(1 for _ in predicted_events(plan, 0))
    slots = sum(slot.rank == rank for slot in plan.pipeline.slots)
    return slots + sum(len(ops) for _, ops in slot_ops(plan.pipeline, rank))


def predicted_events(
    plan: Plan, pid: int, rank: int = 0, microbatches: int | None = None
) -> Iterator[Event]:
    """The predicted step of one device; ops without cost (views) are left out.

    Of a pipeline, what `rank` of it does microbatch by microbatch, and the ops of the first
    `microbatches` of them (default: all). A collective that ops wait for ends when they begin, one
    of a gradient begins when its op ends, each as far as its lane is free.
    """
    if plan.pipeline is not None:
        yield from _slot_events(plan, pid, rank, microbatches)
        return
    kinds = plan.predicted.timeline.kinds
    free = [0.0] * len(plan.axis_names)
    shown: tuple[int, ...] = ()
    for run in executed(plan.predicted.timeline):
        op = run.op
        if run.live and run.live != shown:
            shown = run.live
            counter = {"ph": "C", "pid": pid, "name": "live bytes", "ts": run.start_s * 1e6}
            yield {**counter, "args": dict(zip(kinds, run.live, strict=True))}
        args = _of_op(op)
        if op.times > 1:
            args["instance"] = f"{run.instance + 1} of {op.times}"
        now = run.start_s
        for move in (m for m in op.moves if not m.leaves):
            now += move.exposed_s * move.times / op.times
            yield _moved(plan, pid, op, move, now - move.seconds * move.times / op.times, free)
        if op.compute_s:
            yield event(pid, COMPUTE, op.name, now, op.compute_s, args)
            now += op.compute_s
        for move in (m for m in op.moves if m.leaves):
            yield _moved(plan, pid, op, move, now, free)
            now += move.exposed_s * move.times / op.times


def _slot_events(plan: Plan, pid: int, rank: int, microbatches: int | None) -> Iterator[Event]:
    """Of a rank of a pipeline: its slots, and the ops and collectives in them."""
    assert plan.pipeline is not None
    for slot in plan.pipeline.slots:
        if slot.rank == rank:
            name = slot_name(slot.kind, slot.microbatch)
            lane = stage_lane(plan, slot.stage)
            about: Event = {"stage": slot.stage, "microbatch": slot.microbatch}
            yield event(pid, lane, name, slot.start_s, slot.seconds, about)
    for slot, ops in slot_ops(plan.pipeline, rank, microbatches):
        lane = stage_lane(plan, slot.stage) + 1
        for op, move, start_s, seconds in ops:
            if move is None:
                yield event(pid, lane + COMPUTE, op.name, start_s, seconds, _of_op(op))
            else:
                args = _of_move(plan, op, move, seconds)
                yield event(pid, lane + 1 + move.axis, move.kind, start_s, seconds, args)


def _of_op(op: PlannedOp) -> Event:
    return {"op": op.op, "module": op.module, "source": op.source, "phase": op.phase}


def _moved(
    plan: Plan, pid: int, op: PlannedOp, move: PlannedMove, start_s: float, free: list[float]
) -> Event:
    seconds = move.seconds * move.times / op.times
    start_s = max(start_s, free[move.axis])
    free[move.axis] = start_s + seconds
    args = _of_move(plan, op, move, seconds)
    return event(pid, 1 + move.axis, move.kind, start_s, seconds, args)


def _of_move(plan: Plan, op: PlannedOp, move: PlannedMove, seconds: float) -> Event:
    """What is known of a collective that takes so many seconds each time."""
    args: Event = {
        "of": move.of or op.name,
        "op": op.name,
        "bytes": move.num_bytes,
        "size": format_bytes(move.num_bytes),
        "ranks": plan.mesh_shape[move.axis],
        "hidden_s": move.hidden_s * seconds / move.seconds if move.seconds else 0.0,
    }
    if move.pieces > 1:
        args["pieces"] = move.pieces
    return args


def ranks_shown(total: int, lines: int, fit: int, ranks: int | None) -> list[int]:
    """Which ranks a trace has.

    Args:
        total: number of ranks.
        lines: ranks of the pipeline; the ranks of each follow each other, and do the same.
        fit: how many ranks make a file that a browser can open.
        ranks: how many of the first ranks are asked for; default: all, or the first ones of each
            rank of the pipeline, as many as fit, of each at least one.
    """
    if ranks is not None:
        return list(range(min(ranks, total)))
    each = total // lines
    shown = min(each, max(1, fit // lines))
    return [line * each + rank for line in range(lines) for rank in range(shown)]


def write_predicted(plan: Plan, path: str | Path, ranks: int | None) -> int:
    """`Plan.to_trace`; ranks of a mesh, or of a pipeline's stage, do the same at the same time."""
    total = plan.num_devices
    lines = plan.pipeline.size if plan.pipeline is not None else 1
    one_each = sum(predicted_count(plan, line) for line in range(lines))
    chosen = ranks_shown(total, lines, MAX_EVENTS * lines // max(one_each, 1), ranks)
    about: Event = {"ranks": total, "ranks_written": len(chosen), "fingerprint": plan.fingerprint}
    turns = None
    if ranks is None and plan.pipeline is not None and one_each > MAX_EVENTS:
        turns = max(1, plan.pipeline.microbatches * MAX_EVENTS // one_each)
        about["microbatches_with_ops"] = turns

    def events() -> Iterator[Event]:
        line = -1
        for rank in chosen:
            if line != rank * lines // total:
                line = rank * lines // total
                step = list(predicted_events(plan, 0, line, turns))
                names = spread(lane_names(plan, line), [step])
            yield from lanes(rank, f"rank {rank}, predicted", names, rank)
            yield from ({**each, "pid": rank} for each in step)

    write_trace(path, events(), about)
    return len(chosen)


def write_trace(path: str | Path, events: Iterable[Event], about: Event) -> None:
    """Write events, one a line; compressed where the name ends in `.gz`."""
    target = Path(path)
    stream: Any = gzip.open if target.suffix == ".gz" else open
    with stream(target, "wt", encoding="utf-8") as file:
        file.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(about)}, "traceEvents": [')
        comma = "\n"
        for found in events:
            file.write(f"{comma}{json.dumps(found)}")
            comma = ",\n"
        file.write("\n]}\n")
