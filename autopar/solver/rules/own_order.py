"""Rows that each rank keeps in an order of its own: tokens sorted by expert.

A mixture of experts sorts its tokens by expert, runs one grouped matmul over the sorted rows, and
puts the results back. The sort needs all tokens, yet the outcome does not depend on how the rows
stand in between: each rank may sort its own tokens, by the counts of its own, and put back its own.

`Placement.own` says that a shard is of this kind. It is a block of no global tensor, so no
collective moves it; it ends where rows are put back in the program's order, or summed over. Which
tensors may be held so follows from the graph (`note_orders`), op by op:

==========  ===================================================================================
holds       what a rank has of it
==========  ===================================================================================
values      its rows, in its order
positions   per row, where it stands in its block of a dim in program order
inverse     per row in program order, where it stands in the rank's order
sums        a summand of a sum over all rows, such as the number of rows per expert
==========  ===================================================================================

A row of a rule that shards a dim says that the op works block by block, for any size of block, so
for single rows: hence for rows in any order, unless it looks at their place (`core.ops.RANDOM`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import fx

from autopar.core.host import WITH_HOST
from autopar.core.ops import RANDOM, ops
from autopar.core.placement import Partial, Placement, Replicate, Shard
from autopar.core.strategy import AxisStrategy, OpCall, op_call
from autopar.solver.rules.registry import find_rule, registrar

__all__ = ["Order", "note_orders", "orders_of", "own_order_rows"]

aten = torch.ops.aten


class Order(NamedTuple):
    """What a tensor holds whose rows a rank may keep in its own order.

    Attributes:
        of: name of the keys whose sort makes the order.
        holds: "values", "positions", "inverse" or "sums"; see above.
        dim: counts the rows.
        size: of the dim that positions point into.
    """

    of: str
    holds: str
    dim: int = 0
    size: int = 0


class _Found(NamedTuple):
    rows: list[AxisStrategy]
    orders: list[Order | None]


_Orders = list[Order | None]
_Handler = Callable[[OpCall, _Orders], _Found | None]
_HANDLERS: dict[Any, _Handler] = {}
_KEY = "order"
_WHOLE, _SUM = Replicate(), Partial()
_SAME = (
    aten.alias.default,
    aten.clone.default,
    aten.detach.default,
    aten.contiguous.default,
    *WITH_HOST,
)
_ZEROS = (aten.new_zeros.default, aten.zeros.default, aten.zeros_like.default)


def note_orders(graph: fx.Graph) -> None:
    """Write into each node's meta what rows in an own order it may hold.

    Args:
        graph: a traced graph; done before it is copied, so that recomputed values share orders.
    """
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target.__name__ == "getitem":
            orders = node.args[0].meta.get("orders", ())
            node.meta[_KEY] = orders[node.args[1]] if orders else None
        elif _KEY not in node.meta and (node.target in _STARTS or _any(node.all_input_nodes)):
            found = _found(op_call(node, 2))
            orders = found.orders if found else []
            node.meta.update({_KEY: orders[0] if orders else None, "orders": orders})


def own_order_rows(call: OpCall) -> list[AxisStrategy]:
    """Rows of an op on values in an own order, beside those of its rule; none for most ops."""
    if call.target not in _STARTS and not _any(call.nodes):
        return []
    found = _found(call)
    return found.rows if found else []


def orders_of(call: OpCall) -> tuple[Any, ...]:
    """What the rows of an op in an own order depend on, beside the op; () without such rows.

    Which keys make the order does not matter, only which operands share it.
    """
    if call.target not in _STARTS and not _any(call.nodes):
        return ()
    numbers: dict[str, str] = {}

    def plain(order: Order | None) -> Order | None:
        return order and order._replace(of=numbers.setdefault(order.of, str(len(numbers))))

    return (call.nodes[0].target in _ZEROS, *(plain(node.meta.get(_KEY)) for node in call.nodes))


def _any(nodes: Iterable[fx.Node]) -> bool:
    return any(node.meta.get(_KEY) is not None for node in nodes)


def _found(call: OpCall) -> _Found | None:
    orders: _Orders = [node.meta.get(_KEY) for node in call.nodes]
    if len({order.of for order in orders if order is not None}) > 1:
        return None
    handler = _HANDLERS.get(call.target) or _HANDLERS.get(str(call.target))
    found = handler(call, orders) if handler is not None else None
    return found or _row_by_row(call, orders)


def _handles(*targets: Any) -> Callable[[_Handler], _Handler]:
    return registrar(_HANDLERS, targets)


def _own(dim: int = 0) -> Placement:
    return Placement("S", dim, own=True)


def _one(
    inputs: Iterable[Placement], outputs: Iterable[Placement], *orders: Order | None
) -> _Found:
    return _Found([AxisStrategy(tuple(inputs), tuple(outputs))], list(orders))


def _holds(order: Order | None, holds: str) -> bool:
    return order is not None and order.holds == holds


def _row_by_row(call: OpCall, orders: _Orders) -> _Found | None:
    """An op that shards its rows, or sums over them: of whole operands beside."""
    function = find_rule(call.target)
    if function is None or call.target in RANDOM:
        return None
    known = [order for order in orders if order is not None]
    if any(order.holds != "values" for order in known):
        return None
    sizes = {s.shape[o.dim] for s, o in zip(call.operands, orders, strict=True) if o is not None}
    if len(sizes) != 1:
        return None
    wanted = [_WHOLE if order is None else Shard(order.dim) for order in orders]
    for row in function(call):
        if list(row.inputs) != wanted or row.variant or row.comm:
            continue
        if all(
            _is_row_of(p, s.shape, sizes) for p, s in zip(row.outputs, call.outputs, strict=True)
        ):
            held = [tuple(map(_as_own, side)) for side in (row.inputs, row.outputs)]
            orders = [_order_of(p, known[0].of) for p in row.outputs]
            return _Found([AxisStrategy(held[0], held[1])], orders)
    return None


def _is_row_of(placement: Placement, shape: tuple[int, ...], sizes: set[int]) -> bool:
    if placement.is_shard:
        return placement.split == 1 and shape[placement.dim] in sizes
    return placement.is_partial


def _as_own(placement: Placement) -> Placement:
    return _own(placement.dim) if placement.is_shard else placement


def _order_of(placement: Placement, of: str) -> Order:
    if placement.is_shard:
        return Order(of, "values", placement.dim)
    return Order(of, "sums")


# --- where an order begins, and positions in it -----------------------------------------------
@_handles(aten.sort.default, aten.sort.stable)
def _sort(call: OpCall, orders: _Orders) -> _Found | None:
    """Keys in program order, one per row; equal keys may stand in any order."""
    (keys,) = call.operands
    if len(keys.shape) != 1 or orders[0] is not None:
        return None
    name = call.nodes[0].name
    positions = Order(name, "positions", 0, keys.shape[0])
    return _one((Shard(0),), (_own(), _own()), Order(name, "values"), positions)


_STARTS = (aten.sort.default, aten.sort.stable)


@_handles(aten.floor_divide.default, aten.div.Tensor_mode)
def _to_coarser(call: OpCall, orders: _Orders) -> _Found | None:
    """Position k·i + j among the choices of tokens is that of token i."""
    by = call.args[1]
    if call.target is aten.div.Tensor_mode and call.kwargs.get("rounding_mode") is None:
        return None
    order = orders[0]
    if order is None or order.holds != "positions" or not isinstance(by, int) or by < 1:
        return None
    if order.size % by:
        return None
    return _one((_own(),), (_own(),), order._replace(size=order.size // by))


@_handles(ops.inverse_permutation.default)
def _inverse(call: OpCall, orders: _Orders) -> _Found | None:
    order = orders[0]
    if order is None or order.holds != "positions" or order.size != call.operands[0].shape[0]:
        return None
    return _one((_own(),), (_own(),), Order(order.of, "inverse"))


@_handles(*_SAME)
def _same(call: OpCall, orders: _Orders) -> _Found | None:
    order = orders[0]
    if order is None or order.holds == "values":
        return None  # as any op that works row by row
    held = _SUM if order.holds == "sums" else _own(order.dim)
    return _one((held,), (held,), order)


# --- rows by position -------------------------------------------------------------------------
def _first_index(call: OpCall) -> bool:
    """True if dim 0 alone is indexed, by one tensor of one dim."""
    given = call.arg(1, "indices")
    return (
        isinstance(given, (list, tuple))
        and len([i for i in given if i is not None]) == 1
        and given[0] is not None
        and len(call.operands[1].shape) == 1
    )


@_handles(aten.index.Tensor)
def _rows_at(call: OpCall, orders: _Orders) -> _Found | None:
    return _picked(call, orders) if _first_index(call) else None


@_handles(aten.index_select.default)
def _rows_selected(call: OpCall, orders: _Orders) -> _Found | None:
    return _picked(call, orders) if call.arg(1, "dim") == 0 else None


def _picked(call: OpCall, orders: _Orders) -> _Found | None:
    """Rows of program order into the own one, and back."""
    source, index = orders
    count = call.operands[0].shape[0]
    if index is None:
        return None
    if index.holds == "positions" and source is None and count == index.size:
        return _one((Shard(0), _own()), (_own(),), Order(index.of, "values"))
    whole = count == call.operands[1].shape[0]
    if index.holds == "inverse" and source == Order(index.of, "values") and whole:
        return _one((_own(), _own()), (Shard(0),), None)
    return None


@_handles(aten.index_put.default)
def _rows_put(call: OpCall, orders: _Orders) -> _Found | None:
    """The gradients of the two: rows are added where they came from."""
    if not _first_index(call) or len(call.operands) != 3:
        return None
    base, index, rows = orders
    count, given = call.operands[0].shape[0], call.operands[2].shape[:1]
    if index is None or base is not None or given != call.operands[1].shape:
        return None
    values = Order(index.of, "values")
    if index.holds == "positions" and rows == values and count == index.size:
        return _one((Shard(0), _own(), _own()), (Shard(0),), None)
    if index == rows == values and call.arg(3, "accumulate", False):
        return _one((_SUM, _own(), _own()), (_SUM,), Order(index.of, "sums"))
    # what is there before is in program order, so it has to be zero
    if index.holds == "inverse" and rows is None and given == (count,):
        if call.nodes[0].target in _ZEROS:
            return _one((Shard(0), _own(), Shard(0)), (_own(),), values)
    return None


@_handles(aten.new_zeros.default, aten.new_empty.default, aten.new_ones.default)
@_handles(aten.new_full.default, aten.zeros_like.default, aten.empty_like.default)
def _made_like(call: OpCall, orders: _Orders) -> _Found | None:
    """Of its operand such an op reads the dtype and the shape."""
    order = orders[0] if orders else None
    if order is None:
        return None
    if order.holds == "sums":
        return None
    made = [_WHOLE, *(Shard(dim) for dim in range(len(call.outputs[0].shape)))]
    if call.target in _ZEROS:
        made.append(_SUM)
    if str(call.target).endswith("_like.default"):
        made = [Shard(order.dim)]
    return _Found([AxisStrategy((_own(order.dim),), (out,)) for out in made], [None])


# --- sums over rows, and grouped products -----------------------------------------------------
@_handles(aten.histc.default, aten.bincount.default)
def _counts(call: OpCall, orders: _Orders) -> _Found | None:
    """How many rows have each key, where the bins do not depend on the keys."""
    if len(call.operands) != 1 or not _holds(orders[0], "values"):
        return None
    low, high = call.arg(2, "min", 0), call.arg(3, "max", 0)
    fixed = call.arg(2, "minlength", 0) > 0 if call.target is aten.bincount.default else low < high
    assert orders[0] is not None
    return _one((_own(),), (_SUM,), Order(orders[0].of, "sums")) if fixed else None


@_handles(aten.cumsum.default, aten._to_copy.default)
def _of_sums(call: OpCall, orders: _Orders) -> _Found | None:
    """Counts are whole numbers: casts lose nothing of their summands."""
    order = orders[0]
    if order is None or order.holds != "sums":
        return None
    return _one((_SUM,), (_SUM,), order)


def _is_grouped(orders: _Orders, at: dict[int, int], sums: int) -> bool:
    """True if the operands `at` hold rows along those dims, and one their counts, no other any."""
    return all(
        _holds(order, "sums") if i == sums
        else order is None if i not in at
        else _holds(order, "values") and order.dim == at[i]  # type: ignore[union-attr]
        for i, order in enumerate(orders)
    )  # fmt: skip


@_handles("transformers.grouped_mm_fallback.default", aten._grouped_mm.default)
def _grouped(call: OpCall, orders: _Orders) -> _Found | None:
    if len(orders) != 3 or orders[2] is None:
        return None
    of = orders[2].of
    if _is_grouped(orders, {0: 0}, 2):
        return _one((_own(), _WHOLE, _SUM), (_own(),), Order(of, "values"))
    if _is_grouped(orders, {0: 1, 1: 0}, 2):  # the gradient of the matrices
        return _one((_own(1), _own(), _SUM), (_SUM,), Order(of, "sums"))
    return None


@_handles("transformers.grouped_mm_fallback_backward.default")
def _grouped_backward(call: OpCall, orders: _Orders) -> _Found | None:
    if len(orders) != 4 or not _is_grouped(orders, {0: 0, 3: 0}, 2):
        return None
    assert orders[2] is not None
    of = orders[2].of
    rows = (_own(), _WHOLE, _SUM, _own()), (_own(), _SUM)
    return _one(*rows, Order(of, "values"), None)
