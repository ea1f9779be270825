"""Embedding tables sharded by rows: look up what is here, 0 for the rest; partial sums."""

from __future__ import annotations

import torch
from torch import fx

from autopar.codegen.builder import Builder
from autopar.codegen.lowering import LocalCall, lowering

aten = torch.ops.aten


def _local_rows(b: Builder, indices: fx.Node, start: int, count: int) -> tuple[fx.Node, fx.Node]:
    """Indices relative to this rank's rows, and which of them lie outside."""
    index = b.call(aten.sub.Tensor, indices, start)
    outside = b.call(
        aten.logical_or.default,
        b.call(aten.lt.Scalar, index, 0),
        b.call(aten.ge.Scalar, index, count),
    )
    return index, outside


@lowering(aten.embedding.default)
def lower_embedding(b: Builder, local: LocalCall) -> fx.Node:
    """`padding_idx` and the frequencies matter to the gradient only, which is an op of its own."""
    weight, indices = local.args[:2]
    if not local.axes_of("vocab"):
        return b.call(aten.embedding.default, weight, indices)
    start = local.offset(b, local.inputs[0], local.call.operands[0].shape)[0]
    index, outside = _local_rows(b, indices, start, b.shape(weight)[0])
    index = b.call(aten.masked_fill.Scalar, index, outside, 0)
    out = b.call(aten.embedding.default, weight, index)
    return b.call(aten.masked_fill.Scalar, out, b.call(aten.unsqueeze.default, outside, -1), 0.0)


@lowering(aten.embedding_dense_backward.default)
def lower_embedding_backward(b: Builder, local: LocalCall) -> fx.Node:
    """Gradients of other ranks' rows, and of the padding row, go to a spare row, cut off."""
    grad, indices, _, padding_idx, by_frequency = local.args
    if not local.axes_of("vocab"):
        return b.call(local.call.target, *local.args, **local.kwargs)
    start = local.offset(b, local.outputs[0], local.call.outputs[0].shape)[0]
    count = local.output_shape()[0]
    index, outside = _local_rows(b, indices, start, count)
    if padding_idx >= 0:
        padding = b.call(aten.eq.Scalar, indices, padding_idx)
        outside = b.call(aten.logical_or.default, outside, padding)
    index = b.call(aten.masked_fill.Scalar, index, outside, count)
    out = b.call(aten.embedding_dense_backward.default, grad, index, count + 1, count, by_frequency)
    return b.call(aten.slice.Tensor, out, 0, 0, count)
