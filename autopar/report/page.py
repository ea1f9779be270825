"""A plan as one HTML file: no request leaves it, and nothing of the user's becomes markup.

The data goes into the page as JSON whose `<`, `>` and `&` are escaped, and the page's script writes
it as text only. A content security policy forbids every load.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from autopar.core.blocks import block_of
from autopar.core.excerpt import excerpts_to
from autopar.core.placement import Layout
from autopar.core.plan import Plan
from autopar.core.timeline import PlannedOp
from autopar.core.units import format_bytes, format_seconds
from autopar.report.memory import memory_views
from autopar.report.parameters import index_ranges, parameter_rows
from autopar.report.stages import StageGroup, holders, longest_rank, stage_groups
from autopar.report.summary import facts, mesh_text
from autopar.report.totals import MEMORY_KINDS, communication, compute

__all__ = ["page_data", "render_page"]

_NOTHING_S = 1e-12  # what is hidden but for rounding
_SCRIPTS = ("helpers", "placement", "charts", "pipeline", "lanes", "ops", "program", "start")


def render_page(plan: Plan) -> str:
    """The page of a plan, as HTML text."""
    assets = resources.files("autopar.report") / "assets"
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    scripts = ((assets / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS)
    template = environment.from_string((assets / "page.html").read_text(encoding="utf-8"))
    p, limit = plan.predicted, plan.memory_limit_bytes
    return template.render(
        style=Markup((assets / "page.css").read_text(encoding="utf-8")),
        script=Markup("".join(scripts)),
        data=page_data(plan),
        mesh=mesh_text(plan).partition(" (")[0].replace("=", " "),
        pipeline=_pipeline_text(plan),
        time_text=_time_text(plan),
        ops_text=_ops_text(plan),
        highest=_highest_text(plan),
        facts=facts(plan),
        step_time=format_seconds(p.step_time_s),
        comm_share=p.exposed_time_s / p.step_time_s if p.step_time_s else 0.0,
        hidden_time=format_seconds(p.hidden_time_s if p.hidden_time_s > _NOTHING_S else 0.0),
        peak=format_bytes(p.peak_memory_bytes),
        limit=format_bytes(limit) if limit else "",
        limit_share=p.peak_memory_bytes / limit if limit else 0.0,
        solver=plan.solver,
        bound=format_seconds(plan.solver.bound),
        objective=format_seconds(plan.solver.objective),
    )


def page_data(plan: Plan) -> dict[str, Any]:
    """What the page's script draws, as JSON types."""
    limit, groups = plan.memory_limit_bytes, stage_groups(plan)
    return {
        "mesh": list(plan.mesh_shape),
        "axes": list(plan.axis_names),
        "step_s": plan.predicted.step_time_s,
        "limit": limit,
        "peak": plan.predicted.peak_memory_bytes,
        "parameters": [
            {
                "block": row.block,
                "name": row.name,
                "count": row.count,
                "shape": list(row.shape),
                "layout": _layout(row.layout),
                "mode": row.mode,
                "bytes": row.num_bytes,
                "ranks": list(row.ranks),
            }
            for row in parameter_rows(plan, holders(plan))
        ],
        "groups": [
            {
                "label": group.label,
                "name": group.name,
                "ranks": list(group.ranks) if _has_ranks(plan) else [],
            }
            for group in groups
        ],
        "ops": [
            op
            for number, group in enumerate(groups)
            for op in _ops(group, number, plan.pipeline is None)
        ],
        "compute": [
            [name, [[phase, seconds] for phase, seconds in by_phase.items()]]
            for name, by_phase in compute(plan).items()
        ],
        "communication": [
            [row.axis, row.kind, row.times, row.num_bytes, row.seconds, row.hidden_s]
            for row in communication(plan)
        ],
        "memory": memory_views(plan),
        "pipeline": _pipeline(plan),
        "program": _program(plan, groups),
        "kinds": MEMORY_KINDS,
    }


def _program(plan: Plan, groups: Sequence[StageGroup]) -> dict[str, Any]:
    """What a rank runs for blocks, and of each the group whose ops its nodes are for."""
    firsts = [x.stages[0] if x.stages else 0 for x in plan.excerpts]
    return excerpts_to(plan.excerpts) | {
        "groups": [next(i for i, g in enumerate(groups) if n in g.stages) for n in firsts],
        "labels": [
            f"stage{'s' * (len(x.stages) > 1)} {index_ranges(list(x.stages)).strip('[]')}"
            if len(groups) > 1 and x.stages
            else ""
            for x in plan.excerpts
        ],
    }


def _pipeline(plan: Plan) -> dict[str, Any] | None:
    """What each stage does when, for plans in microbatches."""
    p = plan.pipeline
    if p is None:
        return None
    return {
        "ranks": p.size,
        "slots": [list(slot) for slot in p.slots],
        "peaks": list(p.peaks),
        "longest": longest_rank(plan),
        "bubble_s": plan.predicted.bubble_s,
    }


# --- sentences about the stages of a pipeline


def _has_ranks(plan: Plan) -> bool:
    return plan.pipeline is not None and plan.pipeline.size > 1


def _pipeline_text(plan: Plan) -> str:
    p = plan.pipeline
    if p is None:
        return ""
    if p.size == 1:
        return f"{p.microbatches} microbatches, one after the other."
    return (
        f"Schedule {p.schedule}, {p.microbatches} microbatches. All ranks together stand idle for "
        f"{p.bubble:.1%} of their time; rank {longest_rank(plan)}, which works longest, for "
        f"{_bubble_share(plan):.1%} of the step: the bubble."
    )


def _bubble_share(plan: Plan) -> float:
    p = plan.predicted
    return p.bubble_s / p.step_time_s if p.step_time_s else 0.0


def _time_text(plan: Plan) -> str:
    if not _has_ranks(plan):
        return ""
    waits = format_seconds(plan.predicted.bubble_s)
    return (
        f"Of a device of pipeline rank {longest_rank(plan)}, which works longest. It waits {waits} "
        f"for other ranks, {_bubble_share(plan):.1%} of the step: the bubble."
    )


def _ops_text(plan: Plan) -> str:
    """What the seconds of a row are, and which rows make the sums of the breakdown."""
    if plan.pipeline is None:
        return "Seconds are of all executions in one step; those of all ops are the sums above."
    turns = plan.pipeline.microbatches
    if not _has_ranks(plan):
        return (
            f"Seconds are of all executions in one step of {turns} microbatches; those of all ops "
            "are the sums above."
        )
    rank = longest_rank(plan)
    own = [
        (stage, group)
        for group in stage_groups(plan)
        for stage in group.stages
        if stage % plan.pipeline.size == rank
    ]
    names = " and ".join(str(stage) for stage, _ in own)
    told = [
        " + ".join(format_seconds(seconds) for seconds in found) + f" of {name}"
        for name, found in (
            ("compute", [group.compute_s for _, group in own]),
            ("communication", [group.comm_s for _, group in own]),
        )
    ]
    several = len(own) > 1
    return (
        f"Seconds are of one stage in one step of {turns} microbatches; equal stages are one row. "
        f"The sums above are those of stage{'s' * several} {names} on rank {rank}: "
        f"{' and '.join(told)}. What goes from stage to stage is in no row, and none of it is in "
        "the sums: ranks stand idle for it."
    )


def _highest_text(plan: Plan) -> str:
    """Whose peak the headline is."""
    if not _has_ranks(plan):
        return "peak memory of a device"
    assert plan.pipeline is not None
    peaks = plan.pipeline.peaks
    where = f" {peaks.index(max(peaks))}" if peaks else ""
    return f"peak memory of a device of pipeline rank{where}, the highest"


# --- ops


def _layout(layout: Layout) -> list[str]:
    return [p.short for p in layout]


def _ops(group: StageGroup, number: int, plain: bool) -> list[dict[str, Any]]:
    timeline = group.plan.predicted.timeline
    instances = {name: span.times for span in timeline.spans for name in span.ops}
    return [
        _op(group.plan, op)
        | {"group": number, "instances": instances.get(op.name, op.times if plain else 1)}
        for op in timeline.ops
    ]


def _op(plan: Plan, op: PlannedOp) -> dict[str, Any]:
    chosen = plan.nodes.get(op.name)
    block = block_of(op.module, plan.nested)
    return {
        "name": op.name,
        "op": op.op,
        "class": op.op_class,
        "phase": op.phase,
        "module": op.module,
        "block": f"{block.container}.{block.number}" if block is not None else "",
        "source": op.source,
        "operands": list(op.operands),
        "inputs": [_layout(x) for x in chosen.inputs] if chosen is not None else [],
        "outputs": [_layout(x) for x in chosen.outputs] if chosen is not None else [],
        "variants": [v for v in dict.fromkeys(chosen.variants) if v] if chosen is not None else [],
        "shapes": [list(shape) for shape in op.shapes],
        "dtype": op.dtype,
        "times": op.times,
        "compute_s": op.compute_s,
        "moves": [list(move) for move in op.moves],
        "more_s": op.alternative.more_s if op.alternative is not None else None,
        "other": [
            [_layout(x) for x in side]
            for side in ((op.alternative.inputs, op.alternative.outputs) if op.alternative else ())
        ],
    }
