"""Parameters of a plan in rows: those of identical blocks once.

The numbers in an FQN index repeated modules; parameters that differ in one such index only, and are
equal in shape, layout and mode, become one row: `model.layers.0.mlp.up_proj.weight` to
`model.layers.31.…` is `model.layers.[0-31]`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from autopar.core.placement import Layout, local_shape
from autopar.core.plan import Plan
from autopar.cost_model.memory import dtype_bytes

__all__ = ["ParameterRow", "index_ranges", "merged_names", "parameter_rows"]

_Part = str | frozenset[int]


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
        ranks: of the pipeline, that hold it, where rows were asked for by rank.
        nested: the name has an index of several itself, behind that of the block.
    """

    block: str
    name: str
    count: int
    shape: tuple[int, ...]
    layout: Layout
    mode: str
    num_bytes: int
    ranks: tuple[int, ...] = ()
    nested: bool = False


def parameter_rows(
    plan: Plan, holders: Mapping[str, tuple[int, ...]] | None = None
) -> tuple[ParameterRow, ...]:
    """Parameters in the model's order, those of identical blocks merged into one row.

    Args:
        plan: whose.
        holders: pipeline ranks that hold each; those of different ranks stay apart.
    """
    ranks_of = holders or {}
    alike: dict[tuple[Any, ...], list[tuple[_Part, ...]]] = {}
    for fqn, layout in plan.parameters.items():
        ranks = ranks_of.get(fqn, ())
        key = (plan.shapes[fqn], layout, plan.modes.get(fqn, ""), plan.dtypes[fqn], ranks)
        alike.setdefault(key, []).append(_split(fqn))
    rows: list[tuple[int, ParameterRow]] = []
    places = {_split(fqn): place for place, fqn in reversed(list(enumerate(plan.parameters)))}
    for (shape, layout, mode, dtype, ranks), names in alike.items():
        numel = math.prod(local_shape(shape, layout, plan.mesh_shape))
        num_bytes = numel * dtype_bytes(dtype)
        for parts in _merge(names):
            block, name = _block(parts)
            sizes = [len(part) for part in parts if isinstance(part, frozenset)]
            row = ParameterRow(
                block=block,
                name=name,
                count=math.prod(sizes),
                shape=shape,
                layout=layout,
                mode=mode,
                num_bytes=num_bytes,
                ranks=ranks,
                nested=max(sizes[1:], default=1) > 1,
            )
            rows.append((places[_first(parts)], row))
    return _ordered(rows)


def merged_names(names: Iterable[str]) -> list[str]:
    """FQNs with those of equal blocks as one pattern: `h.[0-31].mlp.weight`."""
    return [
        ".".join(part for part in _block(parts) if part) for parts in _merge(map(_split, names))
    ]


def _ordered(rows: list[tuple[int, ParameterRow]]) -> tuple[ParameterRow, ...]:
    """By first appearance of the block, then of the parameter; rows come with their own."""
    blocks: dict[str, int] = {}
    for place, row in rows:
        blocks[row.block] = min(blocks.get(row.block, place), place)

    def key(placed: tuple[int, ParameterRow]) -> tuple[int, str, int]:
        place, row = placed
        return (blocks[row.block] if row.block else place, row.block, place)

    return tuple(row for _, row in sorted(rows, key=key))


def _first(parts: tuple[_Part, ...]) -> tuple[_Part, ...]:
    """The first of the FQNs that are merged."""
    return tuple(part if isinstance(part, str) else frozenset([min(part)]) for part in parts)


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
    texts = [p if isinstance(p, str) else index_ranges(sorted(p)) for p in parts]
    for place, part in enumerate(parts):
        if isinstance(part, frozenset):
            return ".".join(texts[: place + 1]), ".".join(texts[place + 1 :])
    return "", ".".join(texts)


def index_ranges(numbers: list[int]) -> str:
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
