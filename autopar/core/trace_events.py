"""Chrome traces of a step: one process per rank, one lane for compute and one per mesh axis.

A rank of a pipeline has such lanes for each of its stages, under one for the stage's microbatches.
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
    "lane_names",
    "lanes",
    "predicted_events",
    "slot_name",
    "stage_lane",
    "write_predicted",
    "write_trace",
]

COMPUTE = 0
"""Lane of compute; axis `a` has lane `1 + a`."""

Event = dict[str, Any]
MAX_EVENTS = 400_000


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


def predicted_events(plan: Plan, pid: int, rank: int = 0) -> Iterator[Event]:
    """The predicted step of one device; ops without cost (views) are left out.

    Of a pipeline, what `rank` of it does microbatch by microbatch. A collective that ops wait for
    ends when they begin, one of a gradient begins when its op ends, each as far as its lane is
    free.
    """
    if plan.pipeline is not None:
        for slot in plan.pipeline.slots:
            if slot.rank == rank:
                name = slot_name(slot.kind, slot.microbatch)
                lane = stage_lane(plan, slot.stage)
                about: Event = {"stage": slot.stage, "microbatch": slot.microbatch}
                yield event(pid, lane, name, slot.start_s, slot.seconds, about)
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
    if move.pieces > 1:
        args["pieces"] = move.pieces
    return event(pid, 1 + move.axis, move.kind, start_s, seconds, args)


def write_predicted(plan: Plan, path: str | Path, ranks: int | None) -> int:
    """`Plan.to_trace`; ranks of a mesh, or of a pipeline's stage, do the same at the same time."""
    total = plan.num_devices
    lines = plan.pipeline.size if plan.pipeline is not None else 1
    steps = [list(predicted_events(plan, 0, line)) for line in range(lines)]
    fit = max(1, MAX_EVENTS // max(*map(len, steps), 1))
    count = min(total, ranks if ranks is not None else fit)

    def events(rank: int) -> Iterator[Event]:
        line = rank * lines // total
        yield from lanes(rank, f"rank {rank}, predicted", lane_names(plan, line), rank)
        yield from ({**step, "pid": rank} for step in steps[line])

    write_trace(
        path,
        (found for rank in range(count) for found in events(rank)),
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
