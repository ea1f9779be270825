"""Slicing, splitting, joining and padding: dims that an op does not touch may be sharded."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopar.core.placement import Shard
from autopar.core.strategy import AxisStrategy, OpCall
from autopar.solver.rules.dims import dim_names, one_dim, without
from autopar.solver.rules.labels import by_labels, linear_rows
from autopar.solver.rules.registry import rule

__all__ = ["dim_of"]

aten = torch.ops.aten


def _moved(
    call: OpCall, inputs: Sequence[str | None], outputs: Sequence[str | None]
) -> list[AxisStrategy]:
    """Rows of an op with one operand, linear in it."""
    rows = by_labels(call, [inputs], [outputs for _ in call.outputs])
    return rows + linear_rows(call, [(0,)])


def dim_of(call: OpCall, position: int, default: int = 0) -> int:
    """The dim argument, counted from the front."""
    return one_dim(call.arg(position, "dim", default), len(call.operands[0].shape))


# --- parts of a tensor ------------------------------------------------------------------------
def _aligned_run(whole: int, start: int, length: int, step: int) -> int:
    """Into how many runs a slice cuts its dim, if it is one of equal runs; else 0."""
    if step != 1 or not length or whole % length or start % length:
        return 0
    return whole // length


@rule(aten.slice.Tensor)
def slice_rule(call: OpCall) -> list[AxisStrategy]:
    """One of `k` equal runs (Q of a fused QKV) may also be cut out of each of `k` shards."""
    dim, source, result = dim_of(call, 1), call.operands[0].shape, call.outputs[0].shape
    names = dim_names(call.operands[0], () if source == result else {dim})
    rows = _moved(call, names, names)
    start = slice(call.arg(2, "start"), None).indices(source[dim])[0]
    runs = _aligned_run(source[dim], start, result[dim], call.arg(4, "step", 1))
    if runs > 1:
        rows.append(AxisStrategy((Shard(dim, runs),), (Shard(dim),)))
    return rows


@rule(aten.slice_backward.default)
def slice_backward_rule(call: OpCall) -> list[AxisStrategy]:
    dim, grad, result = dim_of(call, 2), call.operands[0].shape, call.outputs[0].shape
    names = dim_names(call.operands[0], () if grad == result else {dim})
    rows = _moved(call, names, names)
    start = slice(call.arg(3, "start"), None).indices(result[dim])[0]
    runs = _aligned_run(result[dim], start, grad[dim], call.arg(5, "step", 1))
    if runs > 1:
        rows.append(AxisStrategy((Shard(dim),), (Shard(dim, runs),)))
    return rows


@rule(aten.slice_scatter.default)
def slice_scatter_rule(call: OpCall) -> list[AxisStrategy]:
    names = dim_names(call.operands[0], {dim_of(call, 2)})
    return by_labels(call, [names, names], [names]) + linear_rows(call, [(0, 1)])


@rule(aten.select.int)
def select_rule(call: OpCall) -> list[AxisStrategy]:
    dim = dim_of(call, 1)
    names = dim_names(call.operands[0], {dim})
    return _moved(call, names, without(names, {dim}))


@rule(aten.select_backward.default)
def select_backward_rule(call: OpCall) -> list[AxisStrategy]:
    dim = one_dim(call.arg(2, "dim"), len(call.outputs[0].shape))
    names = dim_names(call.outputs[0], {dim})
    return _moved(call, without(names, {dim}), names)


@rule(aten.select_scatter.default)
def select_scatter_rule(call: OpCall) -> list[AxisStrategy]:
    dim = dim_of(call, 2)
    names = dim_names(call.operands[0], {dim})
    rows = by_labels(call, [names, without(names, {dim})], [names])
    return rows + linear_rows(call, [(0, 1)])


@rule(aten.diagonal_scatter.default)
def diagonal_scatter_rule(call: OpCall) -> list[AxisStrategy]:
    rank = len(call.operands[0].shape)
    pair = {one_dim(call.arg(3, "dim1", 0), rank), one_dim(call.arg(4, "dim2", 1), rank)}
    names = dim_names(call.operands[0], pair)
    rows = by_labels(call, [names, [*without(names, pair), None]], [names])
    return rows + linear_rows(call, [(0, 1)])


@rule(aten.narrow.default, aten.narrow_copy.default)
def narrow_rule(call: OpCall) -> list[AxisStrategy]:
    names = dim_names(call.operands[0], {dim_of(call, 1)})
    return _moved(call, names, names)


@rule(aten.unfold_backward.default)
def unfold_backward_rule(call: OpCall) -> list[AxisStrategy]:
    names = dim_names(call.outputs[0], {one_dim(call.arg(2, "dim"), len(call.outputs[0].shape))})
    return _moved(call, [*names, None], names)


@rule(aten.diagonal_backward.default)
def diagonal_backward_rule(call: OpCall) -> list[AxisStrategy]:
    rank = len(call.outputs[0].shape)
    pair = {one_dim(call.arg(3, "dim1"), rank), one_dim(call.arg(4, "dim2"), rank)}
    names = dim_names(call.outputs[0], pair)
    return _moved(call, [*without(names, pair), None], names)


@rule(aten.split.Tensor, aten.unsafe_split.Tensor, aten.chunk.default)
@rule(aten.split_with_sizes.default, aten.unsafe_split_with_sizes.default)
def split_rule(call: OpCall) -> list[AxisStrategy]:
    """Equal parts may all be sharded, each inside itself: the fused operand is then strided."""
    dim, parts = dim_of(call, 2), len(call.outputs)
    names = dim_names(call.operands[0], {dim})
    rows = _moved(call, names, names)
    if parts > 1 and len({spec.shape for spec in call.outputs}) == 1:
        rows.append(AxisStrategy((Shard(dim, parts),), (Shard(dim),) * parts))
    return rows


@rule(aten.unbind.int)
def unbind_rule(call: OpCall) -> list[AxisStrategy]:
    dim = dim_of(call, 1)
    names = dim_names(call.operands[0], {dim})
    return _moved(call, names, without(names, {dim}))


# --- joining and padding ----------------------------------------------------------------------
@rule(aten.cat.default)
def cat_rule(call: OpCall) -> list[AxisStrategy]:
    """Equal parts sharded along the joined dim make a strided whole, the reverse of a split."""
    rank = len(call.outputs[0].shape)
    dim = one_dim(call.arg(1, "dim", 0), rank)
    names = dim_names(call.outputs[0], {dim})
    # ATen skips an empty 1-D tensor whatever the rank of the others
    inputs = [names if len(spec.shape) == rank else [None] for spec in call.operands]
    num = len(call.operands)
    rows = by_labels(call, inputs, [names]) + linear_rows(call, [range(num)])
    if num > 1 and len({spec.shape for spec in call.operands}) == 1:
        rows.append(AxisStrategy((Shard(dim),) * num, (Shard(dim, num),)))
    return rows


@rule(aten.stack.default)
def stack_rule(call: OpCall) -> list[AxisStrategy]:
    dim = one_dim(call.arg(1, "dim", 0), len(call.outputs[0].shape))
    names = dim_names(call.outputs[0], {dim})
    rows = by_labels(call, [without(names, {dim})] * len(call.operands), [names])
    return rows + linear_rows(call, [range(len(call.operands))])


@rule(aten.constant_pad_nd.default)
def pad_rule(call: OpCall) -> list[AxisStrategy]:
    pad, rank = call.arg(1, "pad"), len(call.operands[0].shape)
    padded = {rank - 1 - i // 2 for i, amount in enumerate(pad) if amount}
    names = dim_names(call.operands[0], padded)
    rows = by_labels(call, [names], [names])
    return rows + linear_rows(call, [(0,)]) if call.arg(2, "value", 0) == 0 else rows


@rule(aten.tril.default, aten.triu.default)
def triangle_rule(call: OpCall) -> list[AxisStrategy]:
    rank = len(call.operands[0].shape)
    names = dim_names(call.operands[0], {rank - 1, rank - 2})
    return _moved(call, names, names)


@rule(aten.lift.default, aten.lift_fresh.default, aten.lift_fresh_copy.default)
def lift_rule(call: OpCall) -> list[AxisStrategy]:
    names = dim_names(call.operands[0])
    return _moved(call, names, names)
