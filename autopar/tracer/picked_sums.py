"""Ops that combine picked rows, in which those that were not picked count for nothing (`picked`).

    mean over picked rows = sum(where(mask, x, 0)) / (mask.sum() * elements of a row)

Losses over classes ignore the targets of the other rows. Other losses are computed without a
reduction first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from autopar.tracer.picked import Picks, Rows, Said, args_of, argument, name_of, schema_of, value_of
from autopar.tracer.picked_rows import again, first_rows, pointwise, swapped

__all__ = [
    "LOSSES",
    "NEUTRAL",
    "elementwise_loss",
    "quotient_of_sums",
    "reduced",
    "token_loss",
]

aten = torch.ops.aten

LOSSES = frozenset(
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy soft_margin_loss kl_div "
    "binary_cross_entropy_with_logits poisson_nll_loss".split()
)


def _least(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point:
        return -math.inf
    return False if dtype is torch.bool else torch.iinfo(dtype).min


def _greatest(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point:
        return math.inf
    return True if dtype is torch.bool else torch.iinfo(dtype).max


NEUTRAL: dict[str, Callable[[torch.dtype], Any]] = {
    "sum": lambda _: 0,
    "any": lambda _: 0,
    "all": lambda _: 1,
    "linalg_vector_norm": lambda _: 0,
    "logsumexp": lambda _: -math.inf,
    "amax": _least,
    "amin": _greatest,
    "max": _least,
    "min": _greatest,
}


def reduced(picks: Picks, node: fx.Node) -> Said | fx.Node | None:
    """Rows that are not picked hold what does not count."""
    rows, name = first_rows(picks, node), name_of(node.target)
    if schema_of(node).overload_name == "other":  # the greater of two
        return pointwise(picks, node)
    if rows is None:
        return None
    value = value_of(rows.node)
    dims = _dims(node, value.dim())
    if rows.dim not in dims:
        return again(picks, node, rows.dim - _gone_before(node, dims, rows.dim), rows.pick)
    if name == "mean":
        return _mean(picks, node, rows, dims)
    order = args_of(node)[1] if name == "linalg_vector_norm" and len(args_of(node)) > 1 else 2
    if name not in NEUTRAL or not isinstance(order, (int, float)) or order <= 0:
        return None
    neutral = NEUTRAL[name](value.dtype)
    only = picks.only_picked(rows, neutral)
    args, kwargs = swapped(picks, (args_of(node)[1:], dict(node.kwargs)))
    made = picks.call(node.target, only, *args, **kwargs)
    if not isinstance(value_of(made), Tensor):
        return None
    boolean = value_of(made).dtype is torch.bool
    return picks.put_together(made, rows.pick, 0 if boolean else neutral)


def _dims(node: fx.Node, rank: int) -> set[int]:
    """The dims that a reduction takes away."""
    given: Any = argument(node, "dim")
    if given is None or given == []:
        return set(range(rank))
    return {d % rank for d in (given if isinstance(given, (list, tuple)) else [given])}


def _gone_before(node: fx.Node, dims: set[int], dim: int) -> int:
    return 0 if argument(node, "keepdim") else sum(d < dim for d in dims)


def _mean(picks: Picks, node: fx.Node, rows: Rows, dims: set[int]) -> fx.Node:
    dtype = value_of(node).dtype
    wide = rows
    if value_of(rows.node).dtype is not dtype:
        wide = replace(rows, node=picks.call(aten.to.dtype, rows.node, dtype))
    only, keep = picks.only_picked(wide, 0), bool(argument(node, "keepdim"))
    total = picks.call(aten.sum.dim_IntList, only, sorted(dims), keep)
    return _divided(picks, total, wide, dims)


def _divided(picks: Picks, total: fx.Node, rows: Rows, dims: set[int]) -> fx.Node:
    shape = value_of(rows.node).shape
    others = math.prod(shape[d] for d in dims if d != rows.dim)
    count = picks.call(aten.mul.Tensor, picks.count(rows.pick), others)
    return picks.put_together(_over(picks, total, count), rows.pick)


def _over(picks: Picks, total: fx.Node, count: fx.Node) -> fx.Node:
    """A mean, which is 0 of nothing where the model asks before."""
    if picks.zero_of_none:
        count = picks.call(aten.clamp_min.default, count, 1)
    return picks.call(aten.div.Tensor, total, count)


def elementwise_loss(picks: Picks, node: fx.Node) -> Rows | fx.Node | None:
    """An elementwise loss: of each element, then their sum or mean over picked rows."""
    arguments = [a.name for a in schema_of(node).arguments]
    place, reduction = arguments.index("reduction"), argument(node, "reduction")
    if reduction == 0:
        return pointwise(picks, node)
    args = list(args_of(node)) + [
        a.default_value for a in schema_of(node).arguments[len(args_of(node)) : place]
    ]
    args = [*args[:place], 0, *args[place + 1 :]]
    values = [value_of(n) for n in node.all_input_nodes]
    like = values[0]
    if any(str(value.shape) != str(like.shape) for value in values):  # else torch 2.11 asks
        with picks.mode:
            like = torch.broadcast_tensors(*values)[0]
    elements = _elements(picks, node, args, like)
    if elements is None:
        return None
    total = picks.call(aten.sum.default, picks.only_picked(elements, 0))
    if reduction == 2:
        return picks.put_together(total, elements.pick)
    return _divided(picks, total, elements, set(range(like.dim())))


def _elements(picks: Picks, node: fx.Node, args: list[Any], like: Tensor) -> Rows | None:
    """The losses of all elements, of a node that would reduce them."""
    target: Any = node.target
    whole = picks.graph.call_function(target, tuple(args), dict(node.kwargs))
    with picks.mode:
        whole.meta["val"] = like.to(value_of(node).dtype)
    found = pointwise(picks, whole)
    picks.graph.erase_node(whole)
    return found if isinstance(found, Rows) else None


def token_loss(picks: Picks, node: fx.Node) -> Said | fx.Node | None:
    """Targets of rows that are not picked are ignored."""
    logits, target = (picks.found(n) for n in args_of(node)[:2])
    if not isinstance(logits, Rows) or not isinstance(target, Rows) or logits.dim != 0:
        return None
    if logits.pick.key != target.pick.key or value_of(target.node).dtype.is_floating_point:
        return None
    ignored = picks.only_picked(target, argument(node, "ignore_index"))
    plain = all(argument(node, n) in (None, 0) for n in ("weight", "label_smoothing"))
    if picks.zero_of_none and plain and argument(node, "reduction") == 1:
        ignore = argument(node, "ignore_index")
        total = picks.call(node.target, logits.node, ignored, None, 2, ignore)
        counted = picks.call(aten.ne.Scalar, ignored, ignore)
        mean = _over(picks, total, picks.call(aten.sum.default, counted))
        return picks.put_together(mean, logits.pick)
    made = picks.call(node.target, logits.node, ignored, *args_of(node)[2:], **node.kwargs)
    if argument(node, "reduction") == 0:
        return Rows(node=made, dim=0, pick=logits.pick)
    return picks.put_together(
        made, logits.pick, 0 if argument(node, "reduction") == 2 else math.nan
    )


def quotient_of_sums(picks: Picks, node: fx.Node) -> fx.Node | None:
    """A mean by hand, `rows.sum() / mask.sum()`, where the model asks whether there are rows."""
    over, under = args_of(node)
    while isinstance(over, fx.Node) and name_of(over.target) in ("neg", "mul", "to", "_to_copy"):
        over = next((n for n in over.all_input_nodes if n in picks.sums), args_of(over)[0])
    pick = picks.sums.get(over)
    if pick is None or not isinstance(under, fx.Node):
        return None
    return picks.call(node.target, args_of(node)[0], picks.or_else(under, pick, 1))
