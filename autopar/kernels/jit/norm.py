"""Layer norm and RMS norm: one row a program forward, rows in turn backward.

The backward sums the weight's gradient over the rows of a program in registers; the programs'
partial sums are added by one ATen reduction.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from autopar.kernels.jit.common import as_rows, row_block, warps_for, wide_type
from autopar.kernels.registry import wide_dtype


@triton.jit
def _forward(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, out_ptr, total_ptr, mean_ptr, rstd_ptr,
    x_stride, residual_stride, size,
    EPS: tl.constexpr, ADD: tl.constexpr, CENTER: tl.constexpr, WEIGHT: tl.constexpr,
    BIAS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < size
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0).to(WIDE)
    if ADD:
        x += tl.load(residual_ptr + row * residual_stride + cols, mask=mask, other=0.0).to(WIDE)
        # the norm is of the sum as it is stored
        x = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * size + cols, x, mask=mask)
        x = x.to(WIDE)
    if CENTER:
        mean = tl.sum(x, 0) / size
        x = tl.where(mask, x - mean, 0.0)
        tl.store(mean_ptr + row, mean)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 0) / size + EPS)
    tl.store(rstd_ptr + row, rstd)
    y = x * rstd
    if WEIGHT:
        y = y * tl.load(weight_ptr + cols, mask=mask, other=0.0).to(WIDE)
    if BIAS:
        y = y + tl.load(bias_ptr + cols, mask=mask, other=0.0).to(WIDE)
    tl.store(out_ptr + row * size + cols, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward(
    grad_ptr, total_ptr, mean_ptr, rstd_ptr, weight_ptr, through_ptr, dx_ptr, dw_ptr, db_ptr,
    grad_stride, total_stride, through_stride, num_rows, size,
    CENTER: tl.constexpr, WEIGHT: tl.constexpr, THROUGH: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < size
    dw = tl.zeros((BLOCK,), dtype=WIDE)
    db = tl.zeros((BLOCK,), dtype=WIDE)
    if WEIGHT:
        weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(WIDE)
    for step in range(program, num_rows, tl.num_programs(0)):
        row = tl.cast(step, tl.int64)
        grad = tl.load(grad_ptr + row * grad_stride + cols, mask=mask, other=0.0).to(WIDE)
        x = tl.load(total_ptr + row * total_stride + cols, mask=mask, other=0.0).to(WIDE)
        rstd = tl.load(rstd_ptr + row).to(WIDE)
        if CENTER:
            x = tl.where(mask, x - tl.load(mean_ptr + row).to(WIDE), 0.0)
            db += grad
        normal = x * rstd
        dw += grad * normal
        if WEIGHT:
            grad = grad * weight
        inner = grad - normal * (tl.sum(grad * normal, 0) / size)
        if CENTER:
            inner = inner - tl.sum(grad, 0) / size
        dx = inner * rstd
        if THROUGH:
            dx += tl.load(
                through_ptr + row * through_stride + cols, mask=mask, other=0.0
            ).to(WIDE)  # fmt: skip
        tl.store(dx_ptr + row * size + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(dw_ptr + program * size + cols, dw, mask=mask)
    if CENTER:
        tl.store(db_ptr + program * size + cols, db, mask=mask)


def _run(x, residual, weight, bias, eps, center):
    size = x.shape[-1]
    rows = as_rows(x)
    others = rows if residual is None else as_rows(residual)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = out if residual is None else torch.empty_like(out)
    rstd = torch.empty((*x.shape[:-1], 1), dtype=wide_dtype(x), device=x.device)
    mean = torch.empty_like(rstd) if center else rstd
    block = row_block(size)
    _forward[(max(1, rows.shape[0]),)](
        rows, others, rows if weight is None else weight, rows if bias is None else bias, out,
        total, mean, rstd, rows.stride(0), others.stride(0), size,
        EPS=eps, ADD=residual is not None, CENTER=center, WEIGHT=weight is not None,
        BIAS=bias is not None, WIDE=wide_type(x), BLOCK=block, num_warps=warps_for(block),
    )  # fmt: skip
    return out, total, mean, rstd


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See `autopar.kernels.norm.layer_norm`."""
    out, _, mean, rstd = _run(x, None, weight, bias, eps, True)
    return out, mean, rstd


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `autopar.kernels.norm.add_layer_norm`."""
    out, total, mean, rstd = _run(x, residual, weight, bias, eps, True)
    return out, total, mean, rstd


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """See `autopar.kernels.norm.rms_norm`."""
    out, _, _, rstd = _run(x, None, weight, None, eps, False)
    return out, rstd


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See `autopar.kernels.norm.add_rms_norm`."""
    out, total, _, rstd = _run(x, residual, weight, None, eps, False)
    return out, total, rstd


def _programs(x: Tensor, num_rows: int) -> int:
    """Four programs a multiprocessor; few under the interpreter, where they run in turn."""
    units = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
    return max(1, min(num_rows, 4 * units))


def _run_backward(grad, total, mean, rstd, weight, through):
    center = mean is not None
    size = total.shape[-1]
    grads, rows = as_rows(grad), as_rows(total)
    passed = grads if through is None else as_rows(through)
    dx = torch.empty(total.shape, dtype=total.dtype, device=total.device)
    programs, block = _programs(total, rows.shape[0]), row_block(size)
    dw = torch.empty((programs, size), dtype=wide_dtype(total), device=total.device)
    db = torch.empty_like(dw) if center else dw
    rstd = rstd.contiguous()
    _backward[(programs,)](
        grads, rows, mean.contiguous() if center else rstd, rstd,
        rows if weight is None else weight, passed, dx, dw, db,
        grads.stride(0), rows.stride(0), passed.stride(0), rows.shape[0], size,
        CENTER=center, WEIGHT=weight is not None, THROUGH=through is not None,
        WIDE=wide_type(total), BLOCK=block, num_warps=warps_for(block),
    )  # fmt: skip
    return dx, dw.sum(0), db.sum(0) if center else None


def layer_norm_backward(
    grad: Tensor,
    total: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    grad_total: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `autopar.kernels.norm.layer_norm_backward`."""
    dx, dw, db = _run_backward(grad, total, mean, rstd, weight, grad_total)
    return dx, dw, db


def rms_norm_backward(
    grad: Tensor, total: Tensor, rstd: Tensor, weight: Tensor | None, grad_total: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See `autopar.kernels.norm.rms_norm_backward`."""
    dx, dw, _ = _run_backward(grad, total, None, rstd, weight, grad_total)
    return dx, dw
