"""Embedding tables sharded by rows: look up what is here, 0 for the rest; partial sums.

Bags split over ranks all have as many indices, so what tells them apart is the same on each rank:
the first few of all offsets.
"""

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


def _first(b: Builder, x: fx.Node, count: int) -> fx.Node:
    return b.call(aten.slice.Tensor, x, 0, 0, count)


@lowering(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def lower_embedding_bag(b: Builder, local: LocalCall) -> fx.Node:
    """The bag of each index is told of all indices, as a share of them would begin at 0."""
    weight, indices, offsets, *rest = local.args
    if not local.axes_of("bags"):
        return b.call(local.call.target, *local.args, **local.kwargs)
    offsets = _first(b, offsets, local.output_shape()[0])
    found = b.call(local.call.target, weight, indices, offsets, *rest, **local.kwargs)
    out, bags, sizes, argmax = (b.item(found, i) for i in range(4))
    num_indices, num_bags = local.call.operands[1].shape[0], local.call.outputs[0].shape[0]
    if local.call.outputs[1].shape == (num_indices,):
        places = b.call(
            aten.arange.default, num_indices, dtype=b.value(bags).dtype, device=b.device
        )
        length = num_indices // num_bags
        bags = b.call(aten.div.Tensor_mode, places, length, rounding_mode="floor")
    return b.pack(out, bags, sizes, argmax)


@lowering(aten._embedding_bag_dense_backward.default)
def lower_embedding_bag_backward(b: Builder, local: LocalCall) -> fx.Node:
    grad, indices, bags, *rest = local.args
    if local.axes_of("bags"):
        bags = _first(b, bags, b.shape(indices)[0])
    return b.call(local.call.target, grad, indices, bags, *rest, **local.kwargs)


@lowering(aten._embedding_bag_per_sample_weights_backward.default)
def lower_embedding_bag_weights(b: Builder, local: LocalCall) -> fx.Node:
    grad, weight, indices, offsets, bags, *rest = local.args
    if local.axes_of("bags"):
        offsets = _first(b, offsets, b.shape(grad)[0])
        bags = _first(b, bags, b.shape(indices)[0])
    return b.call(local.call.target, grad, weight, indices, offsets, bags, *rest, **local.kwargs)
