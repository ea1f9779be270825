"""Reductions, scans, softmax and order statistics.

Sums over a sharded dim leave a Partial; every other op here needs its dims whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopar.core.placement import Partial, Shard
from autopar.core.strategy import AxisStrategy, OpCall
from autopar.solver.rules.dims import Names, dim_names, one_dim, runs_below, several_dims, without
from autopar.solver.rules.labels import by_labels, linear_rows, replicated
from autopar.solver.rules.registry import facts, rule

aten = torch.ops.aten


def _kept(names: Names, dims: Sequence[int], keepdim: bool) -> Names:
    """Names of the result of a reduction over `dims`."""
    if keepdim:
        return [None if i in dims else name for i, name in enumerate(names)]
    return without(names, dims)


def _reduced(call: OpCall, dims: Sequence[int], keepdim: bool) -> list[AxisStrategy]:
    """Rows of a reduction that needs `dims` whole."""
    names = dim_names(call.operands[0], dims)
    result = _kept(names, dims, keepdim)
    return by_labels(call, [names], [result for _ in call.outputs])


def _scanned(call: OpCall, dim: int) -> list[AxisStrategy]:
    """Rows of an op that works along `dim` and keeps the other dims, on operands of one shape."""
    names = dim_names(call.operands[0], {one_dim(dim, len(call.operands[0].shape))})
    return by_labels(call, [names for _ in call.operands], [names for _ in call.outputs])


def _summed(call: OpCall, dims: Sequence[int], keepdim: bool) -> list[AxisStrategy]:
    names = dim_names(call.operands[0])
    result = _kept(names, dims, keepdim)
    over = [name for i in dims if i < len(names) and (name := names[i]) is not None]
    return by_labels(call, [names], [result], summed=over)


def _rank(call: OpCall) -> int:
    return len(call.operands[0].shape)


@rule(aten.sum.default, aten.sum.dim_IntList)
def sum_rule(call: OpCall) -> list[AxisStrategy]:
    whole = call.target is aten.sum.default
    dims = several_dims(None if whole else call.arg(1, "dim"), _rank(call))
    keepdim = not whole and bool(call.arg(2, "keepdim", False))
    rows = _summed(call, dims, keepdim) + linear_rows(call, [(0,)])
    runs = runs_below(call)
    if runs > 1 and dims == (0,):
        rows.append(AxisStrategy((Shard(0, runs),), (Partial(),)))
    return rows


facts(aten.sum.default, aten.sum.dim_IntList)(runs_below)


@rule(aten.nansum.default)
def nansum_rule(call: OpCall) -> list[AxisStrategy]:
    """Not linear: a NaN in one summand drops that summand only."""
    dims = several_dims(call.arg(1, "dim"), _rank(call))
    return _summed(call, dims, bool(call.arg(2, "keepdim", False)))


@rule(aten.count_nonzero.default, aten.count_nonzero.dim_IntList)
def count_nonzero_rule(call: OpCall) -> list[AxisStrategy]:
    return _summed(call, several_dims(call.arg(1, "dim"), _rank(call)), False)


@rule(aten.mean.default, aten.mean.dim)
def mean_rule(call: OpCall) -> list[AxisStrategy]:
    """A local mean divides by the local count, so the reduced dims stay whole."""
    whole = call.target is aten.mean.default
    dims = several_dims(None if whole else call.arg(1, "dim"), _rank(call))
    keepdim = not whole and bool(call.arg(2, "keepdim", False))
    return _reduced(call, dims, keepdim) + linear_rows(call, [(0,)])


@rule(
    aten.max.default,
    aten.min.default,
    aten.any.default,
    aten.all.default,
    aten.prod.default,
    aten.median.default,
    aten.nanmedian.default,
    aten.std.default,
    aten.var.default,
    aten.histc.default,
)
def whole_rule(call: OpCall) -> list[AxisStrategy]:
    """Needs the whole tensor."""
    return [replicated(call)]


@rule(aten.bincount.default)
def bincount_rule(call: OpCall) -> list[AxisStrategy]:
    return [replicated(call)]


@rule(
    aten.amax.default,
    aten.amin.default,
    aten.max.dim,
    aten.min.dim,
    aten.argmax.default,
    aten.argmin.default,
    aten.any.dim,
    aten.any.dims,
    aten.all.dim,
    aten.all.dims,
    aten.prod.dim_int,
    aten.logsumexp.default,
    aten.median.dim,
    aten.nanmedian.dim,
)
def reduction_rule(call: OpCall) -> list[AxisStrategy]:
    """Ops with the arguments `(self, dim, keepdim)`."""
    dims = several_dims(call.arg(1, "dim"), _rank(call))
    return _reduced(call, dims, bool(call.arg(2, "keepdim", False)))


@rule(aten.std.dim, aten.var.dim, aten.var_mean.dim, aten.std_mean.dim)
@rule(aten.linalg_vector_norm.default)
def unbiased_rule(call: OpCall) -> list[AxisStrategy]:
    """Ops with the arguments `(self, …, dim, …, keepdim)`; a norm has its order first."""
    norm = call.target is aten.linalg_vector_norm.default
    dims = several_dims(call.arg(2 if norm else 1, "dim"), _rank(call))
    return _reduced(call, dims, bool(call.arg(3, "keepdim", False)))


@rule(aten.std.correction, aten.var.correction, aten.var_mean.correction)
@rule(aten.std_mean.correction)
def correction_rule(call: OpCall) -> list[AxisStrategy]:
    dims = several_dims(call.arg(1, "dim"), _rank(call))
    return _reduced(call, dims, bool(call.kwargs.get("keepdim", False)))


@rule(aten.aminmax.default)
def aminmax_rule(call: OpCall) -> list[AxisStrategy]:
    dims = several_dims(call.kwargs.get("dim"), _rank(call))
    return _reduced(call, dims, bool(call.kwargs.get("keepdim", False)))


@rule(aten.kthvalue.default)
def kthvalue_rule(call: OpCall) -> list[AxisStrategy]:
    dims = several_dims(call.arg(2, "dim", -1), _rank(call))
    return _reduced(call, dims, bool(call.arg(3, "keepdim", False)))


@rule(aten.mode.default)
def mode_rule(call: OpCall) -> list[AxisStrategy]:
    dims = several_dims(call.arg(1, "dim", -1), _rank(call))
    return _reduced(call, dims, bool(call.arg(2, "keepdim", False)))


@rule(aten.cumsum.default)
def cumsum_rule(call: OpCall) -> list[AxisStrategy]:
    return _scanned(call, call.arg(1, "dim")) + linear_rows(call, [(0,)])


@rule(
    aten.cumprod.default,
    aten.cummax.default,
    aten.cummin.default,
    aten.logcumsumexp.default,
    aten._softmax.default,
    aten._log_softmax.default,
)
def scan_rule(call: OpCall) -> list[AxisStrategy]:
    return _scanned(call, call.arg(1, "dim"))


@rule(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def softmax_backward_rule(call: OpCall) -> list[AxisStrategy]:
    """Linear in the gradient, given the whole output."""
    return _scanned(call, call.arg(2, "dim")) + linear_rows(call, [(0,)])


@rule(aten.sort.default, aten.argsort.default)
def sort_rule(call: OpCall) -> list[AxisStrategy]:
    return _scanned(call, call.arg(1, "dim", -1))


@rule(aten.sort.stable, aten.argsort.stable)
def stable_sort_rule(call: OpCall) -> list[AxisStrategy]:
    """`stable` comes before `dim` in ATen's signature, as a keyword."""
    return _scanned(call, call.kwargs.get("dim", -1))


@rule(aten.topk.default)
def topk_rule(call: OpCall) -> list[AxisStrategy]:
    return _scanned(call, call.arg(2, "dim", -1))
