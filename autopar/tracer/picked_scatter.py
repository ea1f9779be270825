"""Picked rows written at the places of another mask (`picked`).

    x[is_image_token] = tower(images[is_real])         # as many of one as of the other
    x = x.masked_scatter(is_image_token[..., None], tower(images[is_real]))

The n-th true of one mask gets the row of the n-th true of the other. If they have unequal numbers,
places are out of range, which is an error when the step runs; `masked_scatter` on one device only
fails if there are too few rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.tracer.picked import Pick, Picks, Rows, args_of, name_of, value_of
from autopar.tracer.picked_writes import written

__all__ = ["put_rows", "scattered"]

aten = torch.ops.aten


def scattered(picks: Picks, node: fx.Node) -> fx.Node | None:
    """`masked_scatter` of rows, over all their columns."""
    table, mask, source = args_of(node)
    rows = picks.found(source)
    if picks.found(table) is not None or not isinstance(rows, Rows) or rows.dim != 0:
        return None
    value, given = value_of(table), value_of(rows.node)
    rank = value.dim() - given.dim() + 1
    inner = _of_rows(mask, value.shape, rank)
    place = None if inner is None else picks.pick_of(inner)
    return None if place is None else put_rows(picks, node, place, rows, adds=False)


def _of_rows(mask: Any, shape: torch.Size, rank: int) -> fx.Node | None:
    """The mask over the first dims of a table that is spread over the others."""
    if rank < 1 or value_of(mask).dim() != len(shape):
        return None
    while value_of(mask).dim() > rank or name_of(mask.target) == "expand":
        if not isinstance(mask, fx.Node) or mask.op != "call_function":
            return None
        inner, dims = args_of(mask)[0], value_of(mask).dim()
        if name_of(mask.target) in ("expand", "expand_as"):
            fits = value_of(inner).dim() == dims
        elif name_of(mask.target) in ("to", "_to_copy", "contiguous", "alias"):
            fits = value_of(inner).dtype is torch.bool
        else:
            fits = name_of(mask.target) == "unsqueeze" and args_of(mask)[1] in (-1, dims - 1)
        if not fits:
            return None
        mask = inner
    fits = value_of(mask).dtype is torch.bool and value_of(mask).shape == shape[:rank]
    return mask if fits else None


def put_rows(picks: Picks, node: fx.Node, place: Pick, rows: Rows, adds: bool) -> fx.Node | None:
    """A table with rows in order, or added, at the places of a mask over its first dims."""
    table = args_of(node)[0]
    value, given = value_of(table), value_of(rows.node)
    shape = value_of(place.mask).shape
    if value.shape[: len(shape)] != shape or given.shape[1:] != value.shape[len(shape) :]:
        return None
    if given.dtype is not value.dtype or not place.rows or not rows.pick.rows:
        return None
    own = rows.node
    if place.key != rows.pick.key:
        own = picks.call(aten.index.Tensor, own, [_sources(picks, place, rows.pick)])
    own = picks.call(aten.reshape.default, own, list(value.shape))
    mask = place.mask
    if value.dim() > len(shape):
        wide = [*shape, *[1] * (value.dim() - len(shape))]
        mask = picks.call(aten.reshape.default, mask, wide)
    other = picks.call(aten.add.Tensor, table, own) if adds else own
    return written(picks, node, table, picks.call(aten.where.self, mask, other, table))


def _sources(picks: Picks, place: Pick, pick: Pick) -> fx.Node:
    """For each place the row of the same number among those picked: (places,)."""
    counts = picks.call(aten.cumsum.default, pick.flat, 0)
    wanted = picks.call(aten.cumsum.default, place.flat, 0)
    rows = picks.call(aten.searchsorted.Tensor, counts, wanted)
    ends = [picks.call(aten.select.int, n, 0, value_of(n).shape[0] - 1) for n in (counts, wanted)]
    even = picks.call(aten.eq.Tensor, *ends)
    return picks.call(aten.where.ScalarOther, even, rows, pick.rows)
