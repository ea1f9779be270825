"""A plan as terminal tables: expectations and proof, bytes sent, placements by block.

Repeated blocks are shown once. The numbers in an FQN index repeated modules; parameters that
differ in one such index only, and are equal in shape, layout and mode, become one row:
`model.layers.0.mlp.up_proj.weight` to `model.layers.31.…` is `model.layers.[0-31]`.
"""

from __future__ import annotations

import io
import json
import math
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from autopar.core.placement import Layout, local_shape
from autopar.core.plan import Plan
from autopar.core.units import format_bytes, format_seconds
from autopar.cost_model.memory import dtype_bytes

__all__ = [
    "ParameterRow",
    "format_bytes",
    "format_seconds",
    "parameter_rows",
    "plain_table",
    "render",
    "render_summary",
]

_Part = str | frozenset[int]

# Placeholders that are not the user's: buffers, lifted constants, dropout seed, output gradients.
_INTERNAL_INPUT = re.compile(r"[bc]_wrapped_|autopar_seed$|tangent_\d+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterRow:
    """Parameters that are laid out alike.

    Attributes:
        block: the part of the name up to the first index, such as `model.layers.[0-31]`, or "".
        name: the rest of it, such as `mlp.up_proj.weight`.
        count: parameters in the row.
        shape: global shape of each.
        layout: placement of each per mesh axis.
        mode: parallel form of each.
        num_bytes: of each on one device.
    """

    block: str
    name: str
    count: int
    shape: tuple[int, ...]
    layout: Layout
    mode: str
    num_bytes: int


def render_summary(plan: Plan, width: int | None = None) -> str:
    """Totals, communication and placements of a plan as plain text.

    Args:
        plan: the plan.
        width: columns; default: the terminal's, or 120.

    Returns:
        Text without colour codes, ending in a newline.
    """
    return render((_header(plan), *_communication(plan), *_placements(plan), *_inputs(plan)), width)


def render(parts: Iterable[RenderableType], width: int | None = None) -> str:
    """Rich renderables as plain text, one below the other."""
    columns = width or shutil.get_terminal_size(fallback=(120, 24)).columns
    console = Console(
        file=io.StringIO(),
        width=columns,
        color_system=None,
        force_terminal=False,
        markup=False,
        emoji=False,
        highlight=False,
    )
    with console.capture() as captured:
        for part in parts:
            console.print(part)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    return "\n".join(lines).rstrip("\n") + "\n"


# --- header


def _header(plan: Plan) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    kind = "training step" if plan.training else "inference"
    grid.add_row("plan", f"{kind} of model {plan.fingerprint}, {len(plan.nodes)} ops")
    grid.add_row("mesh", _mesh(plan))
    grid.add_row("cluster", _cluster(plan))
    grid.add_row("step time", _step_time(plan))
    grid.add_row("peak memory", _memory(plan))
    grid.add_row("solver", _solver(plan))
    grid.add_row("pinned", _pinned(plan))
    grid.add_row("optimizer", plan.optimizer)
    return grid


def _mesh(plan: Plan) -> str:
    axes = " × ".join(
        f"{name}={size}" for name, size in zip(plan.axis_names, plan.mesh_shape, strict=True)
    )
    return f"{axes} ({math.prod(plan.mesh_shape)} devices)"


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
    share = f" ({p.comm_time_s / p.step_time_s:.1%})" if p.step_time_s else ""
    return (
        f"{format_seconds(p.step_time_s)} = compute {format_seconds(p.compute_time_s)} + "
        f"communication {format_seconds(p.comm_time_s)}{share}; predicted, "
        "without the optimizer's update"
    )


def _memory(plan: Plan) -> str:
    p, limit = plan.predicted, plan.memory_limit_bytes
    of = f" of {format_bytes(limit)} ({p.peak_memory_bytes / limit:.1%})" if limit else ""
    kinds = sorted(p.memory.items(), key=lambda item: (-item[1], item[0]))
    parts = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in kinds if size)
    return f"{format_bytes(p.peak_memory_bytes)}{of} per device" + (f": {parts}" if parts else "")


def _solver(plan: Plan) -> str:
    s = plan.solver
    proved = "" if s.status == "optimal" else " (not proved optimal)"
    return (
        f"{s.status}{proved}: objective {format_seconds(s.objective)}, "
        f"bound {format_seconds(s.bound)}, gap {s.gap:.2%}, found in {format_seconds(s.seconds)} "
        f"with {s.variables} variables and {s.constraints} constraints after reduction"
    )


def _pinned(plan: Plan) -> str:
    if not plan.constraints:
        return "nothing"
    return ", ".join(f"{key}={_plain(value)}" for key, value in plan.constraints.items())


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


# --- communication


def plain_table(columns: Sequence[tuple[str, bool]]) -> Table:
    """An empty table; columns are `(header, right-aligned number)`."""
    table = Table(box=box.SIMPLE_HEAD, header_style="", pad_edge=False, collapse_padding=True)
    for header, number in columns:
        if number:
            table.add_column(header, justify="right", no_wrap=True)
        else:
            table.add_column(header, overflow="fold")
    return table


def _communication(plan: Plan) -> Iterator[RenderableType]:
    yield ""
    rows = plan.predicted.comm_bytes
    if not rows:
        yield "Communication per step: none\n"
        return
    yield "Communication of one device per step (bytes of full buffers)"
    table = plain_table(
        [
            ("axis", False),
            ("size", True),
            ("collective", False),
            ("count", True),
            ("bytes", True),
            ("", True),
        ],
    )
    for row in sorted(rows, key=lambda r: (r.axis, -r.num_bytes, r.kind)):
        table.add_row(
            plan.axis_names[row.axis],
            str(plan.mesh_shape[row.axis]),
            row.kind,
            str(row.count),
            f"{row.num_bytes:,}",
            format_bytes(row.num_bytes),
        )
    total = sum(row.num_bytes for row in rows)
    count = sum(row.count for row in rows)
    table.add_row("total", "", "", str(count), f"{total:,}", format_bytes(total))
    yield table


# --- placements


def parameter_rows(plan: Plan) -> tuple[ParameterRow, ...]:
    """Parameters in the model's order, those of identical blocks merged into one row."""
    alike: dict[tuple[Any, ...], list[tuple[_Part, ...]]] = {}
    for fqn, layout in plan.parameters.items():
        key = (plan.shapes[fqn], layout, plan.modes.get(fqn, ""), plan.dtypes[fqn])
        alike.setdefault(key, []).append(_split(fqn))
    rows: list[ParameterRow] = []
    for (shape, layout, mode, dtype), names in alike.items():
        numel = math.prod(local_shape(shape, layout, plan.mesh_shape))
        num_bytes = numel * dtype_bytes(dtype)
        for parts in _merge(names):
            block, name = _block(parts)
            rows.append(
                ParameterRow(
                    block=block,
                    name=name,
                    count=math.prod(len(p) for p in parts if isinstance(p, frozenset)),
                    shape=shape,
                    layout=layout,
                    mode=mode,
                    num_bytes=num_bytes,
                )
            )
    return _ordered(rows, list(plan.parameters))


def _ordered(rows: list[ParameterRow], names: list[str]) -> tuple[ParameterRow, ...]:
    """By first appearance of the block, then of the parameter."""
    first: dict[str, int] = {}
    for position, fqn in enumerate(names):
        first.setdefault(fqn, position)

    def place(row: ParameterRow) -> int:
        return first[_example(f"{row.block}.{row.name}" if row.block else row.name)]

    blocks: dict[str, int] = {}
    for row in rows:
        blocks[row.block] = min(blocks.get(row.block, len(names)), place(row))

    def key(row: ParameterRow) -> tuple[int, str, int]:
        return (blocks[row.block] if row.block else place(row), row.block, place(row))

    return tuple(sorted(rows, key=key))


def _example(pattern: str) -> str:
    """One FQN of a pattern: `h.[2-5,9].w` -> `h.2.w`."""
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", pattern)


def _split(fqn: str) -> tuple[_Part, ...]:
    return tuple(frozenset([int(p)]) if p.isdecimal() else p for p in fqn.split("."))


def _merge(names: Iterable[tuple[_Part, ...]]) -> list[tuple[_Part, ...]]:
    """Unite names that differ in one index only, the innermost indices first."""
    found = list(names)
    for place in reversed(range(max(map(len, found)))):
        united: dict[tuple[Any, ...], frozenset[int] | None] = {}
        for parts in found:
            index = parts[place] if place < len(parts) else ""
            if isinstance(index, frozenset):
                key = (parts[:place], parts[place + 1 :])
                united[key] = index | (united.get(key) or frozenset())
            else:
                united[parts, None] = None
        found = [
            before if index is None else (*before, index, *after)
            for (before, after), index in united.items()
        ]
    return found


def _block(parts: tuple[_Part, ...]) -> tuple[str, str]:
    """`(block, name in it)`, the block ending in the first index."""
    texts = [p if isinstance(p, str) else _ranges(sorted(p)) for p in parts]
    for place, part in enumerate(parts):
        if isinstance(part, frozenset):
            return ".".join(texts[: place + 1]), ".".join(texts[place + 1 :])
    return "", ".".join(texts)


def _ranges(numbers: list[int]) -> str:
    """`3`, `[0-31]`, `[0,2-5]`, and `[0-30:2]` for every second one."""
    if len(numbers) == 1:
        return str(numbers[0])
    steps = {b - a for a, b in pairwise(numbers)}
    if len(numbers) > 2 and len(steps) == 1 and steps != {1}:
        return f"[{numbers[0]}-{numbers[-1]}:{steps.pop()}]"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return "[" + ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) + "]"


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
    )
    blocks: dict[str, int] = {}
    for row in rows:
        blocks[row.block] = blocks.get(row.block, 0) + row.num_bytes * row.count
    block = ""
    for row in rows:
        if row.block != block and row.block:
            table.add_row(row.block, "", "", "", f"all {format_bytes(blocks[row.block])}")
        block = row.block
        times = f" (× {row.count})" if "[" in row.name else ""
        name = ("  " if block else "") + row.name + times
        shape = str(list(row.shape))
        table.add_row(
            name, shape, _format_layout(row.layout), row.mode, format_bytes(row.num_bytes)
        )
    total = sum(row.num_bytes * row.count for row in rows)
    table.add_row("total", "", "", "", format_bytes(total))
    yield table


def _inputs(plan: Plan) -> Iterator[RenderableType]:
    axes = ", ".join(plan.axis_names)
    yield "Inputs"
    table = plain_table([("input", False), (f"placements ({axes})", False)])
    for name, layout in plan.inputs.items():
        if not _INTERNAL_INPUT.match(name):
            table.add_row(name, _format_layout(layout))
    yield table
