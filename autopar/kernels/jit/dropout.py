"""Dropout alone, and bias + dropout + residual; the mask is drawn in the kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from autopar.kernels.jit import common
from autopar.kernels.jit.common import keep_mask


@triton.jit
def _kernel(
    x_ptr, bias_ptr, residual_ptr, seed_ptr, out_ptr, x_stride, residual_stride, size, tiles,
    salt, threshold, base, n1, n2, n3, s0, s1, s2, s3,
    KEEP: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, DIMS: tl.constexpr,
    WIDE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // tiles).to(tl.int64)
    cols = (tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)
    mask = cols < size
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0).to(WIDE)
    if BIAS:
        x += tl.load(bias_ptr + cols, mask=mask, other=0.0).to(WIDE)
    keep = keep_mask(
        tl.load(seed_ptr), salt, threshold, row * size + cols,
        base, n1, n2, n3, s0, s1, s2, s3, DIMS,
    )  # fmt: skip
    x = tl.where(keep, x * (1.0 / KEEP), 0.0)
    if ADD:
        x += tl.load(residual_ptr + row * residual_stride + cols, mask=mask, other=0.0).to(WIDE)
    tl.store(out_ptr + row * size + cols, x.to(out_ptr.dtype.element_ty), mask=mask)


def _run(x, bias, residual, p, seed, salt, global_shape, offset):
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if bias is None:
        rows, *rest = common.flat_rows(x, *([] if residual is None else [residual]))
        others = rest[0] if rest else rows
    else:
        rows = common.as_rows(x)
        others = rows if residual is None else common.as_rows(residual)
    tile = common.tile_of(rows.shape[1])
    tiles = triton.cdiv(rows.shape[1], tile)
    _kernel[(rows.shape[0] * tiles,)](
        rows, rows if bias is None else bias, others, seed, out,
        rows.stride(0), others.stride(0), rows.shape[1], tiles,
        *common.random_arguments(x, p, salt, global_shape, offset),
        KEEP=1.0 - p, BIAS=bias is not None, ADD=residual is not None,
        DIMS=common.index_dims(x, global_shape, offset), WIDE=common.wide_type(x), TILE=tile,
    )  # fmt: skip
    return out


def dropout(
    x: Tensor,
    p: float,
    seed: Tensor,
    salt: int,
    global_shape: Sequence[int],
    offset: Sequence[int],
) -> Tensor:
    """See `autopar.kernels.dropout.dropout`."""
    if p >= 1.0:
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    return _run(x, None, None, p, seed, salt, global_shape, offset)


def dropout_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    p: float,
    seed: Tensor,
    salt: int,
    global_shape: Sequence[int],
    offset: Sequence[int],
) -> Tensor:
    """See `autopar.kernels.dropout.dropout_add`."""
    if p >= 1.0:
        return residual.clone(memory_format=torch.contiguous_format)
    return _run(x, bias, residual, p, seed, salt, global_shape, offset)
