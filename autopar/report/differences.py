"""Two plans side by side: time, memory, bytes per axis, and the placements that differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from rich.console import RenderableType

from autopar.core.block_kinds import checkpoint_text
from autopar.core.plan import Plan
from autopar.core.units import format_bytes, format_seconds, without_residue
from autopar.report.parameters import merged_names
from autopar.report.pipeline import pipeline_facts
from autopar.report.summary import (
    fusion_text,
    mesh_text,
    pinned_text,
    precision_text,
)
from autopar.report.tables import plain_table, render, shown
from autopar.report.totals import MEMORY_KINDS, CommTotal, communication, compute

__all__ = ["render_differences", "render_price_of"]

_SAME = 1e-9  # relative: sums of seconds in another order
_FACTS: dict[str, Callable[[Plan], str]] = {
    "mesh": mesh_text,
    "pinned": pinned_text,
    "pipeline": lambda plan: ", ".join(text for _, text in pipeline_facts(plan)) or "none",
    "recomputation": lambda plan: checkpoint_text(plan.checkpoint),
    "solver": lambda plan: f"{plan.solver.status}, gap {plan.solver.gap:.2%}",
    "precision": precision_text,
    "fused kernels": fusion_text,
    "memory limit": lambda plan: format_bytes(plan.memory_limit_bytes),
}


def render_differences(a: Plan, b: Plan, width: int | None = None) -> str:
    """Where plan `b` differs from plan `a`, as plain text."""
    parts = [*_totals(a, b), *_communication(a, b), *_placements(a, b), *_ops(a, b)]
    return render(parts, width)


def render_price_of(pins: Mapping[str, tuple[str, ...]], pinned: Plan, free: Plan) -> str:
    """What the pins cost, in one line."""
    what = ", ".join(f"{glob}=({', '.join(layout)})" for glob, layout in pins.items())
    a, b = free.predicted, pinned.predicted
    peak = f"{format_bytes(b.peak_memory_bytes)} against {format_bytes(a.peak_memory_bytes)}"
    proof = f"gaps {pinned.solver.gap:.2%} and {free.solver.gap:.2%}"
    return (
        f"pin {what}: {format_seconds(b.step_time_s)} against {format_seconds(a.step_time_s)} "
        f"without it, {_change(a.step_time_s, b.step_time_s, format_seconds)}; peak memory {peak}; "
        f"{proof}"
    )


def _change(before: float, after: float, text: Callable[[float], str]) -> str:
    """`+1.2 ms (+3.4%)`; of what was not there, `+1.2 ms (new)`."""
    if abs(after - before) <= _SAME * abs(before):
        return "the same"
    sign = "+" if after >= before else "−"
    share = f"{sign}{abs(after - before) / before:.2%}" if before else "new"
    return f"{sign}{text(abs(after - before))} ({share})"


def _totals(a: Plan, b: Plan) -> Iterator[RenderableType]:
    table = plain_table([("", False), ("a", False), ("b", False), ("", False)])
    for name, text in _FACTS.items():
        x, y = text(a), text(b)
        table.add_row(name, x, y, "" if x == y else "differs")
    yield table
    table = plain_table([("", False), ("a", True), ("b", True), ("b against a", True)])
    p, q = a.predicted, b.predicted
    classes = (compute(a), compute(b))
    seconds = [("step time", p.step_time_s, q.step_time_s)]
    for name in dict.fromkeys((*classes[0], *classes[1])):
        before, after = (sum(found.get(name, {}).values()) for found in classes)
        seconds.append((f"  {name}", before, after))
    seconds.append(("  exposed communication", p.exposed_time_s, q.exposed_time_s))
    seconds += [
        (f"  {name}", before, after)
        for name, before, after in (
            ("exposed copies", p.exposed_copy_s, q.exposed_copy_s),
            ("bubble", p.bubble_s, q.bubble_s),
            ("update", p.update_s, q.update_s),
            ("offload", p.offload_s, q.offload_s),
        )
        if before or after
    ]
    seconds.append(("hidden communication", p.hidden_time_s, q.hidden_time_s))
    whole_s = max(p.step_time_s, q.step_time_s)
    for name, *pair in seconds:
        x_s, y_s = (without_residue(s, whole_s) for s in pair)
        change = _change(x_s, y_s, format_seconds)
        table.add_row(name, format_seconds(x_s), format_seconds(y_s), change)
    sizes = [("peak memory", p.peak_memory_bytes, q.peak_memory_bytes)]
    kinds = dict.fromkeys((*MEMORY_KINDS, *p.memory, *q.memory))
    sizes += [(f"  {k}", p.memory.get(k, 0), q.memory.get(k, 0)) for k in kinds]
    for name, x_bytes, y_bytes in sizes:
        if x_bytes or y_bytes:
            change = _change(x_bytes, y_bytes, format_bytes)
            table.add_row(name, format_bytes(x_bytes), format_bytes(y_bytes), change)
    yield table


def _by_axis(plan: Plan) -> dict[tuple[str, str], CommTotal]:
    return {(plan.axis_names[row.axis], row.kind): row for row in communication(plan)}


def _communication(a: Plan, b: Plan) -> Iterator[RenderableType]:
    x, y = _by_axis(a), _by_axis(b)
    if not x and not y:
        return
    yield "Communication of one device per step"
    table = plain_table(
        [("axis", False), ("collective", False), ("a", True), ("b", True), ("b against a", True)]
    )
    for key in sorted({*x, *y}):
        before, after = (rows[key].num_bytes if key in rows else 0 for rows in (x, y))
        counts = [f" in {rows[key].times}" if key in rows else "" for rows in (x, y)]
        change = _change(before, after, format_bytes)
        cells = [f"{format_bytes(before)}{counts[0]}", f"{format_bytes(after)}{counts[1]}"]
        table.add_row(*key, *cells, change)
    yield table


def _placements(a: Plan, b: Plan) -> Iterator[RenderableType]:
    def text(plan: Plan, name: str) -> str:
        if name not in plan.parameters:
            return "absent"
        layout = ", ".join(str(p) for p in plan.parameters[name])
        mode = plan.modes.get(name, "")
        return f"{layout}\n{mode}" if mode else layout

    names = list(dict.fromkeys((*a.parameters, *b.parameters)))
    changed: dict[tuple[str, str], list[str]] = {}
    for name in names:
        pair = (text(a, name), text(b, name))
        if pair[0] != pair[1]:
            changed.setdefault(pair, []).append(name)
    count = sum(map(len, changed.values()))
    if not count:
        yield f"Parameters: all {len(names)} are stored and used alike"
        return
    yield f"Parameters that differ ({count} of {len(names)})"
    table = plain_table([("parameter", False), ("a", False), ("b", False)])
    for (before, after), group in changed.items():
        for pattern in merged_names(group):
            table.add_row(shown(pattern), before, after)
    yield table


def _ops(a: Plan, b: Plan) -> Iterator[RenderableType]:
    if a.fingerprint != b.fingerprint:
        yield "Ops are not compared: the plans are of different graphs."
        return
    if a.pipeline is not None or b.pipeline is not None:
        yield "Ops are not compared: they are planned stage by stage."
        return
    shared = [name for name in a.nodes if name in b.nodes]
    differ = [name for name in shared if a.nodes[name] != b.nodes[name]]
    only = len(a.nodes) + len(b.nodes) - 2 * len(shared)
    more = f", {only} stand in one plan only" if only else ""
    yield f"Ops: {len(differ)} of {len(shared)} have other placements{more}"
