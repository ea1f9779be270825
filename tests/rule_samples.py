"""One or more calls of every op that a rule of shapes, reductions, indexing or factories covers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.bruteforce import Sample

aten = torch.ops.aten
Maker = Callable[[], Tensor]


def rand(*shape: int) -> Maker:
    """Normal numbers in float64."""
    return lambda: torch.randn(shape, dtype=torch.float64)


def ints(high: int, *shape: int) -> Maker:
    """Integers from 0 up to but not including `high`."""
    return lambda: torch.randint(0, high, shape)


def bools(*shape: int) -> Maker:
    return lambda: torch.rand(shape) > 0.5


def perm(size: int) -> Maker:
    """Indices that do not repeat."""
    return lambda: torch.randperm(size)


def case(name: str, function: Callable[..., Any], *makers: Maker) -> Sample:
    return Sample(name, function, lambda: tuple(make() for make in makers))


VIEWS = [
    case("view_flatten", lambda x: aten.view.default(x, [4, 32]), rand(4, 4, 8)),
    case("view_split", lambda x: aten.view.default(x, [4, 8, 4]), rand(4, 32)),
    case("view_split_inferred", lambda x: aten.view.default(x, [4, -1, 4]), rand(4, 32)),
    case("view_qkv", lambda x: aten.view.default(x, [4, 3, 4, 2]), rand(4, 24)),
    case("view_qkv_deep", lambda x: aten.view.default(x, [2, 4, 3, 4, 2]), rand(2, 4, 24)),
    case("view_two_groups", lambda x: aten.view.default(x, [16, 24]), rand(4, 4, 8, 3)),
    case("view_regroup", lambda x: aten.view.default(x, [4, 4, 6]), rand(8, 12)),
    case("view_ones", lambda x: aten.view.default(x, [1, 8, 1, 4]), rand(8, 1, 4)),
    case("view_to_scalar", lambda x: aten.view.default(x, []), rand(1, 1)),
    case("view_uneven", lambda x: aten.view.default(x, [15, 2]), rand(3, 5, 2)),
    case("view_outer_uneven", lambda x: aten.view.default(x, [6, 4]), rand(24)),
    case("unsafe_view", lambda x: aten._unsafe_view.default(x, [8, 8]), rand(4, 2, 8)),
    case("reshape", lambda x: aten.reshape.default(x, [8, 8]), rand(4, 2, 8)),
    case("reshape_alias", lambda x: aten._reshape_alias.default(x, [8, 8], [8, 1]), rand(4, 2, 8)),
    case("view_copy", lambda x: aten.view_copy.default(x, [8, 8]), rand(4, 2, 8)),
    case("permute", lambda x: aten.permute.default(x, [2, 0, -2]), rand(4, 3, 8)),
    case("transpose", lambda x: aten.transpose.int(x, 0, -1), rand(4, 3, 8)),
    case("t", lambda x: aten.t.default(x), rand(4, 8)),
    case("t_1d", lambda x: aten.t.default(x), rand(4)),
    case("unsqueeze", lambda x: aten.unsqueeze.default(x, -1), rand(4, 8)),
    case("unsqueeze_mid", lambda x: aten.unsqueeze.default(x, 1), rand(4, 8)),
    case("squeeze", lambda x: aten.squeeze.default(x), rand(1, 4, 1, 2)),
    case("squeeze_nothing", lambda x: aten.squeeze.default(x), rand(4, 2)),
    case("squeeze_dim", lambda x: aten.squeeze.dim(x, 1), rand(4, 1, 2)),
    case("squeeze_dim_kept", lambda x: aten.squeeze.dim(x, -1), rand(4, 1, 2)),
    case("squeeze_dims", lambda x: aten.squeeze.dims(x, [0, -1]), rand(1, 4, 2)),
    case("expand", lambda x: aten.expand.default(x, [4, 8, -1]), rand(8, 1)),
    case("expand_wide", lambda x: aten.expand.default(x, [4, 2, 8, 4]), rand(2, 1, 4)),
    case("repeat", lambda x: aten.repeat.default(x, [2, 3, 1]), rand(4, 8)),
    case("repeat_token", lambda x: aten.repeat.default(x, [8, 1, 1]), rand(1, 4, 8)),
    case("repeat_flat", lambda x: aten.repeat.default(x, [4]), rand(2)),
    case("repeat_new_dims", lambda x: aten.repeat.default(x, [8, 6, 2, 1]), rand(2, 4)),
    case("repeat_uneven", lambda x: aten.repeat.default(x, [3, 2]), rand(8, 6)),
    case("flip", lambda x: aten.flip.default(x, [-1]), rand(4, 8)),
    case("roll", lambda x: aten.roll.default(x, [1], [0]), rand(4, 8)),
    case("roll_flat", lambda x: aten.roll.default(x, [1]), rand(4, 8)),
    case("diagonal", lambda x: aten.diagonal.default(x, 0, 0, 2), rand(4, 8, 4)),
    case("diagonal_copy", lambda x: aten.diagonal_copy.default(x, 0, 0, 2), rand(4, 8, 4)),
    case(
        "diagonal_scatter",
        lambda x, s: aten.diagonal_scatter.default(x, s, 0, 0, 2),
        rand(4, 8, 4),
        rand(8, 4),
    ),
    case("diag_embed", lambda x: aten.diag_embed.default(x), rand(4, 8)),
    case("unfold", lambda x: aten.unfold.default(x, 1, 3, 2), rand(4, 9, 2)),
    case(
        "view_as_real",
        lambda x: aten.view_as_real.default(x),
        lambda: torch.randn(4, 8, dtype=torch.complex128),
    ),
    case("view_as_complex", lambda x: aten.view_as_complex.default(x), rand(4, 8, 2)),
    case("as_strided", lambda x: aten.as_strided.default(x, [4, 4], [8, 2]), rand(4, 8)),
    case(
        "as_strided_transposed",
        lambda x: aten.as_strided.default(x, [4, 8], [8, 1]),
        lambda: torch.randn(4, 8, dtype=torch.float64).t(),
    ),
]

_ALONG = (aten.cumprod, aten.cummax, aten.cummin, aten.logcumsumexp)
_REDUCING = (aten.amax, aten.amin, aten.argmax, aten.argmin, aten.logsumexp)
_WHOLE = (aten.max, aten.min, aten.any, aten.all, aten.prod, aten.median, aten.nanmedian)
_SPREAD = (aten.std, aten.var, aten.var_mean, aten.std_mean)


def _each(prefix: str, ops: Any, call: Callable[[Any], Callable[..., Any]]) -> list[Sample]:
    """One case per op on a `(4, 6, 8)` tensor."""
    return [case(f"{op}{prefix}", call(op), rand(4, 6, 8)) for op in ops]


REDUCTIONS = [
    *_each(".along", _ALONG, lambda op: lambda x: op.default(x, 1)),
    *_each(
        ".default",
        _REDUCING,
        lambda op: lambda x: op.default(x, [1] if "arg" not in str(op) else 1),
    ),
    *_each(".keepdim", _REDUCING, lambda op: lambda x: op.default(x, 0, True)),
    *_each(".whole", _WHOLE, lambda op: lambda x: op.default(x)),
    *_each(".whole", (aten.std, aten.var), lambda op: lambda x: op.default(x)),
    *_each(".dim", _SPREAD, lambda op: lambda x: op.dim(x, [1], False, True)),
    *_each(".correction", _SPREAD, lambda op: lambda x: op.correction(x, [0, 2], correction=1)),
    *_each(".dim", (aten.max, aten.min, aten.any, aten.all), lambda op: lambda x: op.dim(x, 1)),
    *_each(".dim", (aten.median, aten.nanmedian), lambda op: lambda x: op.dim(x, 1, True)),
    *_each(".dims", (aten.any, aten.all), lambda op: lambda x: op.dims(x, [0, 1])),
    *_each(".sorted", (aten.sort, aten.argsort), lambda op: lambda x: op.default(x, 1, True)),
    *_each(".stable", (aten.sort, aten.argsort), lambda op: lambda x: op.stable(x, stable=True)),
    *_each(
        ".softmax",
        (aten._softmax, aten._log_softmax),
        lambda op: lambda x: op.default(x, -1, False),
    ),
    case("sum", lambda x: aten.sum.default(x), rand(4, 6)),
    case("sum_bool", lambda x: aten.sum.default(x), bools(4, 6)),
    case("sum_ints", lambda x: aten.sum.dim_IntList(x, [0]), ints(9, 4, 6)),
    case("sum_dim", lambda x: aten.sum.dim_IntList(x, [0, -1]), rand(4, 6, 8)),
    case("sum_keepdim", lambda x: aten.sum.dim_IntList(x, [1], True), rand(4, 8, 3)),
    case("sum_all_dims", lambda x: aten.sum.dim_IntList(x, None), rand(4, 6)),
    case("sum_scalar", lambda x: aten.sum.default(x), rand()),
    case("nansum", lambda x: aten.nansum.default(x, [0]), rand(4, 6)),
    case("count_nonzero", lambda x: aten.count_nonzero.default(x), ints(2, 4, 6)),
    case("count_nonzero_dim", lambda x: aten.count_nonzero.dim_IntList(x, [0]), ints(2, 4, 6)),
    case("mean", lambda x: aten.mean.default(x), rand(4, 6)),
    case("mean_dim", lambda x: aten.mean.dim(x, [1], True), rand(4, 6, 8)),
    case("prod_dim", lambda x: aten.prod.dim_int(x, 0), rand(4, 6)),
    case("norm", lambda x: aten.linalg_vector_norm.default(x, 2, [1]), rand(4, 6)),
    case("norm_whole", lambda x: aten.linalg_vector_norm.default(x), rand(4, 6)),
    case("aminmax", lambda x: aten.aminmax.default(x, dim=1), rand(4, 6)),
    case("kthvalue", lambda x: aten.kthvalue.default(x, 2, 0), rand(4, 6)),
    case("mode", lambda x: aten.mode.default(x), ints(3, 4, 6)),
    case("cumsum", lambda x: aten.cumsum.default(x, -1), rand(4, 6)),
    case(
        "softmax_backward",
        lambda g, y: aten._softmax_backward_data.default(g, y, 1, torch.float64),
        rand(4, 6),
        rand(4, 6),
    ),
    case(
        "log_softmax_backward",
        lambda g, y: aten._log_softmax_backward_data.default(g, y, 1, torch.float64),
        rand(4, 6),
        rand(4, 6),
    ),
    case("topk", lambda x: aten.topk.default(x, 2, 1), rand(4, 6, 8)),
    case("histc", lambda x: aten.histc.default(x, 5), rand(8)),
    case("bincount", lambda x: aten.bincount.default(x), ints(5, 8)),
]

PARTS = [
    case("slice", lambda x: aten.slice.Tensor(x, 1, 1, 4), rand(4, 6, 8)),
    case("slice_whole", lambda x: aten.slice.Tensor(x, 1, 0, 9223372036854775807), rand(4, 8)),
    case("slice_negative", lambda x: aten.slice.Tensor(x, -1, -8), rand(4, 16)),
    case("slice_step", lambda x: aten.slice.Tensor(x, 1, 0, 8, 2), rand(4, 8)),
    case("slice_second_run", lambda x: aten.slice.Tensor(x, 1, 8, 16), rand(4, 24)),
    case(
        "slice_backward", lambda g: aten.slice_backward.default(g, [4, 24], 1, 8, 16, 1), rand(4, 8)
    ),
    case(
        "slice_backward_step",
        lambda g: aten.slice_backward.default(g, [4, 8], 1, 1, 8, 2),
        rand(4, 4),
    ),
    case(
        "slice_backward_whole",
        lambda g: aten.slice_backward.default(g, [4, 8], 1, 0, 99, 1),
        rand(4, 8),
    ),
    case(
        "slice_scatter",
        lambda x, s: aten.slice_scatter.default(x, s, 1, 2, 6),
        rand(4, 8),
        rand(4, 4),
    ),
    case("select", lambda x: aten.select.int(x, 1, -1), rand(4, 6, 8)),
    case(
        "select_backward", lambda g: aten.select_backward.default(g, [4, 6, 8], -2, 3), rand(4, 8)
    ),
    case(
        "select_scatter", lambda x, s: aten.select_scatter.default(x, s, 0, 1), rand(4, 8), rand(8)
    ),
    case("narrow", lambda x: aten.narrow.default(x, 1, 2, 3), rand(4, 8)),
    case("narrow_copy", lambda x: aten.narrow_copy.default(x, 1, 2, 3), rand(4, 8)),
    case(
        "unfold_backward", lambda g: aten.unfold_backward.default(g, [4, 9], 1, 3, 2), rand(4, 4, 3)
    ),
    case(
        "diagonal_backward",
        lambda g: aten.diagonal_backward.default(g, [4, 8, 4], 0, 0, 2),
        rand(8, 4),
    ),
    case("split", lambda x: aten.split.Tensor(x, 8, 1), rand(4, 24)),
    case("split_uneven", lambda x: aten.split.Tensor(x, 4, -1), rand(4, 10)),
    case("unsafe_split", lambda x: aten.unsafe_split.Tensor(x, 8), rand(16, 4)),
    case("chunk", lambda x: aten.chunk.default(x, 2, 1), rand(4, 8)),
    case("split_sizes", lambda x: aten.split_with_sizes.default(x, [8, 4, 4], 1), rand(4, 16)),
    case("split_sizes_equal", lambda x: aten.split_with_sizes.default(x, [8, 8], 1), rand(4, 16)),
    case("unsafe_sizes", lambda x: aten.unsafe_split_with_sizes.default(x, [3, 5], 1), rand(4, 8)),
    case("unbind", lambda x: aten.unbind.int(x, 1), rand(4, 3, 8)),
    case("cat", lambda x, y: aten.cat.default([x, y], 1), rand(4, 8), rand(4, 8)),
    case("cat_uneven", lambda x, y: aten.cat.default([x, y], -1), rand(4, 5), rand(4, 2)),
    case("cat_empty", lambda x, y: aten.cat.default([x, y], 1), rand(0), rand(4, 8)),
    case("stack", lambda x, y: aten.stack.default([x, y], 1), rand(4, 8), rand(4, 8)),
    case("stack_last", lambda x, y: aten.stack.default([x, y], -1), rand(4, 8), rand(4, 8)),
    case("pad", lambda x: aten.constant_pad_nd.default(x, [1, 2]), rand(4, 8)),
    case("pad_value", lambda x: aten.constant_pad_nd.default(x, [0, 0, 1, 1], 2.0), rand(4, 8)),
    case("tril", lambda x: aten.tril.default(x, 1), rand(4, 8, 8)),
    case("triu", lambda x: aten.triu.default(x), rand(8, 8)),
    case("lift", lambda x: aten.lift.default(x), rand(4, 8)),
    case("lift_fresh", lambda x: aten.lift_fresh.default(x), rand(4, 8)),
    case("lift_fresh_copy", lambda x: aten.lift_fresh_copy.default(x), rand(4, 8)),
]


_WINDOWS = (
    aten.bartlett_window,
    aten.blackman_window,
    aten.hamming_window,
    aten.hann_window,
    aten.kaiser_window,
)


def _factory(name: str, function: Callable[[], Any]) -> Sample:
    return case(f"factory_{name}", function)


FACTORIES = [
    _factory("full", lambda: aten.full.default([4, 8], 2.5)),
    _factory("full_zero", lambda: aten.full.default([4, 8], 0)),
    _factory("zeros", lambda: aten.zeros.default([4, 8])),
    _factory("ones", lambda: aten.ones.default([4, 6], dtype=torch.int64)),
    _factory("arange", lambda: aten.arange.default(8)),
    _factory("arange_start", lambda: aten.arange.start(2, 8)),
    _factory("arange_step", lambda: aten.arange.start_step(0, 8, 2)),
    _factory("linspace", lambda: aten.linspace.default(0, 1, 8)),
    _factory("logspace", lambda: aten.logspace.default(0, 1, 8)),
    _factory("eye", lambda: aten.eye.default(4)),
    _factory("eye_m", lambda: aten.eye.m(4, 8)),
    _factory("scalar_zero", lambda: aten.scalar_tensor.default(0.0)),
    _factory("scalar", lambda: aten.scalar_tensor.default(2.5)),
    _factory("tril_indices", lambda: aten.tril_indices.default(4, 4)),
    *(_factory(w.__name__, partial(w.default, 8)) for w in _WINDOWS),
    *(_factory(f"{w.__name__}_whole", partial(w.periodic, 8, False)) for w in _WINDOWS),
    _factory("hamming_window_alpha", lambda: aten.hamming_window.periodic_alpha(8, True, 0.5)),
    _factory(
        "hamming_window_beta", lambda: aten.hamming_window.periodic_alpha_beta(8, True, 0.5, 0.4)
    ),
    _factory("kaiser_window_beta", lambda: aten.kaiser_window.beta(8, True, 9.0)),
    _factory("triu_indices", lambda: aten.triu_indices.default(4, 4)),
    case("full_like", lambda x: aten.full_like.default(x, 2.5), rand(4, 8)),
    case("full_like_zero", lambda x: aten.full_like.default(x, 0), rand(4, 8)),
    case("zeros_like", lambda x: aten.zeros_like.default(x), rand(4, 8)),
    case("ones_like", lambda x: aten.ones_like.default(x, dtype=torch.bool), rand(4, 8)),
    case("new_zeros", lambda x: aten.new_zeros.default(x, [8, 4]), rand(4, 8)),
    case("new_ones", lambda x: aten.new_ones.default(x, [8, 4]), rand(4)),
    case("new_full", lambda x: aten.new_full.default(x, [8], 3.0), rand(4, 8)),
    case("fill", lambda x, v: aten.fill.Tensor(x, v), rand(4, 8), rand()),
]
