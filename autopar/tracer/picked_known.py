"""Picks of as many rows as are known, by their places.

    x[mask] = rows                      # (k, D): the mask has k trues, or one device fails
    x[mask] += rows

have shapes: the n-th true stands where the running count of trues reaches n. If a mask has another
number of them, places are out of range, which is an error when the step runs, as on one device.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from autopar.tracer.picked import Picks, args_of, is_write, name_of, value_of

__all__ = ["put_by", "say_known"]

aten = torch.ops.aten
_BY_MASK = (aten.masked_select.default, aten.nonzero.default, aten.where.default)


def say_known(graph: fx.Graph) -> bool:
    """Say them with places, in place; True if there were any."""
    found = [node for node in graph.nodes if _reads(node) or _puts(node)]
    if not found:
        return False
    picks = Picks(graph=graph)
    for node in found:
        picks.at = node
        if node.target is aten.where.default:
            _columns_of(picks, node)
            continue
        new = _put(picks, node, _mask_of(args_of(node)[1])) if _puts(node) else _read(picks, node)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    return True


def _mask_of(indices: Any) -> Any:
    """The only index, if it is a mask with elements."""
    given = [i for i in indices if i is not None]
    value = given[0].meta.get("val") if len(given) == 1 else None
    if value is None or value.dtype is not torch.bool or free_unbacked_symbols(value):
        return None
    return given[0] if value.numel() else None


def _reads(node: fx.Node) -> bool:
    """True for a pick whose result has a shape."""
    if node.op != "call_function":
        return False
    if node.target is aten.index.Tensor:
        mask = _mask_of(args_of(node)[1])
    elif node.target in _BY_MASK:
        mask = _mask_of(args_of(node)[-1:])
    else:
        return False
    results = pytree.tree_leaves(value_of(node))
    operands = map(value_of, node.all_input_nodes)
    return mask is not None and not any(map(free_unbacked_symbols, (*results, *operands)))


def _puts(node: fx.Node) -> bool:
    """True for a write by a mask of rows that are not one for all places."""
    if node.op != "call_function" or name_of(node.target) not in ("index_put", "index_put_"):
        return False
    table, indices, rows = args_of(node)[:3]
    mask = _mask_of(indices)
    if mask is None or free_unbacked_symbols(value_of(rows)) or table.meta.get("val") is None:
        return False
    dim = list(indices).index(mask)
    rest = value_of(table).dim() - value_of(mask).dim()
    return dim == 0 and value_of(rows).dim() == rest + 1 and int(value_of(rows).shape[0]) > 1


def _places(picks: Picks, mask: Any, count: int) -> fx.Node:
    """Where the trues of a mask stand among its elements: (count,)."""
    size = value_of(mask).numel()
    flat = picks.call(aten.reshape.default, mask, [size])
    counts = picks.call(aten.cumsum.default, flat, 0)
    device = value_of(mask).device
    wanted = picks.call(aten.arange.start, 1, count + 1, dtype=torch.int64, device=device)
    places = picks.call(aten.searchsorted.Tensor, counts, wanted)
    total = picks.call(aten.select.int, counts, 0, size - 1)
    right = picks.call(aten.eq.Scalar, total, count)
    wrong = picks.call(aten.full.default, [], size, dtype=torch.int64, device=device)
    return picks.call(aten.where.self, right, places, wrong)


def _flat(picks: Picks, table: fx.Node, mask: fx.Node, dim: int) -> fx.Node:
    """A table whose dims under a mask are one."""
    shape, rank = list(value_of(table).shape), value_of(mask).dim()
    if rank == 1:
        return table
    joined = [*shape[:dim], math.prod(shape[dim : dim + rank]), *shape[dim + rank :]]
    return picks.call(aten.reshape.default, table, joined)


def _read(picks: Picks, node: fx.Node) -> fx.Node:
    if node.target is aten.nonzero.default:
        count = int(value_of(node).shape[0])
        return picks.call(aten.stack.default, _columns(picks, args_of(node)[0], count), 1)
    if node.target is aten.index.Tensor:
        table, indices = args_of(node)
        mask = _mask_of(indices)
        dim = list(indices).index(mask)
        count = int(value_of(node).shape[dim])
    else:
        sizes = list(torch.broadcast_shapes(*(value_of(n).shape for n in args_of(node))))
        table, mask = (picks.call(aten.expand.default, n, sizes) for n in args_of(node))
        dim, count = 0, int(value_of(node).shape[0])
    places = _places(picks, mask, count)
    rows = _flat(picks, table, mask, dim)
    return picks.call(aten.index.Tensor, rows, [*[None] * dim, places])


def _columns_of(picks: Picks, node: fx.Node) -> None:
    """Give the readers of `where(mask)` its places by dim."""
    count = int(value_of(node)[0].shape[0])
    columns = _columns(picks, args_of(node)[0], count)
    for item in list(node.users):
        item.replace_all_uses_with(columns[args_of(item)[1]])
        picks.graph.erase_node(item)
    picks.graph.erase_node(node)


def _columns(picks: Picks, mask: Any, count: int) -> list[fx.Node]:
    """The places of trues in each dim of a mask, all of them (count,)."""
    places = _places(picks, mask, count)
    shape, columns = list(value_of(mask).shape), []
    for dim, size in enumerate(shape):
        behind = math.prod(shape[dim + 1 :])
        column = picks.call(aten.floor_divide.default, places, behind) if behind > 1 else places
        # what is out of range stays so
        columns.append(picks.call(aten.remainder.Scalar, column, size) if dim else column)
    return columns


def _put(picks: Picks, node: fx.Node, mask: Any) -> fx.Node:
    table, _, rows = args_of(node)[:3]
    places = _places(picks, mask, int(value_of(rows).shape[0]))
    flat = _flat(picks, table, mask, 0)
    put = picks.call(aten.index_put.default, flat, [places], rows, _adds(node))
    if put.meta["val"].shape != value_of(table).shape:
        put = picks.call(aten.reshape.default, put, list(value_of(table).shape))
    return picks.call(aten.copy_.default, table, put) if is_write(node) else put


def _adds(node: fx.Node) -> bool:
    return len(args_of(node)) > 3 and bool(args_of(node)[3])


def put_by(picks: Picks, node: fx.Node, mask: fx.Node, many: bool) -> fx.Node | None:
    """`index_put` by the places of a mask: of one row at all of them, or a known number of rows.

    Args:
        picks: says the graph.
        node: the write.
        mask: over the first dims of the table.
        many: each of the mask's trues is written once, in order.
    """
    table, _, row = args_of(node)[:3]
    rest = value_of(table).dim() - value_of(mask).dim()
    shape = list(value_of(row).shape)
    if len(shape) > rest and math.prod(shape[: len(shape) - rest]) != 1:
        return _put(picks, node, mask) if many and len(shape) == rest + 1 else None
    if len(shape) > rest:
        row = picks.call(aten.reshape.default, row, shape[len(shape) - rest :])
    wide = picks.call(aten.reshape.default, mask, [*value_of(mask).shape, *[1] * rest])
    other = picks.call(aten.add.Tensor, table, row) if _adds(node) else row
    put = picks.call(aten.where.self, wide, other, table)
    return picks.call(aten.copy_.default, table, put) if is_write(node) else put
