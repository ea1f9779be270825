"""Layer norm and RMS norm over the last dim, with the residual add in front of them.

With s = x + residual, H the size of the last dim, μ = Σs / H and ρ = (Σ(s − μ)² / H + ε)^(−1/2):
layer norm (Ba et al. 2016, arXiv 1607.06450) yields ŝ·w + b with ŝ = (s − μ)·ρ. RMS norm (Zhang
and Sennrich 2019, arXiv 1910.07467) has μ = 0 and no b. Backward, with g = dy·w:
ds = (g − Σg / H − ŝ · Σ(g ŝ) / H)·ρ + dtotal, dw = Σ_rows dy·ŝ, db = Σ_rows dy; RMS norm has no
Σg. `dtotal` is what flows back along the residual stream.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.kernels.registry import define, row_fits, wide, wide_dtype

__all__: list[str] = []


def _stats_fake(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], 1), dtype=wide_dtype(x))


def _fits(x: Tensor, *_: object) -> bool:
    return row_fits(x)


def _layer_norm_fake(x, weight, bias, eps):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape), _stats_fake(x), _stats_fake(x)


def _add_layer_norm_fake(x, residual, weight, bias, eps):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape), x.new_empty(x.shape), _stats_fake(x), _stats_fake(x)


def _rms_norm_fake(x, weight, eps):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape), _stats_fake(x)


def _add_rms_norm_fake(x, residual, weight, eps):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape), x.new_empty(x.shape), _stats_fake(x)


@define(
    "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)",
    module="norm",
    fake=_layer_norm_fake,
    takes=_fits,
)
def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Layer norm of `x` `(…, H)`; with mean and 1/σ `(…, 1)` in at least float32."""
    x32 = wide(x)
    mean = x32.mean(-1, keepdim=True)
    centered = x32 - mean
    rstd = torch.rsqrt((centered * centered).mean(-1, keepdim=True) + eps)
    out = centered * rstd
    if weight is not None:
        out = out * wide(weight)
    if bias is not None:
        out = out + wide(bias)
    return out.to(x.dtype).contiguous(), mean, rstd


@define(
    "add_layer_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    module="norm",
    fake=_add_layer_norm_fake,
    takes=_fits,
)
def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Layer norm of `x + residual`; yields the norm, the sum, mean and 1/σ."""
    total = (x + residual).contiguous()
    out, mean, rstd = layer_norm(total, weight, bias, eps)
    return out, total, mean, rstd


@define(
    "rms_norm(Tensor x, Tensor? weight, float eps) -> (Tensor, Tensor)",
    module="norm",
    fake=_rms_norm_fake,
    takes=_fits,
)
def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """RMS norm of `x` `(…, H)`; with 1/rms `(…, 1)` in at least float32."""
    x32 = wide(x)
    rstd = torch.rsqrt((x32 * x32).mean(-1, keepdim=True) + eps)
    out = x32 * rstd
    if weight is not None:
        out = out * wide(weight)
    return out.to(x.dtype).contiguous(), rstd


@define(
    "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps)"
    " -> (Tensor, Tensor, Tensor)",
    module="norm",
    fake=_add_rms_norm_fake,
    takes=_fits,
)
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """RMS norm of `x + residual`; yields the norm, the sum and 1/rms."""
    total = (x + residual).contiguous()
    out, rstd = rms_norm(total, weight, eps)
    return out, total, rstd


def _layer_norm_backward_fake(grad, total, mean, rstd, weight, grad_total):  # type: ignore[no-untyped-def]
    wide_row = total.new_empty(total.shape[-1:], dtype=wide_dtype(total))
    return total.new_empty(total.shape), wide_row, wide_row.new_empty(wide_row.shape)


def _rms_norm_backward_fake(grad, total, rstd, weight, grad_total):  # type: ignore[no-untyped-def]
    wide_row = total.new_empty(total.shape[-1:], dtype=wide_dtype(total))
    return total.new_empty(total.shape), wide_row


def _over_rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).sum(0)


@define(
    "layer_norm_backward(Tensor grad, Tensor total, Tensor mean, Tensor rstd, Tensor? weight,"
    " Tensor? grad_total) -> (Tensor, Tensor, Tensor)",
    module="norm",
    fake=_layer_norm_backward_fake,
    takes=_fits,
)
def layer_norm_backward(
    grad: Tensor,
    total: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    grad_total: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the normed sum, the weight and the bias; the last two in at least float32."""
    grad32, rstd = wide(grad), wide(rstd)
    normal = (wide(total) - wide(mean)) * rstd
    g = grad32 if weight is None else grad32 * wide(weight)
    mean_gx = (g * normal).mean(-1, keepdim=True)
    dx = (g - g.mean(-1, keepdim=True) - normal * mean_gx) * rstd
    if grad_total is not None:
        dx = dx + wide(grad_total)
    return dx.to(total.dtype).contiguous(), _over_rows(grad32 * normal), _over_rows(grad32)


@define(
    "rms_norm_backward(Tensor grad, Tensor total, Tensor rstd, Tensor? weight,"
    " Tensor? grad_total) -> (Tensor, Tensor)",
    module="norm",
    fake=_rms_norm_backward_fake,
    takes=_fits,
)
def rms_norm_backward(
    grad: Tensor, total: Tensor, rstd: Tensor, weight: Tensor | None, grad_total: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients of the normed sum and of the weight, the latter in at least float32."""
    grad32, rstd = wide(grad), wide(rstd)
    normal = wide(total) * rstd
    g = grad32 if weight is None else grad32 * wide(weight)
    dx = (g - normal * (g * normal).mean(-1, keepdim=True)) * rstd
    if grad_total is not None:
        dx = dx + wide(grad_total)
    return dx.to(total.dtype).contiguous(), _over_rows(grad32 * normal)
