"""`x[arange(n), i]` picks one element of each row of x: as a gather, rows split as any batch does.

Models select a token of each sequence this way, or the score of each label. To a sharding rule the
row indices are values, so any rank might need any row. Where they count through the leading dims of
x, ``x[arange(n), i]`` is a `gather` along the dim that is left, writes are a `scatter`, and an
index that only counts is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from autopar.tracer.constants import constant

__all__ = ["pick_in_turn"]

aten = torch.ops.aten

_MOST = 1 << 20  # elements of an index that is looked at


def pick_in_turn(graph: fx.Graph, lifted: Mapping[str, Tensor]) -> None:
    """Replace calls whose leading indices count through their dims, in place.

    Args:
        graph: exported.
        lifted: tensors that the forward made of plain values, by the name of their placeholder.
    """
    for node in list(graph.nodes):
        if node.target not in _SPELLED:
            continue
        x, indices, *rest = node.args
        given = [index for index in indices if index is not None]
        if any(index.meta["val"].dtype not in (torch.int64, torch.int32) for index in given):
            continue
        full = torch.broadcast_shapes(*(index.meta["val"].shape for index in given))
        with _disable_current_modes():
            turns = _turns(x.meta["val"].shape, full, indices, lifted)
        left = [(i, index) for i, index in enumerate(indices) if i >= turns and index is not None]
        if not turns or len(left) > 1 or (not left and math.prod(full[turns:]) > 1):
            continue
        with graph.inserting_before(node):
            args = (x, turns, list(full), *(left[0] if left else (turns, None)), *rest)
            new = graph.call_function(_SPELLED[node.target], args)
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def _turns(
    shape: Sequence[int],
    full: Sequence[int],
    indices: Sequence[fx.Node | None],
    lifted: Mapping[str, Tensor],
) -> int:
    """How many leading dims, each of the whole index and of x, the indices count through."""
    turns = 0
    for index in indices:
        if index is None or turns == len(full) or full[turns] != shape[turns]:
            break
        if not _counts(index, turns, full, lifted):
            break
        turns += 1
    return turns


def _counts(index: fx.Node, dim: int, full: Sequence[int], lifted: Mapping[str, Tensor]) -> bool:
    """True if an index says 0, 1, … along a dim of the whole index, and the same elsewhere."""
    shape = index.meta["val"].shape
    at = dim - (len(full) - len(shape))
    if at < 0 or shape[at] != full[dim] or math.prod(shape) > _MOST:
        return False
    value = constant(index, {}, lifted)
    if value is None:
        return False
    steps = torch.arange(shape[at], dtype=value.dtype).view(-1, *[1] * (len(shape) - at - 1))
    return bool((value == steps).all())


def read_in_turn(x: Tensor, turns: int, full: list[int], place: int, index: Any) -> Tensor:
    """`x[indices]`.

    Args:
        x: what is read.
        turns: leading dims that indices count through.
        full: shape of all indices together.
        place, index: the dim and the index that are left, or None.
    """
    if index is None:
        return x.clone().reshape(*full, *x.shape[turns:])
    x = x.movedim(place, turns)
    where = _along(x, turns, full, index)
    return x.gather(turns, where).reshape(*full, *x.shape[turns + 1 :])


def written_in_turn(
    x: Tensor,
    turns: int,
    full: list[int],
    place: int,
    index: Any,
    values: Tensor,
    accumulate: bool = False,
) -> Tensor:
    """`x.index_put(indices, values, accumulate)`, with the arguments of `read_in_turn`."""
    if index is None:
        values = values.expand(*full, *x.shape[turns:]).reshape(x.shape)
        return x + values if accumulate else values.clone()
    moved = x.movedim(place, turns)
    where = _along(moved, turns, full, index)
    source = values.expand(*full, *moved.shape[turns + 1 :]).reshape(where.shape)
    write = torch.scatter_add if accumulate else torch.scatter
    return write(moved, turns, where, source).movedim(turns, place)


def _along(x: Tensor, turns: int, full: list[int], index: Tensor) -> Tensor:
    """The index of a `gather` along dim `turns` of x."""
    index = index.long().expand(full)
    index = torch.where(index < 0, index + x.shape[turns], index)
    rest = x.shape[turns + 1 :]
    where = index.reshape(*full[:turns], math.prod(full[turns:]), *[1] * len(rest))
    return where.expand(*where.shape[: turns + 1], *rest)


_SPELLED: dict[Any, Callable[..., Tensor]] = {
    aten.index.Tensor: read_in_turn,
    aten.index_put.default: written_in_turn,
}
