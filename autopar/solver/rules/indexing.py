"""Indexing by tensors.

Dims that an op does not touch may be sharded. Where it adds into a result, several ranks may add
their share into a Partial. Ops whose winner is undefined for repeated indices pass no Partial:
two ranks may pick different winners, and the sum of their picks is neither.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopar.core.eager_calls import EAGER_CALL
from autopar.core.placement import Partial, Placement, Replicate, Shard
from autopar.core.strategy import AxisStrategy, OpCall
from autopar.solver.rules.dims import Names, dim_names, without
from autopar.solver.rules.labels import by_labels, linear_rows, replicated
from autopar.solver.rules.registry import rule
from autopar.solver.rules.slicing import dim_of

aten = torch.ops.aten


def _added_apart(call: OpCall, rest: Sequence[Placement]) -> list[AxisStrategy]:
    """Each rank adds what it has to its part of self: a summand, or a share of all of it.

    The share is a tensor of its own (`codegen/lowerings/indexing.py`).
    """
    outputs = (Partial(),)
    return [
        AxisStrategy((Partial(), *rest), outputs),
        AxisStrategy((Replicate(), *rest), outputs, "share", copied=(0,)),
    ]


# --- one index per element --------------------------------------------------------------------
def _aligned_names(call: OpCall, dim: int) -> Names:
    """Names of the dims other than `dim` along which all operands and outputs have one size.

    A shorter index speaks of the first elements of a dim, so that its shards do not line up.
    """
    specs = (*call.operands, *call.outputs)
    return [
        f"d{i}" if i != dim and len({spec.shape[i] for spec in specs}) == 1 else None
        for i in range(len(call.operands[0].shape))
    ]


def _with(names: Names, dim: int, name: str) -> Names:
    return [name if i == dim else n for i, n in enumerate(names)]


@rule(aten.gather.default)
def gather_rule(call: OpCall) -> list[AxisStrategy]:
    """Every index looks along the whole `dim`, so the index may be sharded there at will."""
    if not call.operands[0].shape or not call.operands[1].shape:
        return [replicated(call), *linear_rows(call, [(0,)])]
    dim = dim_of(call, 1)
    names = _aligned_names(call, dim)
    index = _with(names, dim, "i")
    return by_labels(call, [names, index], [index]) + linear_rows(call, [(0,)])


@rule(aten.take_along_dim.default)
def take_along_dim_rule(call: OpCall) -> list[AxisStrategy]:
    """As gather, save that dims of size 1 broadcast; without a dim both are flattened."""
    rows = [replicated(call), *linear_rows(call, [(0,)])]
    if call.arg(2, "dim") is None:
        return rows
    dim = dim_of(call, 2)
    names = _aligned_names(call, dim)
    index = _with(names, dim, "i")
    return by_labels(call, [names, index], [index]) + rows[1:]


@rule(aten.take.default)
def take_rule(call: OpCall) -> list[AxisStrategy]:
    index = dim_names(call.operands[1])
    whole = [None] * len(call.operands[0].shape)
    return by_labels(call, [whole, index], [index]) + linear_rows(call, [(0,)])


@rule(aten.scatter.src, aten.scatter.value)
def scatter_rule(call: OpCall) -> list[AxisStrategy]:
    if not call.operands[0].shape:
        return [replicated(call)]
    names = _aligned_names(call, dim_of(call, 1))
    return by_labels(call, [names for _ in call.operands], [names])


@rule(aten.scatter_add.default, aten.scatter_reduce.two)
def scatter_add_rule(call: OpCall) -> list[AxisStrategy]:
    """A sum may be spread over ranks: each adds its part of the source to its share of self."""
    if not call.operands[0].shape:
        return [replicated(call)]
    dim = dim_of(call, 1)
    names = _aligned_names(call, dim)
    rows = by_labels(call, [names, names, names], [names])
    if call.target is aten.scatter_reduce.two and (
        call.arg(4, "reduce") != "sum" or not call.kwargs.get("include_self", True)
    ):
        return rows
    rows += linear_rows(call, [(0, 2)])
    _, index, source = (spec.shape[dim] for spec in call.operands)
    if index == source:
        rows += _added_apart(call, (Shard(dim), Shard(dim)))
    return rows


# --- one index per row ------------------------------------------------------------------------
@rule(aten.index_select.default)
def index_select_rule(call: OpCall) -> list[AxisStrategy]:
    dim, index = dim_of(call, 1), call.operands[1].shape
    names = dim_names(call.operands[0], {dim})
    rows = by_labels(
        call, [names, ["i"] * len(index)], [_with(names, dim, "i") if index else names]
    )
    return rows + linear_rows(call, [(0,)])


@rule(aten.index_add.default)
def index_add_rule(call: OpCall) -> list[AxisStrategy]:
    dim, rank = dim_of(call, 1), len(call.operands[0].shape)
    index, source = call.operands[1].shape, call.operands[2].shape
    if len(source) != rank or not rank:
        return [replicated(call), *linear_rows(call, [(0, 2)])]
    names = dim_names(call.operands[0], {dim})
    rows = by_labels(call, [names, [None] * len(index), names], [names])
    rows += linear_rows(call, [(0, 2)])
    if index:
        rows += _added_apart(call, (Shard(0), Shard(dim)))
    return rows


@rule(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
@rule(aten.index_copy.default, aten.index_reduce.default)
def index_write_rule(call: OpCall) -> list[AxisStrategy]:
    """`(self, dim, index, value)`: the rows named by the index are written, whole."""
    rank = len(call.operands[0].shape)
    names = dim_names(call.operands[0], {dim_of(call, 1)})
    rest: list[Names] = [[None] * len(spec.shape) for spec in call.operands[1:]]
    if call.target in (aten.index_copy.default, aten.index_reduce.default):
        if len(call.operands[2].shape) != rank:
            return [replicated(call)]
        rest[1] = names
    return by_labels(call, [names, *rest], [names])


@rule(torch.ops.autopar.inverse_permutation.default)
def inverse_permutation_rule(call: OpCall) -> list[AxisStrategy]:
    """Every row may be anybody's; see `own_order` for what a rank alone has sorted."""
    return [replicated(call)]


@rule(EAGER_CALL)
def eager_call_rule(call: OpCall) -> list[AxisStrategy]:
    """Code of the model, which may put anything together."""
    return [replicated(call)]


# --- advanced indexing ------------------------------------------------------------------------
def _index_names(call: OpCall) -> tuple[Names, list[Names], Names] | None:
    """Names of self, of each index tensor, and of `self[indices]`; None for boolean masks.

    Index tensors broadcast together. Their dims stand where the indexed dims were if those are
    adjacent, and in front if not.
    """
    given = call.arg(1, "indices")
    places = [i for i, index in enumerate(given) if index is not None]
    specs = call.operands[1 : 1 + len(places)]
    if any(spec.dtype in (torch.bool, torch.uint8) for spec in specs):
        return None
    shape = torch.broadcast_shapes(*(spec.shape for spec in specs))
    batch: Names = [f"i{j}" for j in range(len(shape))]
    indices: list[Names] = [
        [
            name if size == full else None
            for name, size, full in zip(
                batch[len(shape) - len(spec.shape) :],
                spec.shape,
                shape[len(shape) - len(spec.shape) :],
                strict=True,
            )
        ]
        for spec in specs
    ]
    names = dim_names(call.operands[0], set(places))
    adjacent = places == list(range(places[0], places[0] + len(places)))
    front = places[0] if adjacent else 0
    kept = without(names, set(places))
    return names, indices, [*kept[:front], *batch, *kept[front:]]


@rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def index_rule(call: OpCall) -> list[AxisStrategy]:
    named = _index_names(call)
    if named is None:
        return [replicated(call), *linear_rows(call, [(0,)])]
    names, indices, result = named
    return by_labels(call, [names, *indices], [result]) + linear_rows(call, [(0,)])


@rule(aten.index_put.default, aten._unsafe_index_put.default)
def index_put_rule(call: OpCall) -> list[AxisStrategy]:
    """With `accumulate`, ranks that hold some of the indices add into a Partial."""
    accumulate = bool(call.arg(3, "accumulate", False))
    last = len(call.operands) - 1
    sums = linear_rows(call, [(0, last)]) if accumulate else []
    named = _index_names(call)
    if named is None:
        return [replicated(call), *sums]
    names, indices, result = named
    picked = _picked_shape(call, indices, result)
    values = _broadcast_names(result, picked, call.operands[last].shape)
    whole: list[Names] = [[None] * len(spec.shape) for spec in call.operands[1:last]]
    kept = [name if name in names else None for name in values]
    rows = by_labels(call, [names, *whole, kept], [names]) + sums
    if not accumulate:
        return rows
    for name in (n for n in result if n is not None and n not in names):
        held = (*indices, values)
        rows += _added_apart(
            call, [Shard(x.index(name)) if name in x else Replicate() for x in held]
        )
    return rows


def _picked_shape(call: OpCall, indices: list[Names], result: Names) -> list[int]:
    """Shape of `self[indices]`, from the names of its dims."""
    sizes: dict[str | None, int] = {}
    source = call.operands[0].shape
    for spec, labels in zip(call.operands[1:], indices, strict=False):
        sizes.update(zip(labels, spec.shape, strict=True))
    return [
        source[int(name[1:])] if name is not None and name[0] == "d" else sizes.get(name, 1)
        for name in result
    ]


def _broadcast_names(names: Names, full: Sequence[int], shape: Sequence[int]) -> Names:
    """Names of a tensor that broadcasts to dims `names` of sizes `full`."""
    shift = len(full) - len(shape)
    return [
        names[shift + i] if shift + i >= 0 and size == full[shift + i] else None
        for i, size in enumerate(shape)
    ]
