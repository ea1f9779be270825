"""Chrome traces of a step: one process per rank, one lane for compute and one per mesh axis.

The format is the Trace Event Format that Perfetto and `chrome://tracing` read. The predicted and
the measured step share it, so that they can be looked at beside each other.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from autopar.core.plan import Plan
from autopar.core.timeline import PlannedMove, PlannedOp, executed
from autopar.core.units import format_bytes

__all__ = [
    "COMPUTE",
    "MAX_EVENTS",
    "Event",
    "event",
    "lanes",
    "predicted_events",
    "write_predicted",
    "write_trace",
]

COMPUTE = 0
"""Lane of compute; axis `a` has lane `1 + a`."""

Event = dict[str, Any]
MAX_EVENTS = 400_000


def lanes(pid: int, name: str, axis_names: Sequence[str], order: int) -> list[Event]:
    """Names of a process and its lanes.

    Args:
        pid: of the process.
        name: what it shows, such as `"rank 3, predicted"`.
        axis_names: of the mesh.
        order: its place among the processes, from the top.
    """
    threads = ["compute", *(f"communication on {axis}" for axis in axis_names)]
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


def predicted_events(plan: Plan, pid: int) -> Iterator[Event]:
    """The predicted step of one device; ops without cost (views) are left out.

    A collective that ops wait for ends when they begin, one of a gradient begins when its op ends,
    each as far as its lane is free.
    """
    kinds = plan.predicted.timeline.kinds
    free = [0.0] * len(plan.axis_names)
    shown: tuple[int, ...] = ()
    for run in executed(plan.predicted.timeline):
        op = run.op
        if run.live and run.live != shown:
            shown = run.live
            counter = {"ph": "C", "pid": pid, "name": "live bytes", "ts": run.start_s * 1e6}
            yield {**counter, "args": dict(zip(kinds, run.live, strict=True))}
        args: Event = {"op": op.op, "module": op.module, "source": op.source, "phase": op.phase}
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


def _moved(
    plan: Plan, pid: int, op: PlannedOp, move: PlannedMove, start_s: float, free: list[float]
) -> Event:
    seconds = move.seconds * move.times / op.times
    start_s = max(start_s, free[move.axis])
    free[move.axis] = start_s + seconds
    args = {
        "of": move.of or op.name,
        "op": op.name,
        "bytes": move.num_bytes,
        "size": format_bytes(move.num_bytes),
        "ranks": plan.mesh_shape[move.axis],
        "hidden_s": move.hidden_s * move.times / op.times,
    }
    return event(pid, 1 + move.axis, move.kind, start_s, seconds, args)


def write_predicted(plan: Plan, path: str | Path, ranks: int | None) -> int:
    """`Plan.to_trace`; all ranks do the same at the same time, as the plan expects it."""
    total = 1
    for size in plan.mesh_shape:
        total *= size
    steps = list(predicted_events(plan, 0))
    fit = max(1, MAX_EVENTS // max(len(steps), 1))
    count = min(total, ranks if ranks is not None else fit)
    write_trace(
        path,
        (
            found
            for rank in range(count)
            for found in (
                *lanes(rank, f"rank {rank}, predicted", plan.axis_names, rank),
                *({**step, "pid": rank} for step in steps),
            )
        ),
        {"ranks": total, "ranks_written": count, "fingerprint": plan.fingerprint},
    )
    return count


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
