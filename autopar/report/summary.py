"""A plan as terminal tables: expectations and proof, memory, time, bytes sent, placements."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from autopar.core.block_kinds import checkpoint_text
from autopar.core.placement import Layout
from autopar.core.plan import Plan
from autopar.core.units import format_bytes, format_seconds, without_residue
from autopar.report.parameters import parameter_rows
from autopar.report.pipeline import (
    considered_facts,
    most_stored,
    pipeline_facts,
    pipeline_tables,
)
from autopar.report.tables import bar, plain_table, render, shown
from autopar.report.totals import MEMORY_KINDS, communication, compute

__all__ = [
    "facts",
    "fusion_text",
    "mesh_text",
    "pinned_text",
    "precision_text",
    "render_summary",
]

# Placeholders that are not the user's: buffers, lifted constants, dropout seed, output gradients.
_INTERNAL_INPUT = re.compile(r"[bc]_wrapped_|autopar_seed$|tangent_\d+$")

_KINDS = {
    **MEMORY_KINDS,
    "received": "from the neighbours of this pipeline stage, for its microbatches in work",
    "sent": "to the neighbours of this pipeline stage, until it is there",
}


def render_summary(plan: Plan, width: int | None = None) -> str:
    """Totals, communication and placements of a plan as plain text.

    Args:
        plan: the plan.
        width: columns; default: the terminal's, or 120.

    Returns:
        Text without colour codes, ending in a newline.
    """
    parts = (
        _header(plan),
        *_memory_table(plan),
        *pipeline_tables(plan),
        *_compute_table(plan),
        *_communication(plan),
        *_placements(plan),
        *_inputs(plan),
    )
    return render(parts, width)


# --- header


def facts(plan: Plan) -> list[tuple[str, str]]:
    """What holds for the plan as a whole, `(name, text)`."""
    kind = "training step" if plan.training else "inference"
    return [
        ("plan", f"{kind} of model {plan.fingerprint}, {_num_ops(plan)} ops"),
        ("mesh", mesh_text(plan)),
        *pipeline_facts(plan),
        ("cluster", _cluster(plan)),
        ("step time", _step_time(plan)),
        ("peak memory", _memory(plan)),
        ("recomputation", checkpoint_text(plan.checkpoint)),
        *_offload(plan),
        *_away(plan),
        *_host(plan),
        ("solver", _solver(plan)),
        ("pinned", pinned_text(plan)),
        *([("optimizer", plan.optimizer)] if plan.training else []),
        ("precision", precision_text(plan)),
        ("fused kernels", fusion_text(plan)),
        *considered_facts(plan),
    ]


def _num_ops(plan: Plan) -> int:
    stages = plan.pipeline.stages if plan.pipeline is not None else (plan,)
    return sum(len(stage.nodes) for stage in stages)


def _offload(plan: Plan) -> list[tuple[str, str]]:
    if plan.offload == "none":
        return []
    p = plan.predicted
    states = format_bytes(p.host_bytes - p.host_activation_bytes)
    text = f"optimizer states, {states}, and their update on the host: "
    return [("offload", f"{text}{format_seconds(p.offload_s)} more than on the device")]


def _away(plan: Plan) -> list[tuple[str, str]]:
    p = plan.predicted
    if not p.host_activation_bytes:
        return []
    text = (
        f"activations, {format_bytes(p.host_activation_bytes)}, on the host between forward and "
        f"backward: {format_seconds(p.copy_time_s)} of copies, of which compute stands still for "
        f"{format_seconds(p.exposed_copy_s)}"
    )
    return [("sent away", text)]


def _host(plan: Plan) -> list[tuple[str, str]]:
    used, device = plan.predicted.host_bytes, plan.cluster.get("device")
    limit = device.get("host_memory_bytes") if isinstance(device, dict) else None
    if not used:
        return []
    if limit is None:
        return [("host memory", f"{format_bytes(used)} for each device, of an unknown number")]
    of = f"{format_bytes(used)} of {format_bytes(limit)} for each device"
    return [("host memory", f"{of} ({used / limit:.1%})")]


def _header(plan: Plan) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, text in facts(plan):
        grid.add_row(name, text)
    return grid


def mesh_text(plan: Plan) -> str:
    """`data=2 × tensor=4 (8 devices)`, with a pipeline as the first axis."""
    axes = list(zip(plan.axis_names, plan.mesh_shape, strict=True))
    if plan.pipeline is not None and plan.pipeline.size > 1:
        axes.insert(0, ("pipeline", plan.pipeline.size))
    text = " × ".join(f"{name}={size}" for name, size in axes)
    return f"{text} ({plan.num_devices} devices)"


def _cluster(plan: Plan) -> str:
    def name(key: str) -> str:
        value = plan.cluster.get(key)
        return str(value.get("name", "?")) if isinstance(value, dict) else "?"

    return (
        f"{plan.cluster.get('profile', '?')}: {name('device')}, "
        f"{plan.cluster.get('devices_per_node', '?')} per node, {name('intra')} within a node, "
        f"{name('inter')} between nodes"
    )


def _step_time(plan: Plan) -> str:
    p = plan.predicted
    exposed_s = without_residue(p.exposed_time_s, p.comm_time_s)
    hidden_s = without_residue(p.hidden_time_s, p.comm_time_s)
    share = f" ({exposed_s / p.step_time_s:.1%})" if p.step_time_s else ""
    return (
        f"{format_seconds(p.step_time_s)} = compute {format_seconds(p.compute_time_s)}"
        f"{_packing(plan)} + "
        f"exposed communication {format_seconds(exposed_s)}{share}"
        f"{_moved(plan)}{_idle(plan)}; "
        f"{format_seconds(hidden_s)} of communication hidden; predicted"
        f"{_of_whom(plan)}"
    )


def _packing(plan: Plan) -> str:
    packing_s = plan.predicted.packing_s
    return f" (packing {format_seconds(packing_s)})" if packing_s else ""


def _idle(plan: Plan) -> str:
    p = plan.predicted
    if plan.pipeline is None or plan.pipeline.size == 1:
        return ""
    idle_s = without_residue(p.bubble_s, p.step_time_s)
    return f" + bubble of this rank {format_seconds(idle_s)} ({idle_s / p.step_time_s:.1%})"


def _of_whom(plan: Plan) -> str:
    several = plan.pipeline is not None and plan.pipeline.size > 1
    return ", of the rank that works longest" if several else ""


def _moved(plan: Plan) -> str:
    p = plan.predicted
    parts = {"exposed copies": p.exposed_copy_s, "update": p.update_s, "offload": p.offload_s}
    return "".join(f" + {name} {format_seconds(s)}" for name, s in parts.items() if s)


def _memory(plan: Plan) -> str:
    p, limit = plan.predicted, plan.memory_limit_bytes
    of = f" of {format_bytes(limit)} ({p.peak_memory_bytes / limit:.1%})" if limit else ""
    kinds = sorted(p.memory.items(), key=lambda item: (-item[1], item[0]))
    parts = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in kinds if size)
    return f"{format_bytes(p.peak_memory_bytes)}{of} per device" + (f": {parts}" if parts else "")


def _solver(plan: Plan) -> str:
    s = plan.solver
    proved = "" if s.status == "optimal" else " (not proved optimal)"
    several = plan.pipeline is not None and len(plan.pipeline.stages) > 1
    last = "the last solves of unlike stages" if several else "the last solve"
    ended = "; the time limit ended the search" if s.out_of_time else ""
    return (
        f"{s.status}{proved}: of the {format_seconds(s.objective)} that the search counts, "
        f"no plan is below {format_seconds(s.bound)} (gap {s.gap:.2%}); {last} took "
        f"{format_seconds(s.seconds)}, with {s.variables} variables and {s.constraints} "
        f"constraints after reduction{ended}"
    )


def fusion_text(plan: Plan) -> str:
    """Names of the kernels that ops were priced in."""
    return ", ".join(sorted(plan.fusion)) or "none"


def precision_text(plan: Plan) -> str:
    """Of the parameters, and of compute where that is another."""
    kept = ", ".join(sorted(set(plan.dtypes.values())))
    if not kept or plan.precision == "fp32":
        return kept or plan.precision
    return f"{plan.precision} from parameters in {kept}"


def pinned_text(plan: Plan) -> str:
    """`data=2, zero=3`, or `nothing`."""
    if not plan.constraints:
        return "nothing"
    return ", ".join(f"{key}={_plain(value)}" for key, value in plan.constraints.items())


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


# --- memory, time


def _memory_table(plan: Plan) -> Iterator[RenderableType]:
    yield ""
    p, limit = plan.predicted, plan.memory_limit_bytes
    several = plan.pipeline is not None and plan.pipeline.size > 1
    whose = " of the pipeline rank that needs most" if several else ""
    of = f", limit {format_bytes(limit)}" if limit else ""
    yield f"Memory of one device{whose} at its peak{of}"
    whole = limit or p.peak_memory_bytes or 1
    share = "of limit" if limit else "of peak"
    table = plain_table(
        [("kind", False), ("", True), (share, True), ("", False), ("what", False)], spare=[3]
    )
    order = [kind for kind in _KINDS if p.memory.get(kind)]
    order += [kind for kind, size in p.memory.items() if size and kind not in _KINDS]
    for kind in order:
        part = p.memory[kind] / whole
        text = _KINDS.get(kind, "")
        drawn = bar(p.memory[kind] / (p.peak_memory_bytes or 1))
        table.add_row(kind, format_bytes(p.memory[kind]), f"{part:.1%}", drawn, text)
    part = p.peak_memory_bytes / whole
    table.add_row("peak", format_bytes(p.peak_memory_bytes), f"{part:.1%}", bar(1.0), "")
    yield table


def _compute_table(plan: Plan) -> Iterator[RenderableType]:
    rows = compute(plan)
    if not rows:
        return
    yield "Compute of one device per step"
    phases = [p for p in ("forward", "recompute", "backward") if any(p in r for r in rows.values())]
    heads = [("op class", False), *((p, True) for p in phases), ("total", True), ("of step", True)]
    table = plain_table([*heads, ("", False)], spare=[len(heads)])
    step_s = plan.predicted.step_time_s or 1.0
    for name, by_phase in rows.items():
        total = sum(by_phase.values())
        cells = [format_seconds(by_phase.get(p, 0.0)) for p in phases]  # type: ignore[call-overload]
        table.add_row(
            name, *cells, format_seconds(total), f"{total / step_s:.1%}", bar(total / step_s)
        )
    yield table


def _communication(plan: Plan) -> Iterator[RenderableType]:
    rows = communication(plan)
    if not rows:
        yield "Communication per step: none\n"
        return
    yield "Communication of one device per step (bytes of full buffers; hidden: beside compute)"
    known = rows[0].seconds is not None
    heads = [("axis", False), ("size", True), ("collective", False), ("count", True)]
    table = plain_table(
        [
            *heads,
            ("bytes", True),
            ("", True),
            *([("time", True), ("hidden", True), ("exposed", True), ("of step", True)] * known),
        ],
        spare=[4, *([1, 9, 7] if known else [1])],
    )
    step_s = plan.predicted.step_time_s or 1.0

    def times(seconds: float | None, hidden_s: float | None) -> list[str]:
        if seconds is None or hidden_s is None:
            return []
        exposed_s = without_residue(seconds - hidden_s, seconds)
        hidden_s = without_residue(hidden_s, seconds)
        spent = [format_seconds(s) for s in (seconds, hidden_s, exposed_s)]
        return [*spent, f"{exposed_s / step_s:.1%}"]

    for row in rows:
        table.add_row(
            plan.axis_names[row.axis],
            str(plan.mesh_shape[row.axis]),
            row.kind,
            str(row.times),
            f"{row.num_bytes:,}",
            format_bytes(row.num_bytes),
            *times(row.seconds, row.hidden_s),
        )
    total = sum(row.num_bytes for row in rows)
    count = str(sum(row.times for row in rows))
    p = plan.predicted
    spent = times(*((p.comm_time_s, p.hidden_time_s) if known else (None, None)))
    table.add_row("total", "", "", count, f"{total:,}", format_bytes(total), *spent)
    yield table


# --- placements


def _format_layout(layout: Layout) -> str:
    return ", ".join(str(p) for p in layout)


def _placements(plan: Plan) -> Iterator[RenderableType]:
    rows = parameter_rows(plan)
    axes = ", ".join(plan.axis_names)
    yield f"Parameters ({len(plan.parameters)})"
    table = plain_table(
        [
            ("parameter", False),
            ("shape", False),
            (f"placements ({axes})", False),
            ("mode", False),
            ("bytes/device", True),
        ],
        spare=[1],
    )
    several = plan.pipeline is not None and plan.pipeline.size > 1
    every = "on all pipeline ranks" if several else ""
    blocks: dict[str, int] = {}
    for row in rows:
        blocks[row.block] = blocks.get(row.block, 0) + row.num_bytes * row.count
    block = ""
    for row in rows:
        if row.block != block and row.block:
            size = f"all {format_bytes(blocks[row.block])}"
            table.add_row(shown(row.block), "", "", every, size)
        block = row.block
        times = f" (× {row.count})" if row.nested else ""
        name = ("  " if block else "") + shown(row.name) + times
        shape = str(list(row.shape))
        table.add_row(
            name, shape, _format_layout(row.layout), row.mode, format_bytes(row.num_bytes)
        )
    name, total = "total", sum(row.num_bytes * row.count for row in rows)
    if several:
        total, rank = most_stored(plan)
        name = f"total, pipeline rank {rank} (most)"
    table.add_row(name, "", "", "", format_bytes(total))
    yield table


def _inputs(plan: Plan) -> Iterator[RenderableType]:
    given = {name: x for name, x in plan.inputs.items() if not _INTERNAL_INPUT.match(name)}
    if not given:  # as of a pipeline, whose stages have inputs
        return
    axes = ", ".join(plan.axis_names)
    yield "Inputs"
    table = plain_table([("input", False), (f"placements ({axes})", False)])
    for name, layout in given.items():
        table.add_row(shown(name), _format_layout(layout))
    yield table
