"""How library calls are expressed in autopar's graphs.

There are two tables. `REPLACEMENTS` maps a call of the exported (pre-autograd) graph to a function
that computes the same with device-neutral ops, which autograd then differentiates.
`decomposition_table()` applies below autograd, to ops that appear only in the backward or inside
composite ops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions

from autopar.core.ops import ops
from autopar.tracer.formulas import (
    affine_grid,
    bilinear,
    block_diag,
    det,
    dist,
    embedding_bag_backward,
    exponential,
    glu,
    histc,
    masked_scatter,
    multi_margin_loss,
    multilabel_margin_loss,
    multinomial,
    normal,
    randint,
    randint_from,
    randperm,
    rot90,
    rrelu,
    rrelu_with_noise,
    select_scatter,
    slice_scatter,
    slogdet,
    trace,
    uniform,
    vdot,
    weight_norm,
)
from autopar.tracer.products import (
    addbmm,
    addmm,
    addmv,
    addr,
    attention,
    baddbmm,
    bmm,
    einsum,
    linear,
    matmul,
    mm,
)
from autopar.tracer.randomness import (
    RandomContext,
    bernoulli,
    dropout,
    feature_dropout,
    native_dropout,
    rand,
    rand_like,
    randn,
    randn_like,
)
from autopar.tracer.spectrograms import istft, stft

__all__ = ["REPLACEMENTS", "as_copied", "decomposition_table", "token_loss"]

aten = torch.ops.aten

Replacement = Callable[..., Any]


def _cross_entropy(
    rng: RandomContext,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Class indices without weights or smoothing become `token_nll`; all else stays ATen's."""
    if weight is not None or label_smoothing != 0.0 or target.is_floating_point():
        return torch.nn.functional.cross_entropy(
            logits,
            target,
            weight,
            ignore_index=ignore_index,
            reduction=("none", "mean", "sum")[reduction],
            label_smoothing=label_smoothing,
        )
    if logits.dim() > 2:
        logits = logits.movedim(1, -1)
    return token_loss(logits, target, reduction, ignore_index)


def token_loss(logits: Tensor, target: Tensor, reduction: int, ignore_index: int) -> Tensor:
    """Cross-entropy over the last dim, reduced as torch does (0 none, 1 mean, 2 sum)."""
    nll = ops.token_nll(logits, target, ignore_index)[0]
    if reduction == 0:
        return nll
    total = nll.sum()
    return total if reduction == 2 else total / (target != ignore_index).sum().to(nll.dtype)


def _rms_norm(
    rng: RandomContext,
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    dims = list(range(x.dim() - len(normalized_shape), x.dim()))
    count = math.prod(normalized_shape)
    floor = torch.finfo(x.dtype).eps if eps is None else eps
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    inverse = torch.rsqrt((wide * wide).sum(dims, keepdim=True) / count + floor)
    out = (wide * inverse).to(x.dtype)
    return out if weight is None else out * weight


def as_copied(x: Tensor, source: Tensor) -> Tensor:
    """What `x` is after `x.copy_(source)`; export gives a buffer's new value as the source."""
    return source.to(x.dtype).expand(x.shape)


def _copy(rng: RandomContext, x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """What a functionalised `x.copy_(source)` yields; ATen has no derivative for it."""
    return as_copied(x, source).clone()


def _adaptive_avg_pool(rng: RandomContext, x: Tensor, output_size: Sequence[int]) -> Tensor:
    """A mean where one element is left: ATen's own restrides the result in place."""
    rank = len(output_size)
    if all(size == 1 for size in output_size):
        dims = list(range(x.dim() - rank, x.dim()))
        return _mean_dim(x, dims, keepdim=True)
    pool: Any = {1: aten.adaptive_avg_pool1d, 2: aten.adaptive_avg_pool2d}
    return pool.get(rank, aten.adaptive_avg_pool3d).default(x, output_size)


def _index_put(
    rng: RandomContext,
    x: Tensor,
    indices: Sequence[Tensor | None],
    values: Tensor,
    accumulate: bool = False,
) -> Tensor:
    """`x[mask] = v` is a `where` if `v` is one for all places: its backward then has a shape."""
    mask = indices[0]
    if len(indices) == 1 and mask is not None and mask.dtype is torch.bool and not accumulate:
        rest = x.dim() - mask.dim()
        if values.dim() == rest + 1 and values.shape[0] == 1:
            values = values.squeeze(0)
        if values.dim() <= rest:
            return torch.where(mask.reshape(*mask.shape, *[1] * rest), values, x)
    return aten.index_put.default(x, indices, values, accumulate)


REPLACEMENTS: Mapping[Any, Replacement] = {
    aten.index_put.default: _index_put,
    aten.adaptive_avg_pool1d.default: _adaptive_avg_pool,
    aten.adaptive_avg_pool2d.default: _adaptive_avg_pool,
    aten.adaptive_avg_pool3d.default: _adaptive_avg_pool,
    aten.copy.default: _copy,
    aten.linear.default: linear,
    aten.matmul.default: matmul,
    aten.addmm.default: addmm,
    aten.addmv.default: addmv,
    aten.addr.default: addr,
    aten.dist.default: dist,
    aten.baddbmm.default: baddbmm,
    aten.mm.default: mm,
    aten.bmm.default: bmm,
    aten.einsum.default: einsum,
    aten.dropout.default: dropout,
    aten.native_dropout.default: native_dropout,
    aten.feature_dropout.default: feature_dropout,
    aten.scaled_dot_product_attention.default: attention,
    aten.cross_entropy_loss.default: _cross_entropy,
    aten.rand_like.default: rand_like,
    aten.rand.default: rand,
    aten.randn.default: randn,
    aten.randn_like.default: randn_like,
    aten.bernoulli.default: bernoulli,
    aten.bernoulli.p: bernoulli,
    aten.rms_norm.default: _rms_norm,
    aten.addbmm.default: addbmm,
    aten.affine_grid_generator.default: affine_grid,
    aten.glu.default: glu,
    aten.histc.default: histc,
    aten.masked_scatter.default: masked_scatter,
    aten.multi_margin_loss.default: multi_margin_loss,
    aten.multilabel_margin_loss.default: multilabel_margin_loss,
    aten.rot90.default: rot90,
    aten.select_scatter.default: select_scatter,
    aten.slice_scatter.default: slice_scatter,
    aten.trace.default: trace,
    aten._weight_norm.default: weight_norm,
    aten.zero.default: lambda _rng, x: torch.zeros_like(x),
    aten.bilinear.default: bilinear,
    aten.block_diag.default: block_diag,
    aten.uniform.default: uniform,
    aten.rrelu.default: rrelu,
    aten.rrelu_with_noise_functional.default: rrelu_with_noise,
    aten.exponential.default: exponential,
    aten.normal_functional.default: normal,
    aten.randint.default: randint,
    aten.randint.low: randint_from,
    aten.randperm.default: randperm,
    aten.multinomial.default: multinomial,
    aten.stft.default: stft,
    aten.istft.default: istft,
}


def _dims(x: Tensor, dim: Any) -> list[int]:
    if dim is None or not x.dim() or (isinstance(dim, (list, tuple)) and not dim):
        return list(range(x.dim()))
    return [d % x.dim() for d in ([dim] if isinstance(dim, int) else dim)]


def _mean_dim(
    x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """A sum times a constant: the sum may stay partial over ranks, a mean of means need not."""
    wide = x if dtype is None else x.to(dtype)
    dims = _dims(x, dim)
    count = math.prod(x.shape[d] for d in dims)
    total = wide.sum(dims, keepdim=keepdim) if dims else wide
    return total / count


def _mean(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return _mean_dim(x, dtype=dtype)


def _var_mean(
    x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Σ(x − mean)²: the two-pass form, which does not cancel."""
    dims = _dims(x, dim)
    count = math.prod(x.shape[d] for d in dims)
    mean = x.sum(dims, keepdim=True) / count
    centred = x - mean
    var = (centred * centred).sum(dims, keepdim=keepdim) / max(
        0.0, count - (1.0 if correction is None else correction)
    )
    return var, mean if keepdim else mean.sum(dims) if dims else mean


def _var(
    x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    return _var_mean(x, dim, correction=correction, keepdim=keepdim)[0]


_OF_TORCH = (
    aten.mse_loss,
    aten.mse_loss_backward,
    aten.smooth_l1_loss,
    aten.smooth_l1_loss_backward,
    aten.huber_loss,
    aten.huber_loss_backward,
    aten.binary_cross_entropy,
    aten.binary_cross_entropy_backward,
    aten.binary_cross_entropy_with_logits,
    aten.native_batch_norm,
    aten.native_batch_norm_backward,
    aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_functional,
    aten._native_batch_norm_legit_no_training,
    aten._batch_norm_with_update_functional,
    aten.batch_norm_backward,
    aten.std,
    aten.std_mean,
    aten.native_dropout_backward,
    aten.split_with_sizes_copy,
    aten.addcmul,
    aten.addcdiv,
    aten.glu_backward,
    aten.l1_loss,
    aten.soft_margin_loss,
    aten.soft_margin_loss_backward,
    aten.linalg_vector_norm,
    aten.norm,
    aten.im2col,
    aten.nll_loss_forward,
    aten.nll_loss_backward,
    aten.nll_loss2d_forward,
    aten.nll_loss2d_backward,
    aten.native_group_norm_backward,
)
"""Ops that torch's own decompositions write in others, all overloads of each."""


def _new_full(
    x: Tensor, size: Sequence[int], value: Any, dtype: torch.dtype | None = None, **options: Any
) -> Tensor:
    """A number of its own: it depends on no part of `x`."""
    if size:
        return NotImplemented
    return torch.full(size, value, dtype=dtype or x.dtype, device=x.device)


@cache
def decomposition_table() -> dict[Any, Callable[..., Any]]:
    """Decompositions applied below autograd."""
    table: dict[Any, Callable[..., Any]] = dict(get_decompositions(_OF_TORCH))
    table.update(
        {
            aten.mean.dim: _mean_dim,
            aten.mean.default: _mean,
            aten.var_mean.correction: _var_mean,
            aten.var.correction: _var,
            aten.vdot.default: vdot,
            aten._linalg_det.default: det,
            aten._linalg_slogdet.default: slogdet,
            aten._embedding_bag_backward.default: embedding_bag_backward,
            aten.new_full.default: _new_full,
        }
    )
    return table
