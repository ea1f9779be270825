"""Live memory over time: of the step, of each pipeline rank, of a microbatch of each stage.

A view is cut into many equal pieces of time, each with its highest moment. Moments of all views
are rows of one table, since most are met more than once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from autopar.core.held import Held
from autopar.core.plan import PipelinePlan, Plan
from autopar.core.schedule import Action, Kind, Orders
from autopar.core.timeline import PipelineSlot, Timeline, executed
from autopar.cost_model.rank_memory import rank_moments
from autopar.report.stages import stage_groups

__all__ = ["memory_views"]

_PIECES = 720
_ACTIONS: Mapping[str, Kind] = {"F": "F", "B": "B", "I": "I", "W": "W"}


class _Span(NamedTuple):
    """Bytes by kind for some time, and what runs."""

    start_s: float
    end_s: float
    memory: Mapping[str, int]
    name: str


def memory_views(plan: Plan) -> dict[str, Any]:
    """What the page draws of live memory, as JSON types.

    Returns:
        `kinds`; `table`, rows of bytes by kind; `names` of what runs; and `views`, each with a
        `label`, the pipeline `rank` or None, `seconds`, `backward_s` or None, and for each piece of
        time its number in the table and that of its name, -1 where nothing is new.
    """
    found = _Views()
    p = plan.pipeline
    if p is None:
        _timeline(found, plan.predicted.timeline, "the step", plan.predicted.step_time_s)
    else:
        _ranks(found, p, plan.predicted.step_time_s)
        for group in stage_groups(plan):
            label = f"one microbatch of {group.name}, op by op"
            _timeline(found, group.plan.predicted.timeline, label)
    order = dict.fromkeys(kind for part in _timelines(plan) for kind in part.kinds)
    return found.told(order)


def _timelines(plan: Plan) -> list[Timeline]:
    stages = plan.pipeline.stages if plan.pipeline is not None else (plan,)
    return [stage.predicted.timeline for stage in stages]


class _Views:
    """Views, and the tables that they share."""

    def __init__(self) -> None:
        self.views: list[dict[str, Any]] = []
        self.table: dict[tuple[tuple[str, int], ...], int] = {}
        self.names: dict[str, int] = {}

    def add(self, label: str, seconds: float, spans: Iterable[_Span], **more: Any) -> None:
        best: dict[int, tuple[int, _Span]] = {}
        for span in spans:
            total = sum(span.memory.values())
            first = min(int(span.start_s / seconds * _PIECES), _PIECES - 1)
            last = min(int(span.end_s / seconds * _PIECES), _PIECES - 1)
            for piece in range(first, last + 1):
                if piece not in best or total > best[piece][0]:
                    best[piece] = total, span
        rows, names = [-1] * _PIECES, [-1] * _PIECES
        for piece, (_, span) in best.items():
            row = tuple((kind, n) for kind, n in span.memory.items() if n)
            rows[piece] = self.table.setdefault(row, len(self.table))
            names[piece] = self.names.setdefault(span.name, len(self.names))
        self.views.append(
            {"label": label, "seconds": seconds, "rows": rows, "names": names, **more}
        )

    def told(self, order: Iterable[str]) -> dict[str, Any]:
        met = dict.fromkeys(kind for row in self.table for kind, _ in row)
        kinds = [k for k in order if k in met] + [k for k in met if k not in set(order)]
        table = [[dict(row).get(kind, 0) for kind in kinds] for row in self.table]
        return {"kinds": kinds, "table": table, "names": list(self.names), "views": self.views}


def _timeline(found: _Views, timeline: Timeline, label: str, seconds: float = 0.0) -> None:
    """A step, or of a stage one microbatch beside what is done once, op by op."""
    spans, turn = [], None
    end_s = 0.0
    for run in executed(timeline):
        end_s = run.start_s + run.before_s + run.op.compute_s + run.after_s
        memory = dict(zip(timeline.kinds, run.live, strict=False))
        spans.append(_Span(run.start_s, end_s, memory, run.op.name))
        if run.op.phase != "forward" and turn is None:
            turn = run.start_s
    seconds = seconds or end_s
    if spans and seconds:
        found.add(label, seconds, spans, backward_s=turn, rank=None)


def _ranks(found: _Views, p: PipelinePlan, step_s: float) -> None:
    """Each rank over the whole step, where the stages know what they hold."""
    held = [stage.predicted.held for stage in p.stages]
    known = [h for h in held if h is not None]
    if len(known) < len(held) or not p.slots or not step_s:
        return
    by_rank: dict[int, list[PipelineSlot]] = defaultdict(list)
    for slot in p.slots:
        by_rank[slot.rank].append(slot)
    orders = tuple(
        tuple(
            Action(_ACTIONS[slot.kind], slot.stage, slot.microbatch)
            for slot in by_rank[rank]
            if slot.kind in _ACTIONS
        )
        for rank in range(p.size)
    )
    for rank in range(p.size):
        label = f"pipeline rank {rank}" if p.size > 1 else "the step"
        spans = _rank_spans(orders, known[rank :: p.size], rank, by_rank[rank], step_s)
        found.add(label, step_s, spans, backward_s=None, rank=rank)


def _rank_spans(
    orders: Orders, held: list[Held], rank: int, slots: list[PipelineSlot], step_s: float
) -> Iterator[_Span]:
    """What a rank holds, between its slots too; what takes no time has a moment all the same."""
    when = {(slot.kind, slot.stage, slot.microbatch): slot for slot in slots}
    now, waits = 0.0, None
    for kind, stage, microbatch, memory in rank_moments(orders, held, rank):
        if not kind:
            waits = memory
            continue
        slot = when.get((kind, stage, microbatch))
        start_s = slot.start_s if slot is not None else now
        if start_s > now:
            yield _Span(now, start_s, waits if waits is not None else memory, "")
        now = start_s + (slot.seconds if slot is not None else 0.0)
        yield _Span(start_s, now, memory, f"{kind} {stage} {microbatch}")
    if now < step_s and waits is not None:
        yield _Span(now, step_s, waits, "")
