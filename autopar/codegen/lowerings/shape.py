"""Ops whose arguments hold sizes or positions of dims that may be sharded, in local sizes.

Every view becomes a reshape: a local tensor that came out of a collective or a slice need not have
the strides with which the traced view was possible.
"""

from __future__ import annotations

import torch
from torch import fx

from autopar.codegen.builder import Builder
from autopar.codegen.lowering import LocalCall, lowering
from autopar.core.placement import local_shape
from autopar.errors import ShardingError

aten = torch.ops.aten


def _source_shape(local: LocalCall) -> list[int]:
    """Local shape of the first operand."""
    shape = local.call.operands[0].shape
    return list(local_shape(shape, local.inputs[0], local.mesh_shape))


@lowering(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
@lowering(aten._reshape_alias.default, aten.view_copy.default)
def lower_view(b: Builder, local: LocalCall) -> fx.Node:
    return b.call(aten.reshape.default, local.args[0], local.output_shape())


@lowering(aten.expand.default)
def lower_expand(b: Builder, local: LocalCall) -> fx.Node:
    return b.call(aten.expand.default, local.args[0], local.output_shape())


@lowering(aten.repeat.default)
def lower_repeat(b: Builder, local: LocalCall) -> fx.Node:
    """Of a repeated dim that is sharded, this rank makes some of the copies."""
    counts = [
        count * held // whole if count != 1 and whole else count
        for count, held, whole in zip(
            local.call.arg(1, "repeats"),
            local.output_shape(),
            local.call.outputs[0].shape,
            strict=True,
        )
    ]
    return b.call(aten.repeat.default, local.args[0], counts)


@lowering(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def lower_squeeze(b: Builder, local: LocalCall) -> fx.Node:
    """Drops the dims of global size 1: a shard of size 1 stays a dim."""
    shape = local.call.operands[0].shape
    rank = len(shape)
    chosen = list(range(rank))
    if local.call.target is not aten.squeeze.default:
        dims = local.call.arg(1, "dim")
        given = [dims] if isinstance(dims, int) else dims
        chosen = [d % rank for d in given] if rank else []
    dropped = [d for d in chosen if shape[d] == 1]
    return b.call(aten.squeeze.dims, local.args[0], dropped)


@lowering(aten.as_strided.default)
def lower_as_strided(b: Builder, local: LocalCall) -> fx.Node:
    """Gives the whole tensor the strides that it was traced with, which the op speaks of."""
    traced = local.call.nodes[0].meta["val"]
    if traced.storage_offset():
        raise ShardingError(
            f"as_strided on a view that begins at element {traced.storage_offset()} of its "
            "storage cannot be said of one tensor. Write it with slices and views."
        )
    x = b.dense(local.args[0])
    if not traced.is_contiguous():
        blank = b.call(aten.new_empty_strided.default, x, list(traced.shape), list(traced.stride()))
        x = b.call(aten.copy.default, blank, x)
    return b.call(aten.as_strided.default, x, *local.args[1:], **local.kwargs)


# --- slices -----------------------------------------------------------------------------------
@lowering(aten.slice.Tensor)
def lower_slice(b: Builder, local: LocalCall) -> fx.Node:
    """A sliced dim is sharded either where all of it is taken or inside each of its runs."""
    dim = local.call.arg(1, "dim", 0) % len(local.call.operands[0].shape)
    whole, held = local.call.operands[0].shape[dim], _source_shape(local)[dim]
    if whole == held:
        return b.call(aten.slice.Tensor, *local.args, **local.kwargs)
    start = slice(local.call.arg(2, "start"), None).indices(whole)[0] * held // whole
    stop = start + local.output_shape()[dim]
    return b.call(aten.slice.Tensor, local.args[0], dim, start, stop)


@lowering(aten.slice_backward.default)
def lower_slice_backward(b: Builder, local: LocalCall) -> fx.Node:
    sizes, shape = local.output_shape(), local.call.outputs[0].shape
    dim = local.call.arg(2, "dim") % len(shape)
    start, end, step = (local.call.arg(i) for i in (3, 4, 5))
    if sizes[dim] != shape[dim]:
        start = slice(start, None).indices(shape[dim])[0] * sizes[dim] // shape[dim]
        end = start + _source_shape(local)[dim]
    return b.call(aten.slice_backward.default, local.args[0], sizes, dim, start, end, step)


@lowering(
    aten.select_backward.default,
    aten.unfold_backward.default,
    aten.diagonal_backward.default,
)
def lower_sized_backward(b: Builder, local: LocalCall) -> fx.Node:
    """`(grad, input_sizes, …)`."""
    return b.call(local.call.target, local.args[0], local.output_shape(), *local.args[2:])


@lowering(aten.split.Tensor, aten.unsafe_split.Tensor, aten.chunk.default)
@lowering(aten.split_with_sizes.default, aten.unsafe_split_with_sizes.default)
def lower_split(b: Builder, local: LocalCall) -> fx.Node:
    dim = local.call.arg(2, "dim", 0) % len(local.call.operands[0].shape)
    sizes = [local.output_shape(i)[dim] for i in range(len(local.call.outputs))]
    return b.call(aten.split_with_sizes.default, local.args[0], sizes, dim)
