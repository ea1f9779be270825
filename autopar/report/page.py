"""A plan as one HTML file: no request leaves it, and nothing of the user's becomes markup.

The data goes into the page as JSON whose `<`, `>` and `&` are escaped, and the page's script writes
it as text only. A content security policy forbids every load.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from autopar.core.blocks import block_of
from autopar.core.placement import Layout
from autopar.core.plan import Plan
from autopar.core.timeline import PlannedOp, executed
from autopar.core.units import format_bytes, format_seconds
from autopar.report.parameters import parameter_rows
from autopar.report.summary import facts, mesh_text
from autopar.report.totals import MEMORY_KINDS, communication, compute

__all__ = ["page_data", "render_page"]

_MOMENTS = 720
_SCRIPTS = ("helpers.js", "placement.js", "charts.js", "pipeline.js", "ops.js", "start.js")


def render_page(plan: Plan) -> str:
    """The page of a plan, as HTML text."""
    assets = resources.files("autopar.report") / "assets"
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((assets / "page.html").read_text(encoding="utf-8"))
    p, limit = plan.predicted, plan.memory_limit_bytes
    return template.render(
        style=Markup((assets / "page.css").read_text(encoding="utf-8")),
        script=Markup("".join((assets / name).read_text(encoding="utf-8") for name in _SCRIPTS)),
        data=page_data(plan),
        mesh=mesh_text(plan).partition(" (")[0].replace("=", " "),
        pipeline=_pipeline_text(plan),
        facts=facts(plan),
        step_time=format_seconds(p.step_time_s),
        comm_share=p.exposed_time_s / p.step_time_s if p.step_time_s else 0.0,
        hidden_time=format_seconds(p.hidden_time_s),
        peak=format_bytes(p.peak_memory_bytes),
        limit=format_bytes(limit) if limit else "",
        limit_share=p.peak_memory_bytes / limit if limit else 0.0,
        solver=plan.solver,
        bound=format_seconds(plan.solver.bound),
    )


def page_data(plan: Plan) -> dict[str, Any]:
    """What the page's script draws, as JSON types."""
    limit = plan.memory_limit_bytes
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
            }
            for row in parameter_rows(plan)
        ],
        "ops": [_op(plan, op) for op in plan.predicted.timeline.ops],
        "compute": [
            [name, [[phase, seconds] for phase, seconds in by_phase.items()]]
            for name, by_phase in compute(plan).items()
        ],
        "communication": [
            [row.axis, row.kind, row.times, row.num_bytes, row.seconds, row.hidden_s]
            for row in communication(plan)
        ],
        "memory": _memory(plan),
        "pipeline": _pipeline(plan),
        "kinds": MEMORY_KINDS,
    }


def _pipeline(plan: Plan) -> dict[str, Any] | None:
    """What each stage does when, for plans in microbatches."""
    if plan.pipeline is None:
        return None
    return {"ranks": plan.pipeline.size, "slots": [list(slot) for slot in plan.pipeline.slots]}


def _pipeline_text(plan: Plan) -> str:
    p = plan.pipeline
    if p is None:
        return ""
    return f"Schedule {p.schedule}: ranks stand idle for {p.bubble:.1%} of the step."


def _layout(layout: Layout) -> list[str]:
    return [p.short for p in layout]


def _op(plan: Plan, op: PlannedOp) -> dict[str, Any]:
    chosen = plan.nodes.get(op.name)
    block = block_of(op.module)
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
        "other": [_layout(x) for x in op.alternative.outputs] if op.alternative else [],
    }


def _memory(plan: Plan) -> dict[str, Any]:
    """Live bytes over time: in each of many equal pieces of the step, its highest moment."""
    timeline = plan.predicted.timeline
    total = plan.predicted.step_time_s
    if plan.pipeline is not None:
        total = sum(r.before_s + r.op.compute_s + r.after_s for r in executed(timeline))
    rows: list[tuple[int, ...]] = [()] * _MOMENTS
    names = [""] * _MOMENTS
    turn: float | None = None
    for run in executed(timeline) if total else ():
        if run.op.phase != "forward" and turn is None:
            turn = run.start_s
        length = run.before_s + run.op.compute_s + run.after_s
        first = min(int(run.start_s / total * _MOMENTS), _MOMENTS - 1)
        last = min(int((run.start_s + length) / total * _MOMENTS), _MOMENTS - 1)
        for moment in range(first, last + 1):
            if not rows[moment] or sum(run.live) > sum(rows[moment]):
                rows[moment], names[moment] = run.live, run.op.name
    kinds = [k for k in timeline.kinds if any(r[timeline.kinds.index(k)] for r in rows if r)]
    picked = [timeline.kinds.index(kind) for kind in kinds]
    return {
        "kinds": kinds,
        "seconds": total,
        "rows": [[row[i] for i in picked] if row else [] for row in rows],
        "ops": names,
        "backward_s": turn,
    }
