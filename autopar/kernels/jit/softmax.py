"""Scaled and masked softmax and its backward, one row a program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from autopar.kernels.jit import common


@triton.jit
def _forward(
    x_ptr, mask_ptr, out_ptr, x_stride, size, n1, n2, m0, m1, m2, m3,
    SCALE: tl.constexpr, MASK: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < size
    z = tl.load(x_ptr + row * x_stride + cols, mask=inside, other=-float("inf")).to(WIDE)
    z = z * SCALE
    if SCALE <= 0.0:
        z = tl.where(inside, z, -float("inf"))
    if MASK:
        at = (row // (n1 * n2)) * m0 + (row // n2 % n1) * m1 + (row % n2) * m2 + cols * m3
        allowed = tl.load(mask_ptr + at, mask=inside, other=0)
        z = tl.where(allowed != 0, z, -float("inf"))
    p = tl.exp(z - tl.max(z, 0))
    p = p / tl.sum(p, 0)
    tl.store(out_ptr + row * size + cols, p.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    grad_ptr, out_ptr, dx_ptr, grad_stride, out_stride, size,
    SCALE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < size
    grad = tl.load(grad_ptr + row * grad_stride + cols, mask=inside, other=0.0).to(WIDE)
    p = tl.load(out_ptr + row * out_stride + cols, mask=inside, other=0.0).to(WIDE)
    dx = SCALE * p * (grad - tl.sum(grad * p, 0))
    tl.store(dx_ptr + row * size + cols, dx.to(dx_ptr.dtype.element_ty), mask=inside)


def masked_softmax(x: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """See `autopar.kernels.softmax.masked_softmax`."""
    rows = common.as_rows(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = common.row_block(x.shape[-1])
    bits, sizes, strides = rows, [1, 1], [0, 0, 0, 0]
    if mask is not None:
        shape = (1,) * (4 - x.dim()) + tuple(x.shape)
        if x.dim() > 4:
            shape = (x.shape[0], -1, *x.shape[-2:])
        whole = mask.expand(x.shape).reshape(shape).view(torch.uint8)
        bits, sizes, strides = whole, list(whole.shape[1:3]), list(whole.stride())
    _forward[(max(1, rows.shape[0]),)](
        rows, bits, out, rows.stride(0), x.shape[-1], *sizes, *strides,
        SCALE=scale, MASK=mask is not None, WIDE=common.wide_type(x), BLOCK=block,
        num_warps=common.warps_for(block),
    )  # fmt: skip
    return out


def softmax_backward(grad: Tensor, out: Tensor, scale: float) -> Tensor:
    """See `autopar.kernels.softmax.softmax_backward`."""
    grads, rows = common.as_rows(grad), common.as_rows(out)
    dx = torch.empty(out.shape, dtype=out.dtype, device=out.device)
    block = common.row_block(out.shape[-1])
    _backward[(max(1, rows.shape[0]),)](
        grads, rows, dx, grads.stride(0), rows.stride(0), out.shape[-1],
        SCALE=scale, WIDE=common.wide_type(out), BLOCK=block, num_warps=common.warps_for(block),
    )  # fmt: skip
    return dx
