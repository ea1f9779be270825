"""Rules for ops that treat picked rows as a batch, each on its own (`picked`).

Convolutions, attention, sorts, paddings and spreads of other dims than that of the rows.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from autopar.tracer.picked import (
    Count,
    Pick,
    Picks,
    Rows,
    args_of,
    argument,
    name_of,
    schema_of,
    value_of,
)
from autopar.tracer.picked_rows import again, expand, first_rows, same_for_all, swapped

__all__ = [
    "attention",
    "bucketed",
    "convolved",
    "filled",
    "ordered",
    "padded",
    "repeated",
    "spread",
    "stacked",
    "turned",
    "unfolded",
]

aten = torch.ops.aten


def several(picks: Picks, node: fx.Node, dims: list[int], pick: Pick) -> list[Rows]:
    """Each result of an op on all rows, which has them in the dim given for it."""
    args, kwargs = swapped(picks, (args_of(node), dict(node.kwargs)))
    made = picks.call(node.target, *args, **kwargs)
    nodes = [picks.call(operator.getitem, made, i) for i in range(len(dims))]
    return [Rows(node=n, dim=dim, pick=pick) for n, dim in zip(nodes, dims, strict=True)]


def ordered(picks: Picks, node: fx.Node) -> list[Rows] | None:
    """`sort` and `topk` along another dim."""
    rows = first_rows(picks, node)
    dim = argument(node, "dim")
    if rows is None or not isinstance(dim, int):
        return None
    if dim % value_of(rows.node).dim() == rows.dim:
        return None
    return several(picks, node, [rows.dim, rows.dim], rows.pick)


def spread(picks: Picks, node: fx.Node) -> Rows | list[Rows] | None:
    """`var`, `std`, and those with the mean, over other dims."""
    rows = first_rows(picks, node)
    given = argument(node, "dim")
    if rows is None or given is None or given == []:
        return None
    rank = value_of(rows.node).dim()
    dims = {d % rank for d in (given if isinstance(given, (list, tuple)) else [given])}
    if rows.dim in dims:
        return None
    dim = rows.dim - (0 if argument(node, "keepdim") else sum(d < rows.dim for d in dims))
    if name_of(node.target).endswith("_mean"):
        return several(picks, node, [dim, dim], rows.pick)
    return again(picks, node, dim, rows.pick)


def padded(picks: Picks, node: fx.Node) -> Rows | None:
    """Padding of the dims behind the rows."""
    rows = first_rows(picks, node)
    if rows is None:
        return None
    pads = list(args_of(node)[1])
    if not all(isinstance(p, int) for p in pads):
        return None
    while pads[-2:] == [0, 0]:
        pads = pads[:-2]
    if rows.dim >= value_of(rows.node).dim() - len(pads) // 2:
        return None
    return again(picks, node, rows.dim, rows.pick)


def turned(picks: Picks, node: fx.Node) -> Rows | None:
    """`flip` and `roll` of other dims."""
    rows, dims = first_rows(picks, node), argument(node, "dims")
    if rows is None or not dims:
        return None
    if any(d % value_of(rows.node).dim() == rows.dim for d in dims):
        return None
    return again(picks, node, rows.dim, rows.pick)


def stacked(picks: Picks, node: fx.Node) -> Rows | None:
    """Rows of one pick, beside each other in a new dim."""
    parts = args_of(node)[0]
    rows = [f for f in map(picks.found, parts) if isinstance(f, Rows)]
    if len(rows) < len(parts) or len({(r.pick.key, r.dim) for r in rows}) != 1:
        return None
    at = argument(node, "dim") % (value_of(rows[0].node).dim() + 1)
    return again(picks, node, rows[0].dim + (at <= rows[0].dim), rows[0].pick)


def convolved(picks: Picks, node: fx.Node) -> Rows | None:
    """Convolutions and group norms of samples, which are the rows."""
    rows = first_rows(picks, node)
    rank = 1 if name_of(node.target) == "group_norm" else value_of(args_of(node)[1]).dim() - 1
    if rows is None or rows.dim != 0 or value_of(rows.node).dim() <= rank:
        return None
    return again(picks, node, 0, rows.pick)


def attention(picks: Picks, node: fx.Node) -> Rows | None:
    """Attention of sequences, which are the rows: of each to itself."""
    found = [picks.found(n) for n in args_of(node)[:3]]
    rows = [f for f in found if isinstance(f, Rows)]
    mask: Any = argument(node, "attn_mask")
    known = picks.found(mask)
    if isinstance(known, Rows):
        rows.append(known)
    elif known is not None or len(rows) < 3:
        return None
    places = {(r.pick.key, value_of(r.node).dim() - r.dim) for r in rows}
    _, place = next(iter(places))
    if len(places) > 1 or len(rows) < len(found) or place <= 2:
        return None
    if isinstance(mask, fx.Node) and known is None and not same_for_all(mask, place):
        return None
    return again(picks, node, rows[0].dim, rows[0].pick)


def filled(picks: Picks, node: fx.Node) -> Rows | None:
    """`zeros(n, …)` and such, of as many rows as were picked."""
    sizes: Any = argument(node, "size")
    counts = [(i, picks.found(n)) for i, n in enumerate(sizes) if isinstance(n, fx.Node)]
    if len(counts) != 1 or any(n is not sizes[counts[0][0]] for n in node.all_input_nodes):
        return None
    ((dim, count),) = counts
    if not isinstance(count, Count) or count.pick is None:
        return None
    shape = [count.pick.rows if i == dim else size for i, size in enumerate(sizes)]
    place = next(i for i, a in enumerate(schema_of(node).arguments) if a.name == "size")
    args = [shape if i == place else arg for i, arg in enumerate(args_of(node))]
    made = picks.call(node.target, *args, **dict(node.kwargs))
    return Rows(node=made, dim=dim, pick=count.pick)


def repeated(picks: Picks, node: fx.Node) -> Rows | None:
    """`expand` of rows, or of one value to as many as rows were picked."""
    source, sizes = args_of(node)[:2]
    if picks.found(source) is not None or not isinstance(sizes, (list, tuple)):
        return expand(picks, node)
    counts = {i: picks.found(n) for i, n in enumerate(sizes) if isinstance(n, fx.Node)}
    if len(counts) != 1:
        return None
    ((dim, count),) = counts.items()
    if not isinstance(count, Count) or count.pick is None:
        return None
    if not same_for_all(source, len(sizes) - dim):
        return None
    shape = [count.pick.rows if i == dim else size for i, size in enumerate(sizes)]
    return Rows(node=picks.call(aten.expand.default, source, shape), dim=dim, pick=count.pick)


def unfolded(picks: Picks, node: fx.Node) -> Rows | None:
    """Windows of another dim."""
    rows = first_rows(picks, node)
    if rows is None or args_of(node)[1] % value_of(rows.node).dim() == rows.dim:
        return None
    return again(picks, node, rows.dim, rows.pick)


def bucketed(picks: Picks, node: fx.Node) -> Rows | None:
    """Where each element stands among boundaries that are the same for all."""
    rows = first_rows(picks, node)
    return None if rows is None else again(picks, node, rows.dim, rows.pick)
