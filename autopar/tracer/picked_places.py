"""Rewrites picked rows of an exported graph as all rows: where they arise, and what has a rule.

Rows are picked by `x[mask]`, `masked_select`, or by the positions that `nonzero` and `where` give,
and written back by `x[mask] = rows`, `index_add` and `masked_scatter`. `picked` has the idea.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from autopar.tracer import picked_batch as batch
from autopar.tracer import picked_order as order
from autopar.tracer import picked_products as products
from autopar.tracer import picked_rows as rows_of
from autopar.tracer.effects import drop_dead
from autopar.tracer.picked import (
    Count,
    Pick,
    Picks,
    Rows,
    Said,
    args_of,
    name_of,
    value_of,
)
from autopar.tracer.picked_finite import guarded, started
from autopar.tracer.picked_known import say_known
from autopar.tracer.picked_rows import pointwise
from autopar.tracer.picked_scatter import put_rows, scattered
from autopar.tracer.picked_sums import (
    LOSSES,
    NEUTRAL,
    elementwise_loss,
    quotient_of_sums,
    reduced,
    token_loss,
)
from autopar.tracer.picked_writes import (
    fill,
    of_each_row,
    out_of_place,
    put_known,
    row_of_places,
    rows_at_places,
    settled,
    where_put,
    written,
)

__all__ = ["say_picked"]

aten = torch.ops.aten
Rule = Callable[[Picks, fx.Node], Said | fx.Node | None]


def say_picked(gm: fx.GraphModule, zero_of_none: bool = False) -> list[fx.Node]:
    """Say picked rows with all rows, in place, as far as rules go.

    Args:
        gm: an exported graph.
        zero_of_none: means of no rows are 0, not nan.

    Returns:
        what has no form with all rows, first things first
    """
    stuck = []
    for part in list(gm.modules()):
        if isinstance(part, fx.GraphModule) and say_known(part.graph):
            part.recompile()
        if isinstance(part, fx.GraphModule) and any(map(_is_source, part.graph.nodes)):
            out_of_place(part.graph)
            settled(part.graph)
            found = _say(Picks(graph=part.graph, zero_of_none=zero_of_none))
            drop_dead(part)
            stuck += [node for node in part.graph.nodes if node in set(found)]
            part.recompile()
    return stuck


def _say(picks: Picks) -> list[fx.Node]:
    graph, stuck = picks.graph, []
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        picks.at = node
        reads = any(picks.found(n) is not None for n in node.all_input_nodes)
        rule = _rule_of(node) if reads else None
        if _is_source(node):
            rule = _SOURCES[name_of(node.target)]
        elif picks.zero_of_none and node.target is aten.div.Tensor and not reads:
            rule = quotient_of_sums
        found = guarded(picks, node, rule) if rule is not None else None
        if found is None and (reads or _is_source(node)):
            stuck.append(node)
        if isinstance(found, fx.Node):
            name = node.name
            node.replace_all_uses_with(found)
            graph.erase_node(node)
            found._rename(name)  # outputs are known by name
        elif found is not None:
            picks.known[node] = found
    return stuck


def _is_source(node: fx.Node) -> bool:
    name = name_of(node.target)
    if name == "where" and node.target is not aten.where.default:
        return False  # which picks one of two values for each element
    return name == "item" or (name in _SOURCES and _is_unknown(node))


def _is_unknown(node: fx.Node) -> bool:
    """True if a shape in a node's value depends on values."""
    value = node.meta.get("val")
    parts = value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(p, Tensor) and free_unbacked_symbols(p) for p in parts)


# --- where rows are picked --------------------------------------------------------------------
def _index(picks: Picks, node: fx.Node) -> Rows | None:
    """By one mask, or by all places of one, with whole dims around."""
    source: Any = args_of(node)[0]
    indices: list[Any] = list(args_of(node)[1])
    given = [i for i, x in enumerate(indices) if x is not None]
    if given != list(range(given[0], given[-1] + 1)):
        return None
    first = given[0]
    inner = picks.found(source)
    if own := order.own_rows(picks, node):
        return own
    if len(given) == 1 and indices[first].meta["val"].dtype is torch.bool:
        if inner is not None or indices[first] in picks.known:
            return _picked_again(picks, inner, indices[first], first)
        return _masked(picks, source, indices[first], first)
    found = [picks.found(indices[i]) for i in given]
    if inner is not None or not all(isinstance(f, Rows) for f in found):
        return None
    return _at_places(picks, source, found, first)


def _masked(picks: Picks, source: fx.Node, mask: fx.Node, dim: int) -> Rows | None:
    pick, given = picks.pick_of(mask), source
    if pick is None:
        return None
    if source in picks.written:
        source = picks.call(aten.clone.default, source)
    value, rank = value_of(source), value_of(mask).dim()
    if rank > 1:
        shape = [*value.shape[:dim], pick.rows, *value.shape[dim + rank :]]
        source = picks.call(aten.reshape.default, source, shape)
    return started(picks, given, Rows(node=source, dim=dim, pick=pick))


def _picked_again(picks: Picks, inner: Any, mask: fx.Node, dim: int) -> Rows | None:
    """Rows picked of picked ones, by a mask over these."""
    chosen = picks.found(mask)
    if not isinstance(inner, Rows) or not isinstance(chosen, Rows) or inner.dim != dim:
        return None
    if inner.pick.key != chosen.pick.key or value_of(chosen.node).dim() != 1:
        return None
    both = picks.call(aten.logical_and.default, inner.pick.flat, chosen.node)
    key = ("again", inner.pick.key, picks.key(chosen.node))
    pick = Pick(mask=both, flat=both, key=key)
    return Rows(node=inner.node, dim=dim, pick=pick)


def _at_places(picks: Picks, source: fx.Node, found: list[Any], dim: int) -> Rows | None:
    if any(f.pick is not found[0].pick for f in found) or any(
        value_of(f.node).dim() != 1 for f in found
    ):
        return None
    pick, shape = found[0].pick, value_of(found[0].pick.mask).shape
    value = value_of(source)
    if [f.places for f in found] == list(range(len(shape))):
        if value.shape[dim : dim + len(shape)] == shape:
            return _masked(picks, source, pick.mask, dim)
    if spread := of_each_row(picks, source, found, dim):
        return started(picks, source, Rows(node=spread, dim=dim, pick=pick))
    indices = [*[None] * dim, *(f.node for f in found)]
    made = picks.call(aten.index.Tensor, source, indices)
    return started(picks, source, Rows(node=made, dim=dim, pick=pick))


def _masked_select(picks: Picks, node: fx.Node) -> Rows | None:
    source, mask = args_of(node)
    shape = value_of(source).shape
    if shape != value_of(mask).shape or picks.found(source) is not None:
        return None
    return _masked(picks, source, mask, 0)


def _nonzero(picks: Picks, node: fx.Node) -> Said | None:
    """The places of a mask: all places, of which those are picked that it has."""
    mask: Any = args_of(node)[0]
    if picks.found(mask) is not None or free_unbacked_symbols(value_of(mask)):
        return None
    if value_of(mask).dtype is not torch.bool:
        mask = picks.call(aten.ne.Scalar, mask, 0)
    pick = picks.pick_of(mask)
    if pick is None or args_of(node)[1:]:
        return None
    shape = value_of(mask).shape
    device = value_of(mask).device
    columns, behind = [], pick.rows
    every = picks.call(aten.arange.default, pick.rows, dtype=torch.int64, device=device)
    for size in shape:
        behind //= size
        column = picks.call(aten.floor_divide.default, every, behind) if behind > 1 else every
        columns.append(picks.call(aten.remainder.Scalar, column, size))
    if name_of(node.target) == "nonzero":
        places = picks.call(aten.stack.default, columns, 1)
        return Rows(node=places, dim=0, pick=pick, places="all")
    return [Rows(node=c, dim=0, pick=pick, places=i) for i, c in enumerate(columns)]


def _item(picks: Picks, node: fx.Node) -> Count | None:
    """A number that is read of a tensor; it has no gradient."""
    source = args_of(node)[0]
    if picks.found(source) is not None or free_unbacked_symbols(value_of(source)):
        return None
    return Count(node=picks.call(aten.reshape.default, picks.call(aten.detach.default, source), []))


# --- where rows are looked up or written ----------------------------------------------------------
def _gather(picks: Picks, node: fx.Node) -> Said | None:
    """Rows of a table by places; those of a mask over the whole dim are the table's own."""
    source, dim, index = args_of(node)[:3]
    rows, rank = picks.found(index), value_of(source).dim()
    inner, dim = picks.found(source), dim % max(rank, 1)
    if isinstance(inner, Rows):
        alike = inner.dim != dim and isinstance(rows, Rows) and rows.pick.key == inner.pick.key
        return rows_of.again(picks, node, inner.dim, inner.pick) if alike else None
    if not isinstance(rows, Rows) or rows.dim != dim:  # in other dims the n-th of each meet
        return None
    own = rows.places == 0 and value_of(rows.pick.mask).dim() == 1
    if own and dim == 0 and value_of(rows.node).shape == value_of(source).shape:
        return _masked(picks, source, rows.pick.mask, 0)
    return rows_of.again(picks, node, rows.dim, rows.pick)


def _index_select(picks: Picks, node: fx.Node) -> Said | None:
    source, dim, index = args_of(node)
    rows = picks.found(index)
    if not isinstance(rows, Rows) or picks.found(source) is not None:
        return None
    return _at_places(picks, source, [rows], dim)


def _put(picks: Picks, node: fx.Node) -> fx.Node | None:
    """`x[mask] = rows` takes the rows where the mask has them."""
    table, indices, source = args_of(node)[:3]
    adds = len(args_of(node)) > 3 and args_of(node)[3]
    rows = picks.found(source)
    if picks.found(table) is None and rows is None:
        return put_known(picks, node)
    if picks.found(table) is not None or not isinstance(rows, Rows) or rows.dim != 0:
        return None
    place = where_put(picks, list(indices))
    one = row_of_places(picks, list(indices)) if place is None else None
    if one is not None and one.key == rows.pick.key:
        if value_of(rows.node).dtype is not value_of(table).dtype:
            return None
        put = rows_at_places(picks, one, table, rows, adds)
        return None if put is None else written(picks, node, table, put)
    return None if place is None else put_rows(picks, node, place, rows, bool(adds))


def _add(picks: Picks, node: fx.Node) -> fx.Node | None:
    """Rows that are not picked add zeros."""
    table, dim, index, source = args_of(node)[:4]
    places, rows = (picks.found(n) for n in (index, source))
    if not isinstance(places, Rows) or not isinstance(rows, Rows) or rows.dim != dim:
        return None
    if picks.found(table) is not None or places.pick.key != rows.pick.key:
        return None
    zeroed = picks.only_picked(rows, 0)
    value = value_of(table)
    if dim == 0 and not node.kwargs and places.places == 0:
        put = rows_at_places(picks, places.pick, table, rows, adds=True)
        if put is not None:
            return written(picks, node, table, put)
    own = places.places == 0 and value_of(places.pick.mask).dim() == 1
    if own and not node.kwargs and value.shape == value_of(zeroed).shape:
        total = picks.call(aten.add.Tensor, table, zeroed)
        return written(picks, node, table, total)
    return picks.call(node.target, table, dim, places.node, zeroed, **node.kwargs)


_RULES: dict[str, Rule] = {
    **dict.fromkeys(rows_of.ROWWISE, rows_of.kept),
    **dict.fromkeys(LOSSES, elementwise_loss),
    **dict.fromkeys(("linear", "layer_norm", "rms_norm"), rows_of.last_dim),
    **dict.fromkeys(("chunk", "split"), products.parts),
    **dict.fromkeys(("cat", "concat", "concatenate"), order.joined),
    **dict.fromkeys(("matmul", "mm", "bmm"), products.product),
    **dict.fromkeys(
        ("softmax", "log_softmax", "_softmax", "_log_softmax", "cumsum", "glu"), rows_of.beside_dim
    ),
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "flatten"), rows_of.view),
    **dict.fromkeys(("select", "squeeze"), rows_of.dropped_dim),
    **dict.fromkeys(("transpose", "permute", "t", "numpy_T", "mT"), rows_of.transpose),
    **dict.fromkeys(("expand", "expand_as"), batch.repeated),
    **dict.fromkeys((*NEUTRAL, "mean", "argmax", "argmin"), reduced),
    **dict.fromkeys(("cross_entropy_loss", "nll_loss_nd"), token_loss),
    **dict.fromkeys(("var", "std", "var_mean", "std_mean"), batch.spread),
    **dict.fromkeys(("sort", "topk"), batch.ordered),
    **dict.fromkeys(("pad", "constant_pad_nd"), batch.padded),
    **dict.fromkeys(("flip", "roll"), batch.turned),
    **dict.fromkeys(
        ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "group_norm"),
        batch.convolved,
    ),
    **dict.fromkeys(("zeros", "ones", "full", "new_zeros", "new_ones", "new_full"), batch.filled),
    "scaled_dot_product_attention": batch.attention,
    "stack": batch.stacked,
    "einsum": products.einsum,
    "slice": rows_of.slice,
    "unsqueeze": rows_of.unsqueeze,
    "embedding": rows_of.embedding,
    "split_with_sizes": order.split,
    "arange": order.numbered,
    "unfold": batch.unfolded,
    "bucketize": batch.bucketed,
    "broadcast_tensors": rows_of.broadcast,
    "getitem": rows_of.getitem,
    "gather": _gather,
    "index_select": _index_select,
    "index_put": _put,
    "index_add": _add,
    "index_fill": fill,
    "masked_scatter": scattered,
    **dict.fromkeys(("where", "__and__", "__or__", "__xor__"), pointwise),
    "sym_size": rows_of.size,
}
_WRITES: dict[str, Rule] = {
    "index_put_": _put,
    "index_add_": _add,
    "index_fill_": fill,
    "masked_scatter_": scattered,
}
_SOURCES: dict[str, Rule] = {
    "index": _index,
    "masked_select": _masked_select,
    "nonzero": _nonzero,
    "where": _nonzero,
    "item": _item,
}


def _rule_of(node: fx.Node) -> Rule | None:
    """The rule of an op that reads picked rows."""
    target = node.target
    if target in rows_of.NUMBERS:
        return rows_of.number
    if isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
        return _WRITES.get(name_of(target))
    found = _RULES.get(name_of(target))
    if found is None and torch.Tag.pointwise in getattr(target, "tags", ()):
        return pointwise
    return found
