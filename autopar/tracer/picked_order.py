"""Picked rows by their order: numbered, split where a row of the mask ends, and joined again.

    sizes = mask.sum(1).tolist()                       # mask (B, N): how many each sample has
    parts = [f(p) for p in rows.split(sizes)]          # rows picked by mask.flatten()
    joined = torch.cat(parts)

A part has as many rows as there are places of the mask in one sample, of which that sample's part
of the mask picks; masks of rows that are joined stand behind each other as the rows do.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable
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
    extents,
    name_of,
    value_of,
)
from autopar.tracer.picked_products import parts
from autopar.tracer.picked_rows import joined_dims, joined_pick

__all__ = ["joined", "numbered", "own_rows", "split"]

aten = torch.ops.aten


def numbered(picks: Picks, node: fx.Node) -> Rows | None:
    """`arange(n)` of as many as rows are picked: of each, how many are picked before it."""
    end, start, step = (argument(node, name) for name in ("end", "start", "step"))
    count = picks.found(end)
    if not isinstance(count, Count) or count.pick is None or node.all_input_nodes != [end]:
        return None
    if start not in (None, 0) or step not in (None, 1):
        return None
    before = picks.call(aten.cumsum.default, count.pick.flat, 0)
    # none is out of range of what has as many rows
    order = picks.call(aten.clamp_min.default, picks.call(aten.sub.Tensor, before, 1), 0)
    if value_of(order).dtype is not value_of(node).dtype:
        order = picks.call(aten.to.dtype, order, value_of(node).dtype)
    return Rows(node=order, dim=0, pick=count.pick, places="order")


def own_rows(picks: Picks, node: fx.Node) -> Rows | None:
    """`rows[arange(n)[:, None], columns]`: what each row has in these columns."""
    source, indices = args_of(node)
    rows, indices = picks.found(source), list(indices)
    if not isinstance(rows, Rows) or rows.dim >= len(indices):
        return None
    order, others = picks.found(indices[rows.dim]), indices[: rows.dim]
    others += indices[rows.dim + 1 :]
    if not isinstance(order, Rows) or order.places != "order" or order.pick.key != rows.pick.key:
        return None
    if any(n is not None and _may_pick(picks, n) for n in others):
        return None
    wanted = extents(value_of(node))
    unknown = [dim for dim, size in enumerate(wanted) if not isinstance(size, int)]
    if len(unknown) != 1:
        return None
    count, device = rows.pick.rows, value_of(order.node).device
    every = picks.call(aten.arange.default, count, dtype=torch.int64, device=device)
    shape = [1] * value_of(order.node).dim()
    shape[order.dim] = count
    indices[rows.dim] = picks.call(aten.reshape.default, every, shape)
    made = picks.call(aten.index.Tensor, rows.node, indices)
    wanted[unknown[0]] = count
    return (
        Rows(node=made, dim=unknown[0], pick=rows.pick)
        if extents(value_of(made)) == wanted
        else None
    )


def _may_pick(picks: Picks, index: Any) -> bool:
    return picks.found(index) is not None or value_of(index).dtype in (torch.bool, torch.uint8)


# --- parts ----------------------------------------------------------------------------------------
def split(picks: Picks, node: fx.Node) -> list[Rows] | None:
    """In as many rows as the mask picks in each of its rows, or along another dim."""
    rows, dim = picks.found(args_of(node)[0]), argument(node, "dim")
    if not isinstance(rows, Rows) or dim % value_of(rows.node).dim() != rows.dim:
        return parts(picks, node)
    sizes = argument(node, "split_sizes")
    mask = _counted(picks, sizes) if isinstance(sizes, (list, tuple)) else None
    if mask is None or picks.order_key(mask) != rows.pick.key:
        return None
    found, size = [], rows.pick.rows // len(sizes)
    for i in range(len(sizes)):
        ends = (i * size, (i + 1) * size)
        flat = picks.call(aten.slice.Tensor, rows.pick.flat, 0, *ends)
        pick = Pick(mask=flat, flat=flat, key=("part", rows.pick.key, i, len(sizes)))
        picks.wholes[pick.key] = rows.pick
        part = picks.call(aten.slice.Tensor, rows.node, rows.dim, *ends)
        found.append(Rows(node=part, dim=rows.dim, pick=pick))
    return found


def _counted(picks: Picks, sizes: Any) -> fx.Node | None:
    """The mask (B, ...) of which numbers are the trues in each of its rows, all in order."""
    totals = {_nth_of(size, place) for place, size in enumerate(sizes)}
    total = totals.pop() if len(totals) == 1 else None
    if total is None or total in picks.written or name_of(total.target) != "sum":
        return None
    mask = args_of(total)[0]
    if name_of(mask.target) in ("to", "_to_copy") and value_of(mask).dtype is torch.int64:
        mask = args_of(mask)[0]
    value, dims = value_of(mask), argument(total, "dim")
    if value.dtype is not torch.bool or not dims or mask in picks.written:
        return None
    rest = {dim % value.dim() for dim in dims}
    whole = rest == set(range(1, value.dim())) and value_of(total).shape == (len(sizes),)
    return mask if whole and value.shape[0] == len(sizes) else None


def _nth_of(size: Any, place: int) -> Any:
    """The vector whose element of this place a number is."""
    if not isinstance(size, fx.Node) or name_of(size.target) != "item":
        return None
    number = args_of(size)[0]
    if number.target is aten.select.int and args_of(number)[1:] == (0, place):
        return args_of(number)[0]
    if number.target is not operator.getitem or args_of(number)[1] != place:
        return None
    source = args_of(number)[0]
    first = name_of(source.target) == "unbind" and argument(source, "dim") == 0
    return args_of(source)[0] if first else None


# --- joined again ---------------------------------------------------------------------------------
def joined(picks: Picks, node: fx.Node) -> Rows | None:
    """Rows behind rows of the same or other picks, or each put behind the other's."""
    given, dim = args_of(node)[0], argument(node, "dim")
    found = [f for f in map(picks.found, given) if isinstance(f, Rows)]
    if len(found) < len(given) or len({(r.dim, value_of(r.node).dim()) for r in found}) > 1:
        return None
    at, rank = found[0].dim, value_of(found[0].node).dim()
    if dim % rank != at:
        return joined_dims(picks, node)
    nodes = [r.node for r in found]
    value = _unsplit(picks, nodes) if at == 0 else None
    if value is None:
        value = picks.call(aten.cat.default, nodes, at)
    pick = _behind(picks, [r.pick for r in found])
    wanted = extents(value_of(node))
    wanted[at] = pick.rows
    same = value_of(value).dtype is value_of(node).dtype and extents(value_of(value)) == wanted
    return Rows(node=value, dim=at, pick=pick) if same else None


def _behind(picks: Picks, each: list[Pick]) -> Pick:
    """What picks rows that stand behind each other; of all parts of a pick it is that one."""
    whole = _whole(picks, [pick.key for pick in each])
    if whole is not None:
        return whole
    flat = picks.call(aten.cat.default, [pick.flat for pick in each])
    return Pick(mask=flat, flat=flat, key=("behind", *(pick.key for pick in each)))


def _whole(picks: Picks, keys: list[Hashable]) -> Pick | None:
    kinds = {key[0] if isinstance(key, tuple) else None for key in keys}
    first: Any = keys[0]
    if kinds == {"part"}:
        every = [("part", first[1], i, first[3]) for i in range(first[3])]
        return picks.wholes[first] if keys == every else None
    if kinds != {"joined"} or any(key[2] != first[2] for key in keys):  # type: ignore[index]
        return None
    inner = _whole(picks, [key[1] for key in keys])  # type: ignore[index]
    return None if inner is None else joined_pick(picks, inner, first[2])


def _unsplit(picks: Picks, nodes: list[fx.Node]) -> fx.Node | None:
    """What equal parts of a value, reshaped alike, are of: it may be split over ranks."""
    targets, inner = {n.target for n in nodes}, [args_of(n)[0] for n in nodes]
    shape = value_of(nodes[0]).shape
    if any(value_of(n).shape != shape for n in nodes):
        return None
    if targets == {aten.reshape.default}:
        source = _unsplit(picks, inner)
        sizes = [shape[0] * len(nodes), *shape[1:]]
        return None if source is None else picks.call(aten.reshape.default, source, sizes)
    ends = [(0, i * shape[0], (i + 1) * shape[0]) for i in range(len(nodes))]
    whole = targets == {aten.slice.Tensor} and [args_of(n)[1:] for n in nodes] == ends
    if not whole or len(set(inner)) > 1 or value_of(inner[0]).shape[0] != ends[-1][-1]:
        return None
    return inner[0]
