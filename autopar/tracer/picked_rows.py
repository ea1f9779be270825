"""Rules for ops that read picked rows, once all rows stand in their place (`picked`).

A rule gets a node that reads picked rows. It returns what is known of the result, or, where the
result no longer depends on how many rows were picked, a node that replaces it; None refuses.
"""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from autopar._compat import floor_divided
from autopar.tracer.picked import (
    Count,
    Grid,
    Pick,
    Picks,
    Rows,
    Said,
    args_of,
    argument,
    extents,
    name_of,
    value_of,
)

__all__ = [
    "again",
    "first_rows",
    "joined_dims",
    "joined_pick",
    "pointwise",
    "same_for_all",
    "swapped",
]

aten = torch.ops.aten


NUMBERS = (
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    operator.floordiv,
    operator.pow,
    torch.sym_float,
    torch.sym_max,
    torch.sym_min,
)
# each row on its own whatever the arguments are, in the shape of the first
ROWWISE = frozenset(
    "to _to_copy contiguous detach alias type_as dropout zeros_like ones_like full_like "
    "one_hot".split()
)


# --- each row on its own --------------------------------------------------------------------------
def swapped(picks: Picks, value: Any) -> Any:
    """Arguments with what is known in place of what they were."""

    def swap(arg: Any) -> Any:
        found = picks.found(arg)
        return found.node if isinstance(found, (Rows, Count)) else arg

    return map_aggregate(value, swap)


def again(picks: Picks, node: fx.Node, dim: int, pick: Pick) -> Rows | None:
    """The same op on all rows, if its result has them in `dim` and is like the other elsewhere."""
    if not isinstance(value_of(node), Tensor):
        return None
    wanted = extents(value_of(node))
    if not 0 <= dim < len(wanted) or isinstance(wanted[dim], int):
        return None
    wanted[dim] = pick.rows
    if not all(isinstance(size, int) for size in wanted):
        return None
    args, kwargs = swapped(picks, (args_of(node), dict(node.kwargs)))
    target = _of_tensors(picks, node)
    if target is None:
        return None
    made = picks.call(target, *args, **kwargs)
    value = value_of(made)
    same = extents(value) == wanted and value.dtype == value_of(node).dtype
    return Rows(node=made, dim=dim, pick=pick) if same else None


def _of_tensors(picks: Picks, node: fx.Node) -> Any:
    """The form of an op that takes tensors where it was given numbers of rows; None without one."""
    target: Any = node.target
    counts = [n for n in node.all_input_nodes if isinstance(picks.found(n), Count)]
    if not counts:
        return target
    named = target._overloadname.replace("Scalar", "Tensor")
    if named not in target.overloadpacket.overloads():
        return None
    found = getattr(target.overloadpacket, named)
    places = [i for i, arg in enumerate(args_of(node)) if any(arg is n for n in counts)]
    arguments = found._schema.arguments
    fit = all(isinstance(arguments[i].type, torch.TensorType) for i in places)
    return found if fit and len(places) >= len(counts) else None


def pointwise(picks: Picks, node: fx.Node) -> Rows | fx.Node | None:
    """Rows of one pick meet each other, and what is the same for all rows."""
    found = [picks.known[n] for n in node.all_input_nodes if n in picks.known]
    rows = [f for f in found if isinstance(f, Rows)]
    if len(rows) + sum(isinstance(f, Count) for f in found) < len(found):
        return None
    if not rows:
        args, kwargs = swapped(picks, (args_of(node), dict(node.kwargs)))
        target = _of_tensors(picks, node)
        if target is None:
            return None
        made = picks.call(target, *args, **kwargs)
        same = value_of(made).dtype == value_of(node).dtype
        return made if same and value_of(made).shape == value_of(node).shape else None
    behind = {value_of(r.node).dim() - r.dim for r in rows}
    if len(behind) > 1 or len({r.pick.key for r in rows}) > 1:
        return None
    (place,) = behind
    for operand in node.all_input_nodes:
        if picks.found(operand) is None and not same_for_all(operand, place):
            return None
    return again(picks, node, value_of(node).dim() - place, rows[0].pick)


def same_for_all(operand: fx.Node, place: int) -> bool:
    """True if a value has no dim, or one of 1, where others have rows, counted from the end."""
    value = operand.meta.get("val")
    if not isinstance(value, Tensor):
        return False
    # a size that depends on values is no 1, and must not be asked whether it is
    return value.dim() < place or extents(value)[-place] == 1


def first_rows(picks: Picks, node: fx.Node) -> Rows | None:
    """The rows of the first operand, if it is the only one that has some."""
    others = [n for n in node.all_input_nodes[1:] if n in picks.known]
    found = picks.found(args_of(node)[0])
    return found if isinstance(found, Rows) and not others else None


def kept(picks: Picks, node: fx.Node) -> Rows | None:
    found = [picks.known[n] for n in node.all_input_nodes if n in picks.known]
    first = picks.found(args_of(node)[0])
    if not isinstance(first, Rows) or any(not isinstance(f, Rows) for f in found):
        return None
    made = again(picks, node, first.dim, first.pick)
    same = name_of(node.target) in ("alias", "detach", "contiguous")
    return replace(made, places=first.places) if made and same else made


def last_dim(picks: Picks, node: fx.Node) -> Rows | None:
    """Ops on the last dim, such as a linear layer's."""
    rows = first_rows(picks, node)
    trailing = len(args_of(node)[1]) if name_of(node.target) == "layer_norm" else 1
    if rows is None or rows.dim >= value_of(rows.node).dim() - trailing:
        return None
    return again(picks, node, rows.dim, rows.pick)


def beside_dim(picks: Picks, node: fx.Node) -> Rows | None:
    """Ops along one dim, such as a softmax's, which is not that of the rows."""
    rows = first_rows(picks, node)
    dim = argument(node, "dim")
    if rows is None or not isinstance(dim, int) or dim % value_of(rows.node).dim() == rows.dim:
        return None
    return again(picks, node, rows.dim, rows.pick)


def embedding(picks: Picks, node: fx.Node) -> Rows | None:
    rows = picks.found(args_of(node)[1])
    if not isinstance(rows, Rows) or args_of(node)[0] in picks.known:
        return None
    return again(picks, node, rows.dim, rows.pick)


# --- other shapes ---------------------------------------------------------------------------------
def view(picks: Picks, node: fx.Node) -> Said | None:
    rows = picks.found(args_of(node)[0])
    if not isinstance(rows, Rows):
        return None
    given, wanted = extents(value_of(args_of(node)[0])), extents(value_of(node))
    before, size = given[: rows.dim], given[rows.dim]
    for dim, extent in enumerate(wanted):
        if isinstance(extent, int):
            continue
        if extent == size and math.prod(wanted[:dim]) == math.prod(before):
            wanted[dim] = rows.pick.rows
            made = picks.call(aten.reshape.default, rows.node, wanted)
            # of one column what is left is that column
            kept = rows.places if rows.places != "all" else None
            if rows.places == "all" and given[rows.dim + 1 :] == [1] and len(wanted) == 1:
                kept = 0
            return Rows(node=made, dim=dim, pick=rows.pick, places=kept)
        return _joined(picks, rows, given, wanted, dim)
    return None


def _joined(picks: Picks, rows: Rows, given: list[Any], wanted: list[Any], dim: int) -> Said | None:
    """Rows that are joined with dims behind them, or that become a matrix of rows of the mask."""
    size = given[rows.dim]
    mask = value_of(rows.pick.mask)
    if (
        rows.dim == 0
        and dim == 1
        and mask.dim() == 2
        and wanted[0] == mask.shape[0]
        and wanted[1] == floor_divided(size, wanted[0])
        and wanted[2:] == given[1:]
    ):
        return Grid(rows=rows)
    behind = wanted[dim + 1 :]
    if not all(isinstance(extent, int) for extent in (*given[rows.dim + 1 :], *behind)):
        return None
    width = math.prod(given[rows.dim + 1 :]) // max(math.prod(behind), 1)
    fits = wanted[:dim] == given[:dim] and wanted[dim] == size * width
    if dim != rows.dim or not fits or math.prod(given[dim + 1 :]) != width * math.prod(behind):
        return None
    pick = joined_pick(picks, rows.pick, width)
    made = picks.call(aten.reshape.default, rows.node, [*given[:dim], pick.rows, *behind])
    return Rows(node=made, dim=dim, pick=pick)


def joined_pick(picks: Picks, pick: Pick, width: int) -> Pick:
    """What picks as many rows as a width for each that is picked."""
    flat = picks.call(aten.unsqueeze.default, pick.flat, 1)
    flat = picks.call(aten.expand.default, flat, [pick.rows, width])
    flat = picks.call(aten.reshape.default, flat, [pick.rows * width])
    return Pick(mask=flat, flat=flat, key=("joined", pick.key, width))


def unsqueeze(picks: Picks, node: fx.Node) -> Rows | None:
    rows = first_rows(picks, node)
    if rows is None:
        return None
    at: int = args_of(node)[1]
    dim = rows.dim + (at % (value_of(rows.node).dim() + 1) <= rows.dim)
    made = again(picks, node, dim, rows.pick)
    return replace(made, places="order") if made and rows.places == "order" else made


def dropped_dim(picks: Picks, node: fx.Node) -> Said | fx.Node | None:
    """A select, or a squeeze of one dim."""
    found = picks.found(args_of(node)[0])
    if isinstance(found, Grid) and name_of(node.target) == "select" and args_of(node)[1] == 1:
        return _nth(picks, found.rows, args_of(node)[2])
    rows = first_rows(picks, node)
    if rows is None or len(args_of(node)) < 2 or not isinstance(args_of(node)[1], int):
        return None
    rank = value_of(rows.node).dim()
    at = args_of(node)[1] % rank
    if at == rows.dim:
        return None
    if len(value_of(node).shape) == rank:
        return again(picks, node, rows.dim, rows.pick)
    made = again(picks, node, rows.dim - (at < rows.dim), rows.pick)
    column = 0 if name_of(node.target) == "squeeze" else args_of(node)[2]
    kept = column if rows.places == "all" else None
    return replace(made, places=kept) if made else None


def _nth(picks: Picks, rows: Rows, index: int) -> fx.Node:
    """Of each row of the mask the picked one of this number. Rows of the mask that have picked more
    or less than others are given a place beyond the end, which is an error when it runs."""
    call, mask = picks.call, rows.pick.mask
    count, width = value_of(mask).shape
    value = value_of(rows.node)
    each = call(aten.sum.dim_IntList, mask, [1])
    share = call(aten.floor_divide.default, call(aten.sum.default, mask), count)
    wanted = call(aten.add.Tensor, share, index + 1)
    if index >= 0:
        wanted = call(aten.add.Tensor, call(aten.mul.Tensor, share, 0), index + 1)
    hit = call(aten.eq.Tensor, call(aten.cumsum.default, mask, 1), wanted)
    hit = call(aten.logical_and.default, hit, mask)
    place = call(aten.argmax.default, call(aten.to.dtype, hit, torch.int64), 1)
    there = call(aten.any.dim, hit, 1)
    even = call(aten.logical_and.default, call(aten.eq.Tensor, each, share), there)
    beyond = call(aten.logical_not.default, even)
    place = call(aten.masked_fill.Scalar, place, beyond, width)
    rest = list(value.shape[1:])
    place = call(aten.reshape.default, place, [count, 1, *[1] * len(rest)])
    place = call(aten.expand.default, place, [count, 1, *rest])
    table = call(aten.reshape.default, rows.node, [count, width, *rest])
    return call(aten.squeeze.dim, call(aten.gather.default, table, 1, place), 1)


def slice(picks: Picks, node: fx.Node) -> Said | None:
    found = picks.found(args_of(node)[0])
    # as they are written: whether numbers of rows are equal cannot be asked
    if extents(value_of(node)) == extents(value_of(args_of(node)[0])):
        return found
    return beside_dim(picks, node)


def transpose(picks: Picks, node: fx.Node) -> Rows | None:
    rows = first_rows(picks, node)
    if rows is None:
        return None
    rank = value_of(rows.node).dim()
    order = list(range(rank))
    if name_of(node.target) == "permute":
        order = [d % rank for d in args_of(node)[1]]
    elif name_of(node.target) == "numpy_T":
        order.reverse()
    elif name_of(node.target) == "mT":
        order[-2:] = order[:-3:-1]
    else:
        a, b = (d % rank for d in args_of(node)[1:3] or (0, 1))
        order[a], order[b] = order[b], order[a]
    return again(picks, node, order.index(rows.dim), rows.pick)


def expand(picks: Picks, node: fx.Node) -> Rows | None:
    """To a shape whose rows are those of the operand."""
    rows = picks.found(args_of(node)[0])
    if not isinstance(rows, Rows):
        return None
    wanted = extents(value_of(node))
    dim = rows.dim + len(wanted) - value_of(rows.node).dim()
    if isinstance(wanted[dim], int):
        return None
    wanted[dim] = rows.pick.rows
    if not all(isinstance(size, int) for size in wanted):
        return None
    made = picks.call(aten.expand.default, rows.node, wanted)
    column = 0 if rows.places == "all" and value_of(rows.node).shape[1] == 1 else rows.places
    return Rows(node=made, dim=dim, pick=rows.pick, places=None if column == "all" else column)


def joined_dims(picks: Picks, node: fx.Node) -> Rows | None:
    """Rows of one pick, each put behind the other's."""
    parts = args_of(node)[0]
    dim = args_of(node)[1] if len(args_of(node)) > 1 else 0
    rows = [f for f in map(picks.found, parts) if isinstance(f, Rows)]
    same = len(rows) == len(parts) and len({(r.pick.key, r.dim) for r in rows}) == 1
    if not same or dim % value_of(rows[0].node).dim() == rows[0].dim:
        return None
    return again(picks, node, rows[0].dim, rows[0].pick)


def broadcast(picks: Picks, node: fx.Node) -> list[Rows] | None:
    found = [picks.found(n) for n in args_of(node)[0]]
    shapes = {value_of(x.node).shape for x in found if isinstance(x, Rows)}
    rows = [x for x in found if isinstance(x, Rows)]
    alike = len(rows) == len(found) and len(shapes) == 1
    return rows if alike and len({(r.pick.key, r.dim) for r in rows}) == 1 else None


def getitem(picks: Picks, node: fx.Node) -> Said | None:
    found = picks.found(args_of(node)[0])
    return found[args_of(node)[1]] if isinstance(found, list) else None


# --- numbers --------------------------------------------------------------------------------------
def size(picks: Picks, node: fx.Node) -> Said | None:
    rows = picks.found(args_of(node)[0])
    if not isinstance(rows, Rows) or args_of(node)[1] != rows.dim:
        return None
    return Count(node=picks.count(rows.pick), pick=rows.pick)


def number(picks: Picks, node: fx.Node) -> Count | None:
    if any(not isinstance(picks.found(n), Count) for n in node.all_input_nodes):
        return None
    args = swapped(picks, args_of(node))
    if node.target is torch.sym_float:
        return Count(node=picks.call(aten.to.dtype, args[0], torch.float64))
    if node.target in (torch.sym_max, torch.sym_min):
        numbers = [a for a in args if not isinstance(a, fx.Node)]
        counts = [a for a in args if isinstance(a, fx.Node)]
        op = aten.clamp_min if node.target is torch.sym_max else aten.clamp_max
        given = (*counts, *numbers) if len(counts) == 1 else counts
        return Count(node=picks.call(op.default if len(counts) == 1 else op.Tensor, *given))
    if node.target is operator.truediv:
        args = [
            picks.call(aten.to.dtype, a, torch.float64) if isinstance(a, fx.Node) else a
            for a in args
        ]
    return Count(node=picks.call(node.target, *args))
