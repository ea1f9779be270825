"""Writes to picked rows, and of picked rows to rows of a table.

    token, nth = torch.where(chosen == i)
    out[token] += weights[token, nth, None] * expert(x[token])

`x[token] += y` reads rows, adds to the copy in place and writes it back. Nothing else reads the
copy, so an addition that returns another tensor does as well.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from autopar.tracer.picked import (
    Pick,
    Picks,
    Rows,
    args_of,
    base_of,
    extents,
    is_write,
    name_of,
    schema_of,
    value_of,
)
from autopar.tracer.picked_known import put_by

__all__ = [
    "fill",
    "of_each_row",
    "out_of_place",
    "put_known",
    "row_of_places",
    "rows_at_places",
    "settled",
    "where_put",
    "written",
]

aten = torch.ops.aten


def out_of_place(graph: fx.Graph) -> None:
    """Replace elementwise writes to fresh rows that nothing else reads."""
    for node in list(graph.nodes):
        target = _returning(node) if node.op == "call_function" and is_write(node) else None
        if target is None or not _is_fresh(args_of(node)[0]):
            continue
        fakes: Any = fx.map_arg((node.args, node.kwargs), value_of)
        with value_of(node).fake_mode, torch.no_grad():
            found = target(*fakes[0], **fakes[1])
        if found.dtype is value_of(node).dtype and extents(found) == extents(value_of(node)):
            node.target = target


def settled(graph: fx.Graph) -> None:
    """Copy masks after the last write to them, `mask[0] |= …`, for what reads them then."""
    last = {base_of(args_of(n)[0]): n for n in graph.nodes if n.args and is_write(n)}
    order = {node: place for place, node in enumerate(graph.nodes)}
    for mask, write in last.items():
        value: Any = mask.meta.get("val") if mask.op == "call_function" else None
        if not isinstance(value, Tensor) or value.dtype is not torch.bool:
            continue
        if free_unbacked_symbols(value) or graph is not write.graph:
            continue
        later = [user for user in mask.users if order[user] > order[write]]
        with graph.inserting_after(write):
            copy = graph.call_function(aten.clone.default, (mask,))
        copy.meta.update(mask.meta)
        with value_of(mask).fake_mode, torch.no_grad():
            copy.meta["val"] = value.clone()
        for user in later:
            user.replace_input_with(mask, copy)


def _returning(node: fx.Node) -> Any:
    """The form of an elementwise op that returns what this one writes."""
    target: Any = node.target
    if torch.Tag.pointwise not in target.tags or not name_of(target).endswith("_"):
        return None
    packet = getattr(aten, name_of(target)[:-1], None)
    return None if packet is None else getattr(packet, target._overloadname, None)


def _is_fresh(node: Any) -> bool:
    """True for rows in memory of their own, whose values the write alone looks at."""
    if not isinstance(node, fx.Node) or not isinstance(node.target, torch._ops.OpOverload):
        return False
    value = node.meta.get("val")
    unknown = isinstance(value, Tensor) and bool(free_unbacked_symbols(value))
    readers = [user for user in node.users if user.target is not aten.sym_size.int]
    return unknown and base_of(node) is node and not is_write(node) and len(readers) == 1


def row_of_places(picks: Picks, indices: list[Any]) -> Pick | None:
    """The pick of a mask (T, k) of whose places an index is the row, if it picks one of each row at
    most: `topk(…).indices == number`.
    """
    rows = picks.found(indices[0]) if len(indices) == 1 else None
    if not isinstance(rows, Rows) or rows.places != 0 or value_of(rows.pick.mask).dim() != 2:
        return None
    through = _compared_with_one(rows.pick.mask)
    if not through or picks.written.intersection(through):
        return None
    chosen = through[-1]
    if chosen.target is not operator.getitem:
        return None
    source, nth = args_of(chosen)
    if name_of(source.target) != "topk" or nth != 1:
        return None
    dim = args_of(source)[2] if len(args_of(source)) > 2 else source.kwargs.get("dim", -1)
    return rows.pick if dim in (-1, 1) else None


def _compared_with_one(mask: fx.Node) -> list[fx.Node]:
    """Nodes from a mask to the tensor that it compares, element by element, with one number.

    That is `x == number`, or one of the slices of `x.unsqueeze(-1) == numbers`; else none.
    """
    nodes, sliced = [mask], None
    if mask.target is operator.getitem and name_of(args_of(mask)[0].target) == "unbind":
        nodes.append(args_of(mask)[0])
    if name_of(nodes[-1].target) in ("unbind", "select"):
        source, dim = (*args_of(nodes[-1]), 0)[:2]
        order = list(range(value_of(source).dim()))
        if name_of(source.target) == "permute":
            nodes.append(source)
            source, order = args_of(source)[0], [d % len(order) for d in args_of(source)[1]]
        sliced = order.pop(dim)
        if order != sorted(order) or sliced != len(order):
            return []
        nodes.append(source)
    if name_of(nodes[-1].target) != "eq":
        return []
    x, other = args_of(nodes[-1])
    if sliced is None:
        return [] if isinstance(other, fx.Node) else [*nodes, x]
    if not isinstance(other, fx.Node) or value_of(other).dim() != 1:
        return []
    if name_of(x.target) != "unsqueeze" or args_of(x)[1] % (sliced + 1) != sliced:
        return []
    return [*nodes, x, args_of(x)[0]]


def of_each_row(picks: Picks, source: fx.Node, places: list[Rows], dim: int) -> fx.Node | None:
    """The rows of a source (T, ...) for all places of a mask (T, k), of which the row is asked.

    Each stands k times, in an order that may be split over ranks.
    """
    shape, value = value_of(places[0].pick.mask).shape, value_of(source)
    if [p.places for p in places] != [0] or len(shape) != 2 or value.shape[dim] != shape[0]:
        return None
    wide = picks.call(aten.unsqueeze.default, source, dim + 1)
    sizes = [*value.shape[: dim + 1], shape[1], *value.shape[dim + 1 :]]
    wide = picks.call(aten.expand.default, wide, sizes)
    joined = [*value.shape[:dim], shape[0] * shape[1], *value.shape[dim + 1 :]]
    rows = picks.call(aten.reshape.default, wide, joined)
    # of one row each it is a view, which a later write to the source would change
    return picks.call(aten.clone.default, rows) if source in picks.written else rows


def rows_at_places(
    picks: Picks, pick: Pick, table: fx.Node, rows: Rows, adds: bool
) -> fx.Node | None:
    """A table (T, ...) with the rows that a mask (T, k) picks: those of each T are added up."""
    shape, given, value = value_of(pick.mask).shape, value_of(rows.node), value_of(table)
    if len(shape) != 2 or given.dtype is not value.dtype:
        return None
    if value.shape[0] != shape[0] or given.shape[1:] != value.shape[1:]:
        return None
    parts = picks.call(aten.reshape.default, picks.only_picked(rows, 0), [*shape, *value.shape[1:]])
    own = picks.call(aten.sum.dim_IntList, parts, [1])
    if adds:
        return picks.call(aten.add.Tensor, table, own)
    some = picks.call(aten.any.dim, pick.mask, 1)
    wide = picks.call(aten.reshape.default, some, [shape[0], *[1] * (value.dim() - 1)])
    return picks.call(aten.where.self, wide, own, table)


def put_known(picks: Picks, node: fx.Node) -> fx.Node | None:
    """A write, at picked places, of rows that do not depend on how many there are."""
    table, indices, source = args_of(node)[:3]
    place = where_put(picks, list(indices))
    mask, many = None if place is None else place.mask, True
    if mask is None and not (len(args_of(node)) > 3 and args_of(node)[3]):
        mask, many = _rows_with_any(picks, indices), False
    if mask is None or free_unbacked_symbols(value_of(source)):
        return None
    fits = value_of(table).shape[: value_of(mask).dim()] == value_of(mask).shape
    return put_by(picks, node, mask, many) if fits else None


def _rows_with_any(picks: Picks, indices: Any) -> fx.Node | None:
    """For the first places of what a mask picks, the rows of the mask where it picks anything."""
    rows = picks.found(indices[0]) if len(indices) == 1 else None
    if not isinstance(rows, Rows) or rows.places != 0:
        return None
    mask = rows.pick.mask
    shape = value_of(mask).shape
    flat = picks.call(aten.reshape.default, mask, [shape[0], shape[1:].numel()])
    return picks.call(aten.any.dim, flat, 1)


def fill(picks: Picks, node: fx.Node) -> fx.Node | None:
    """`index_fill` at the first places of what a mask picks."""
    table, dim, index, number = args_of(node)[:4]
    mask = _rows_with_any(picks, [index])
    if mask is None or picks.found(table) is not None or isinstance(number, fx.Node):
        return None
    value = value_of(table)
    dim %= max(value.dim(), 1)
    if value.shape[dim : dim + 1] != value_of(mask).shape:
        return None
    shape = [-1 if i == dim else 1 for i in range(value.dim())]
    wide = picks.call(aten.reshape.default, mask, shape)
    return written(picks, node, table, picks.call(aten.masked_fill.Scalar, table, wide, number))


def where_put(picks: Picks, indices: list[Any]) -> Pick | None:
    """The pick whose mask, or all of whose places, indices are."""
    found = [picks.found(i) for i in indices]
    if len(indices) == 1 and indices[0] is not None and found[0] is None:
        return picks.pick_of(indices[0]) if value_of(indices[0]).dtype is torch.bool else None
    rows = [f for f in found if isinstance(f, Rows)]
    if len(rows) < len(indices) or any(r.pick is not rows[0].pick for r in rows):
        return None
    every = list(range(value_of(rows[0].pick.mask).dim()))
    return rows[0].pick if [r.places for r in rows] == every else None


def written(picks: Picks, node: fx.Node, table: Any, value: fx.Node) -> fx.Node:
    """The value, in place of the table's where the op writes."""
    if schema_of(node).is_mutable:
        return picks.call(aten.copy_.default, table, value)
    return value
