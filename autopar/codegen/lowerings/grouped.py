"""Grouped matmul over some of the groups: their rows are rolled to the front, and back after."""

from __future__ import annotations

import torch
from torch import fx

from autopar.codegen.builder import Builder
from autopar.codegen.lowering import LocalCall, lowering

aten = torch.ops.aten


def _rolled(b: Builder, x: fx.Node, start: fx.Node) -> fx.Node:
    """Row `(i + start) mod S` of `x` in row i."""
    count = b.shape(x)[0]
    rows = b.call(aten.arange.default, count, dtype=torch.int64, device=b.device)
    index = b.call(aten.remainder.Scalar, b.call(aten.add.Tensor, rows, start), count)
    return b.call(aten.index_select.default, x, 0, index)


def _local_groups(b: Builder, local: LocalCall) -> tuple[fx.Node, fx.Node]:
    """First row of this rank's groups, and the offsets of their ends from there."""
    weight = local.call.operands[1].shape
    first = local.offset(b, local.inputs[1], weight)[0]
    ends = local.args[2]
    mine = b.call(aten.slice.Tensor, ends, 0, first, first + b.shape(local.args[1])[0])
    starts = b.call(aten.cat.default, [b.call(aten.new_zeros.default, ends, [1]), ends])
    start = b.call(aten.select.int, starts, 0, first)
    return start, b.call(aten.sub.Tensor, mine, start)


@lowering("transformers.grouped_mm_fallback.default")
def lower_grouped_mm(b: Builder, local: LocalCall) -> fx.Node:
    """The op leaves 0 in rows behind the last group."""
    if not local.axes_of("expert"):
        return b.call(local.call.target, *local.args)
    start, ends = _local_groups(b, local)
    x = _rolled(b, local.args[0], start)
    y = b.call(local.call.target, x, local.args[1], ends)
    return _rolled(b, y, b.call(aten.neg.default, start))


@lowering("transformers.grouped_mm_fallback_backward.default")
def lower_grouped_mm_backward(b: Builder, local: LocalCall) -> fx.Node:
    if not local.axes_of("expert"):
        return b.call(local.call.target, *local.args)
    start, ends = _local_groups(b, local)
    x, grad = (_rolled(b, local.args[i], start) for i in (0, 3))
    both = b.call(local.call.target, x, local.args[1], ends, grad)
    rolled = _rolled(b, b.item(both, 0), b.call(aten.neg.default, start))
    return b.pack(rolled, b.item(both, 1))
