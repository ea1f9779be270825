"""Gated activations, and bias + activation + dropout, one tile of a row a program."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from autopar.kernels.jit import common
from autopar.kernels.jit.common import activate, keep_mask, slope


@triton.jit
def _gated(
    gate_ptr, up_ptr, out_ptr, gate_stride, up_stride, size, tiles,
    ACT: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // tiles).to(tl.int64)
    cols = (tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)
    mask = cols < size
    gate = tl.load(gate_ptr + row * gate_stride + cols, mask=mask, other=0.0).to(WIDE)
    up = tl.load(up_ptr + row * up_stride + cols, mask=mask, other=0.0).to(WIDE)
    out = activate(gate, ACT) * up
    tl.store(out_ptr + row * size + cols, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gated_backward(
    grad_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, grad_stride, gate_stride, up_stride, size,
    tiles, ACT: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // tiles).to(tl.int64)
    cols = (tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)
    mask = cols < size
    grad = tl.load(grad_ptr + row * grad_stride + cols, mask=mask, other=0.0).to(WIDE)
    gate = tl.load(gate_ptr + row * gate_stride + cols, mask=mask, other=0.0).to(WIDE)
    up = tl.load(up_ptr + row * up_stride + cols, mask=mask, other=0.0).to(WIDE)
    dgate = grad * up * slope(gate, ACT)
    dup = grad * activate(gate, ACT)
    tl.store(dgate_ptr + row * size + cols, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
    tl.store(dup_ptr + row * size + cols, dup.to(dup_ptr.dtype.element_ty), mask=mask)


def gated(gate: Tensor, up: Tensor, act: str) -> Tensor:
    """See `autopar.kernels.activation.gated`."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    g, u = common.flat_rows(gate, up)
    tile = common.tile_of(g.shape[1])
    tiles = triton.cdiv(g.shape[1], tile)
    _gated[(g.shape[0] * tiles,)](
        g, u, out, g.stride(0), u.stride(0), g.shape[1], tiles,
        ACT=act, WIDE=common.wide_type(gate), TILE=tile,
    )  # fmt: skip
    return out


def gated_backward(grad: Tensor, gate: Tensor, up: Tensor, act: str) -> tuple[Tensor, Tensor]:
    """See `autopar.kernels.activation.gated_backward`."""
    dgate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    dup = torch.empty(up.shape, dtype=up.dtype, device=up.device)
    d, g, u = common.flat_rows(grad, gate, up)
    tile = common.tile_of(g.shape[1])
    tiles = triton.cdiv(g.shape[1], tile)
    _gated_backward[(g.shape[0] * tiles,)](
        d, g, u, dgate, dup, d.stride(0), g.stride(0), u.stride(0), g.shape[1], tiles,
        ACT=act, WIDE=common.wide_type(gate), TILE=tile,
    )  # fmt: skip
    return dgate, dup


@triton.jit
def _bias_act(
    x_ptr, bias_ptr, grad_ptr, seed_ptr, out_ptr, x_stride, grad_stride, size, tiles,
    salt, threshold, base, n1, n2, n3, s0, s1, s2, s3,
    KEEP: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, DROP: tl.constexpr,
    BACKWARD: tl.constexpr, DIMS: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // tiles).to(tl.int64)
    cols = (tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)
    mask = cols < size
    z = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0).to(WIDE)
    if BIAS:
        z += tl.load(bias_ptr + cols, mask=mask, other=0.0).to(WIDE)
    if BACKWARD:
        grad = tl.load(grad_ptr + row * grad_stride + cols, mask=mask, other=0.0).to(WIDE)
        out = grad * slope(z, ACT)
    else:
        out = activate(z, ACT)
    if DROP:
        keep = keep_mask(
            tl.load(seed_ptr), salt, threshold, row * size + cols,
            base, n1, n2, n3, s0, s1, s2, s3, DIMS,
        )  # fmt: skip
        out = tl.where(keep, out * (1.0 / KEEP), 0.0)
    tl.store(out_ptr + row * size + cols, out.to(out_ptr.dtype.element_ty), mask=mask)


def _run(x, bias, grad, act, p, seed, salt, global_shape, offset):
    if p >= 1.0:
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    rows = common.as_rows(x)
    grads = rows if grad is None else common.as_rows(grad)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    drop = p > 0.0 and seed is not None
    where = (x.shape, [0] * x.dim()) if not drop else (global_shape, offset)
    tile = common.tile_of(rows.shape[1])
    tiles = triton.cdiv(rows.shape[1], tile)
    _bias_act[(rows.shape[0] * tiles,)](
        rows, rows if bias is None else bias, grads, seed if drop else rows, out,
        rows.stride(0), grads.stride(0), rows.shape[1], tiles,
        *common.random_arguments(x, p, salt, *where),
        KEEP=1.0 - p, ACT=act, BIAS=bias is not None, DROP=drop, BACKWARD=grad is not None,
        DIMS=common.index_dims(x, *where), WIDE=common.wide_type(x), TILE=tile,
    )  # fmt: skip
    return out


def bias_act(
    x: Tensor,
    bias: Tensor | None,
    act: str,
    p: float,
    seed: Tensor | None,
    salt: int,
    global_shape: Sequence[int],
    offset: Sequence[int],
) -> Tensor:
    """See `autopar.kernels.activation.bias_act`."""
    return _run(x, bias, None, act, p, seed, salt, global_shape, offset)


def bias_act_backward(
    grad: Tensor,
    x: Tensor,
    bias: Tensor | None,
    act: str,
    p: float,
    seed: Tensor | None,
    salt: int,
    global_shape: Sequence[int],
    offset: Sequence[int],
) -> Tensor:
    """See `autopar.kernels.activation.bias_act_backward`."""
    return _run(x, bias, grad, act, p, seed, salt, global_shape, offset)
