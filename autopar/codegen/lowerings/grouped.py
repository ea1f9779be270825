"""Grouped matmul over some of the groups: their rows are rolled to the front, and back after."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from autopar.codegen.builder import Builder
from autopar.codegen.lowering import LocalCall, lowering
from autopar.core.placement import local_shape

aten = torch.ops.aten


def _rolled(b: Builder, x: fx.Node, start: fx.Node) -> fx.Node:
    """Row `(i + start) mod S` of `x` in row i."""
    count = b.shape(x)[0]
    rows = b.call(aten.arange.default, count, dtype=torch.int64, device=b.device)
    index = b.call(aten.remainder.Scalar, b.call(aten.add.Tensor, rows, start), count)
    return b.call(aten.index_select.default, x, 0, index)


def _local_groups(b: Builder, local: LocalCall) -> tuple[fx.Node, fx.Node]:
    """First row of this rank's groups, and the offsets of their ends from there."""
    grouped, layout = local.call.operands[1].shape, local.inputs[1]
    if len(grouped) != 3:
        grouped, layout = local.call.outputs[0].shape, local.outputs[0]
    first = local.offset(b, layout, grouped)[0]
    count = local_shape(grouped, layout, local.mesh_shape)[0]
    ends = local.args[2]
    mine = b.call(aten.slice.Tensor, ends, 0, first, first + count)
    starts = b.call(aten.cat.default, [b.call(aten.new_zeros.default, ends, [1]), ends])
    start = b.call(aten.select.int, starts, 0, first)
    return start, b.call(aten.sub.Tensor, mine, start)


def _of_groups(b: Builder, local: LocalCall, *args: Any) -> fx.Node:
    """The op over this rank's groups, with its even share of the rows to multiply."""
    made = b.call(local.call.target, *args, **local.kwargs)
    ranks = math.prod(local.mesh_shape[axis] for axis in local.axes_of("expert"))
    made.meta["flops_share"] = 1.0 / ranks
    return made


@lowering("transformers.grouped_mm_fallback.default")
def lower_grouped_mm(b: Builder, local: LocalCall) -> fx.Node:
    """The op leaves 0 in rows behind the last group."""
    if not local.axes_of("expert"):
        return b.call(local.call.target, *local.args)
    start, ends = _local_groups(b, local)
    x = _rolled(b, local.args[0], start)
    y = _of_groups(b, local, x, local.args[1], ends)
    return _rolled(b, y, b.call(aten.neg.default, start))


@lowering("transformers.grouped_mm_fallback_backward.default")
def lower_grouped_mm_backward(b: Builder, local: LocalCall) -> fx.Node:
    if not local.axes_of("expert"):
        return b.call(local.call.target, *local.args)
    start, ends = _local_groups(b, local)
    x, grad = (_rolled(b, local.args[i], start) for i in (0, 3))
    both = _of_groups(b, local, x, local.args[1], ends, grad)
    rolled = _rolled(b, b.item(both, 0), b.call(aten.neg.default, start))
    return b.pack(rolled, b.item(both, 1))


def _dense(b: Builder, x: fx.Node) -> fx.Node:
    """The kernel takes rows or columns that lie behind each other, not slices of them."""
    value = b.value(x)
    return x if value.is_contiguous() or value.mT.is_contiguous() else b.contiguous(x)


@lowering(aten._grouped_mm.default)
def lower_native_grouped_mm(b: Builder, local: LocalCall) -> fx.Node:
    """The kernel leaves rows behind the last group as they were in memory."""
    x, other = (_dense(b, operand) for operand in local.args[:2])
    if not local.axes_of("expert"):
        return b.call(local.call.target, x, other, *local.args[2:], **local.kwargs)
    start, ends = _local_groups(b, local)
    if len(local.call.operands[1].shape) == 2:
        columns = _rolled(b, b.call(aten.transpose.int, x, 0, 1), start)
        x, other = b.call(aten.transpose.int, columns, 0, 1), _rolled(b, other, start)
        return _of_groups(b, local, x, other, ends)
    y = _of_groups(b, local, _rolled(b, x, start), other, ends)
    rows = b.call(aten.arange.default, b.shape(y)[0], dtype=torch.int64, device=b.device)
    mine = b.call(aten.lt.Tensor, rows, b.call(aten.select.int, ends, 0, -1))
    y = b.call(aten.where.ScalarOther, b.call(aten.unsqueeze.default, mine, 1), y, 0.0)
    return _rolled(b, y, b.call(aten.neg.default, start))
