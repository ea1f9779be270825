"""A pipeline in words and as tables: its shape, memory of each rank, seconds of each stage."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import groupby

from rich.console import RenderableType

from autopar.core.placement import local_shape
from autopar.core.plan import PipelinePlan, Plan
from autopar.core.units import format_bytes, format_seconds
from autopar.cost_model.memory import dtype_bytes
from autopar.report.tables import bar, plain_table

__all__ = ["considered_facts", "most_stored", "pipeline_facts", "pipeline_tables"]

_CUTS = 6  # that are named
_TOLD = 4  # pipelines that were not chosen


def most_stored(plan: Plan) -> tuple[int, int]:
    """Bytes of parameters on a device of the pipeline rank that stores most, and this rank."""
    assert plan.pipeline is not None
    ranks = [0] * plan.pipeline.size
    for number, stage in enumerate(plan.pipeline.stages):
        for name, layout in stage.parameters.items():
            numel = math.prod(local_shape(stage.shapes[name], layout, stage.mesh_shape))
            ranks[number % len(ranks)] += numel * dtype_bytes(stage.dtypes[name])
    most = max(ranks)
    return most, ranks.index(most)


def pipeline_tables(plan: Plan) -> Iterator[RenderableType]:
    """Of a pipeline of several ranks: peaks against the limit, and what stages take."""
    p = plan.pipeline
    if p is None or p.size == 1:
        return
    if p.peaks:
        yield from _peaks(p, plan.memory_limit_bytes)
    yield from _seconds(p)


def _peaks(p: PipelinePlan, limit: int) -> Iterator[RenderableType]:
    yield f"Peak memory of a device of each pipeline rank{_limit(limit)}"
    share = "of limit" if limit else "of the highest"
    table = plain_table(
        [("rank", False), ("stages", False), ("peak", True), (share, True), ("", False)], spare=[4]
    )
    whole = limit or max(p.peaks) or 1
    for rank, peak in enumerate(p.peaks):
        stages = ", ".join(str(s) for s in range(rank, len(p.stages), p.size))
        part = peak / whole
        table.add_row(str(rank), stages, format_bytes(peak), f"{part:.1%}", bar(part))
    yield table


def _limit(limit: int) -> str:
    return f", limit {format_bytes(limit)}" if limit else ""


def _seconds(p: PipelinePlan) -> Iterator[RenderableType]:
    yield "Time of each stage (forward, backward: of a microbatch; once: around them all)"
    heads = ["stage", "begins with", "forward", "backward", "once", "in a step"]
    table = plain_table([(head, place > 1) for place, head in enumerate(heads)])
    starts = ("the inputs", *p.cuts)
    rows = [(_cells(stage, p.microbatches), number) for number, stage in enumerate(p.stages)]
    for cells, grouped in groupby(rows, key=lambda row: row[0]):
        numbers = [number for _, number in grouped]
        first, last = numbers[0], numbers[-1]
        name = str(first) if first == last else f"{first}-{last}"
        start = starts[first] if first == last else f"{starts[first]} to {starts[last]}"
        table.add_row(name, start, *cells)
    yield table


def _cells(stage: Plan, microbatches: int) -> tuple[str, ...]:
    phases = stage.predicted.phases
    forward_s = phases.get("forward", 0.0)
    backward_s = phases.get("input", 0.0) + phases.get("weight", 0.0)
    once_s = phases.get("prepare", 0.0) + phases.get("finish", 0.0)
    total_s = once_s + microbatches * (forward_s + backward_s)
    return tuple(map(format_seconds, (forward_s, backward_s, once_s, total_s)))


def pipeline_facts(plan: Plan) -> list[tuple[str, str]]:
    """Microbatches, stages, schedule; nothing of a step in one piece."""
    p = plan.pipeline
    if p is None:
        return []
    stages = f"{len(p.stages)} stages on {p.size} ranks" if p.size > 1 else "no stages"
    named = p.cuts if len(p.cuts) <= _CUTS else (*p.cuts[: _CUTS - 2], "…", p.cuts[-1])
    cuts = f", cut at {', '.join(named)}" if p.cuts else ""
    text = f"{p.microbatches} microbatches, {stages}, {p.schedule}{cuts}"
    if p.size > 1:
        text += f"; ranks stand idle for {p.bubble:.1%} of their time on average"
    return [("pipeline", text)]


def considered_facts(plan: Plan) -> list[tuple[str, str]]:
    """Pipelines that were considered and not chosen."""
    told = [f"{row.shape}: {row.why}" for row in plan.considered[:_TOLD]]
    left = len(plan.considered) - len(told)
    told += [f"and {left} less promising (`considered` in the file)"] if left else []
    return [("not chosen", "; ".join(told))] if told else []
