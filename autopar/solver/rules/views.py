"""Ops that move elements without computing: views, permutations, expansion, repetition.

All are linear in their one operand, so a Partial passes through each of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from autopar.core.placement import Placement, Shard
from autopar.core.strategy import AxisStrategy, OpCall
from autopar.solver.rules.dims import dim_names, one_dim, runs_below, several_dims
from autopar.solver.rules.labels import by_labels, linear_rows, replicated
from autopar.solver.rules.registry import combination, facts, rule

aten = torch.ops.aten

_MAX_STRIDED_RANK = 3  # strided rows serve fused weights and activations, not everything


def _moved(
    call: OpCall, inputs: Sequence[str | None], outputs: Sequence[str | None]
) -> list[AxisStrategy]:
    return by_labels(call, [inputs], [outputs]) + linear_rows(call, [(0,)])


def _groups(
    source: Sequence[int], result: Sequence[int]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Smallest runs of dims with equal products on both sides; dims of size 1 are left out."""
    a = [i for i, size in enumerate(source) if size != 1]
    b = [i for i, size in enumerate(result) if size != 1]
    groups = []
    while a and b:
        left, right = [a.pop(0)], [b.pop(0)]
        num_left, num_right = source[left[0]], result[right[0]]
        while num_left != num_right:
            if num_left < num_right:
                left.append(a.pop(0))
                num_left *= source[left[-1]]
            else:
                right.append(b.pop(0))
                num_right *= result[right[-1]]
        groups.append((tuple(left), tuple(right)))
    return groups


def _inner_shards(
    whole: int, parts: Sequence[int], sizes: Sequence[int]
) -> list[tuple[Placement, Placement]]:
    """`(placement of the flat dim, of the part)` for all parts but the leftmost."""
    return [
        (Shard(whole, math.prod(sizes[p] for p in parts[:i])), Shard(part))
        for i, part in enumerate(parts)
        if i > 0
    ]


@rule(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
@rule(aten._reshape_alias.default, aten.view_copy.default)
def view_rule(call: OpCall) -> list[AxisStrategy]:
    """Shards of the leftmost dim of a group stay contiguous; inner ones become strided shards."""
    source, result = call.operands[0].shape, call.outputs[0].shape
    rows = [replicated(call)]
    if 0 in source:
        return rows + linear_rows(call, [(0,)])
    for left, right in _groups(source, result):
        rows.append(AxisStrategy((Shard(left[0]),), (Shard(right[0]),)))
        if len(left) == 1 and len(source) <= _MAX_STRIDED_RANK:
            for flat, part in _inner_shards(left[0], right, result):
                rows.append(AxisStrategy((flat,), (part,)))
        if len(right) == 1 and len(result) <= _MAX_STRIDED_RANK:
            for flat, part in _inner_shards(right[0], left, source):
                rows.append(AxisStrategy((part,), (flat,)))
    return rows + linear_rows(call, [(0,)])


@rule(aten.permute.default)
def permute_rule(call: OpCall) -> list[AxisStrategy]:
    names = dim_names(call.operands[0])
    order = [one_dim(d, len(names)) for d in call.arg(1, "dims")]
    return _moved(call, names, [names[d] for d in order])


@rule(aten.transpose.int)
def transpose_rule(call: OpCall) -> list[AxisStrategy]:
    names = dim_names(call.operands[0])
    result = list(names)
    if names:
        a, b = (one_dim(call.arg(i, f"dim{i - 1}"), len(names)) for i in (1, 2))
        result[a], result[b] = result[b], result[a]
    return _moved(call, names, result)


@rule(aten.t.default)
def t_rule(call: OpCall) -> list[AxisStrategy]:
    names = dim_names(call.operands[0])
    rows = _moved(call, names, names[::-1])
    runs = runs_below(call)
    if runs > 1:
        rows.append(AxisStrategy((Shard(0, runs),), (Shard(1, runs),)))
    return rows


facts(aten.t.default)(runs_below)


@rule(aten.unsqueeze.default)
def unsqueeze_rule(call: OpCall) -> list[AxisStrategy]:
    names = dim_names(call.operands[0])
    result = list(names)
    result.insert(one_dim(call.arg(1, "dim"), len(names) + 1), None)
    return _moved(call, names, result)


@rule(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def squeeze_rule(call: OpCall) -> list[AxisStrategy]:
    """Which dims go is decided by the global sizes; the lowering keeps a local size of 1."""
    names = dim_names(call.operands[0])
    dropped = squeezed_dims(call)
    return _moved(call, names, [n for i, n in enumerate(names) if i not in dropped])


def squeezed_dims(call: OpCall) -> list[int]:
    """Dims that a squeeze drops."""
    shape = call.operands[0].shape
    chosen: Sequence[int] = range(len(shape))
    if call.target is not aten.squeeze.default:
        dims = call.arg(1, "dim")
        chosen = several_dims(dims, len(shape)) if isinstance(dims, int) or dims else ()
    return [d for d in chosen if d < len(shape) and shape[d] == 1]


@rule(aten.expand.default)
def expand_rule(call: OpCall) -> list[AxisStrategy]:
    """A dim that is expanded may be sharded at no cost: each rank expands to fewer copies."""
    source, result = call.operands[0].shape, call.outputs[0].shape
    names = dim_names(call.outputs[0])
    shift = len(result) - len(source)
    inputs = [
        names[shift + i] if size == result[shift + i] else None for i, size in enumerate(source)
    ]
    return _moved(call, inputs, names)


@rule(aten.repeat.default)
def repeat_rule(call: OpCall) -> list[AxisStrategy]:
    """A repeated dim is sharded as an expanded one is: each rank makes some of the copies."""
    counts = call.arg(1, "repeats")
    whole = {i for i, count in enumerate(counts) if count != 1 and count % call.axis_size}
    names = dim_names(call.outputs[0], whole)
    inputs = [None if count != 1 else name for count, name in zip(counts, names, strict=True)]
    return _moved(call, inputs[len(names) - len(call.operands[0].shape) :], names)


@combination(aten.repeat.default)
def whole_copies(call: OpCall, rows: Sequence[AxisStrategy], mesh: Sequence[int]) -> bool:
    """Axes that share a repeated dim divide the number of copies, not only the dim."""
    counts = call.arg(1, "repeats")
    made = [1] * len(counts)
    for row, size in zip(rows, mesh, strict=True):
        if row.outputs[0].is_shard and row.inputs[0].is_replicate:
            made[row.outputs[0].dim] *= size
    return all(count % num == 0 for count, num in zip(counts, made, strict=True))


@rule(aten.flip.default)
def flip_rule(call: OpCall) -> list[AxisStrategy]:
    dims = call.arg(1, "dims")
    flipped = several_dims(dims, len(call.operands[0].shape)) if dims else ()
    names = dim_names(call.operands[0], flipped)
    return _moved(call, names, names)


@rule(aten.roll.default)
def roll_rule(call: OpCall) -> list[AxisStrategy]:
    """Without dims the flattened tensor is rolled, so every dim is touched."""
    names = dim_names(
        call.operands[0], several_dims(call.arg(2, "dims"), len(call.operands[0].shape))
    )
    return _moved(call, names, names)


@rule(aten.diagonal.default, aten.diagonal_copy.default)
def diagonal_rule(call: OpCall) -> list[AxisStrategy]:
    rank = len(call.operands[0].shape)
    pair = {one_dim(call.arg(2, "dim1", 0), rank), one_dim(call.arg(3, "dim2", 1), rank)}
    names = dim_names(call.operands[0], pair)
    return _moved(call, names, [*(n for i, n in enumerate(names) if i not in pair), None])


@rule(aten.diag_embed.default)
def diag_embed_rule(call: OpCall) -> list[AxisStrategy]:
    rank = len(call.outputs[0].shape)
    pair = {one_dim(call.arg(2, "dim1", -2), rank), one_dim(call.arg(3, "dim2", -1), rank)}
    names = dim_names(call.outputs[0], pair)
    return _moved(call, [*(n for i, n in enumerate(names) if i not in pair), None], names)


@rule(aten.unfold.default)
def unfold_rule(call: OpCall) -> list[AxisStrategy]:
    rank = len(call.operands[0].shape)
    names = dim_names(call.operands[0], {one_dim(call.arg(1, "dimension"), rank)})
    return _moved(call, names, [*names, None] if rank else [None])


@rule(aten.view_as_real.default)
def view_as_real_rule(call: OpCall) -> list[AxisStrategy]:
    names = dim_names(call.operands[0])
    return _moved(call, names, [*names, None])


@rule(aten.view_as_complex.default)
def view_as_complex_rule(call: OpCall) -> list[AxisStrategy]:
    names = dim_names(call.outputs[0])
    return _moved(call, [*names, None], names)


@rule(aten.as_strided.default)
def as_strided_rule(call: OpCall) -> list[AxisStrategy]:
    """Strides speak of the whole storage, so only the whole tensor will do."""
    return [replicated(call), *linear_rows(call, [(0,)])]
