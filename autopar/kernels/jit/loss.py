"""Cross-entropy over a part of the vocabulary: one pass over a token's logits forward."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from autopar.kernels.jit import common
from autopar.kernels.loss import backward_in_chunks, in_chunks
from autopar.kernels.registry import wide_dtype

_MAX_BLOCK = 8192


@triton.jit
def _stats(
    logits_ptr, target_ptr, first_ptr, second_ptr, third_ptr, stride, size, start, ignore,
    WHOLE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row)
    counts = target != ignore
    index = target - start
    inside = (index >= 0) & (index < size) & counts
    line = logits_ptr + row * stride
    picked = tl.load(line + index, mask=inside, other=0.0).to(WIDE)
    top = tl.full((), -float("inf"), WIDE)
    shift = tl.full((), 0.0, WIDE)
    total = tl.full((), 0.0, WIDE)
    for begin in range(0, size, BLOCK):
        cols = begin + tl.arange(0, BLOCK)
        z = tl.load(line + cols, mask=cols < size, other=-float("inf")).to(WIDE)
        top = tl.maximum(top, tl.max(z, 0))
        # an infinite maximum is not subtracted, which would make NaN of it
        new_shift = tl.where(tl.abs(top) == float("inf"), 0.0, top)
        total = total * tl.exp(shift - new_shift) + tl.sum(tl.exp(z - new_shift), 0)
        shift = new_shift
    if WHOLE:
        lse = tl.log(total) + shift
        tl.store(first_ptr + row, tl.where(inside, lse - picked, 0.0))
        tl.store(second_ptr + row, lse)
    else:
        tl.store(first_ptr + row, top)
        tl.store(second_ptr + row, total)
        tl.store(third_ptr + row, picked)


@triton.jit
def _backward(
    grad_ptr, logits_ptr, target_ptr, lse_ptr, out_ptr, stride, size, tiles, start, ignore,
    WIDE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // tiles).to(tl.int64)
    cols = (tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)
    mask = cols < size
    target = tl.load(target_ptr + row)
    scale = tl.load(grad_ptr + row).to(WIDE)
    scale = tl.where(target != ignore, scale, 0.0)
    z = tl.load(logits_ptr + row * stride + cols, mask=mask, other=0.0).to(WIDE)
    p = tl.exp(z - tl.load(lse_ptr + row).to(WIDE))
    out = (p - tl.where(cols == target - start, 1.0, 0.0)) * scale
    tl.store(out_ptr + row * size + cols, out.to(out_ptr.dtype.element_ty), mask=mask)


def _run(logits, target, start, ignore, whole):
    rows = common.as_rows(logits)
    outs = [
        torch.empty(logits.shape[:-1], dtype=wide_dtype(logits), device=logits.device)
        for _ in range(2 if whole else 3)
    ]
    block = min(_MAX_BLOCK, common.row_block(rows.shape[1]))
    _stats[(max(1, rows.shape[0]),)](
        rows, target.contiguous(), outs[0], outs[1], outs[-1], rows.stride(0), rows.shape[1],
        start, ignore, WHOLE=whole, WIDE=common.wide_type(logits), BLOCK=block,
        num_warps=common.warps_for(block),
    )  # fmt: skip
    return tuple(outs)


def nll_stats(
    logits: Tensor, target: Tensor, start: int, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `autopar.kernels.loss.nll_stats`."""
    top, total, picked = _run(logits, target, start, ignore_index, False)
    return top, total, picked


def token_nll(logits: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """See `autopar.kernels.loss.token_nll`."""
    nll, lse = _run(logits, target, 0, ignore_index, True)
    return nll, lse


def nll_backward(
    grad: Tensor, logits: Tensor, target: Tensor, lse: Tensor, start: int, ignore_index: int
) -> Tensor:
    """See `autopar.kernels.loss.nll_backward`."""
    rows = common.as_rows(logits)
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    tile = common.tile_of(rows.shape[1])
    tiles = triton.cdiv(rows.shape[1], tile)
    _backward[(rows.shape[0] * tiles,)](
        grad.contiguous(), rows, target.contiguous(), lse.contiguous(), out, rows.stride(0),
        rows.shape[1], tiles, start, ignore_index, WIDE=common.wide_type(logits), TILE=tile,
    )  # fmt: skip
    return out


def linear_nll(
    x: Tensor, weight: Tensor, target: Tensor, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """See `autopar.kernels.loss.linear_nll`."""
    nll, lse = in_chunks(x, weight, target, ignore_index, token_nll)
    return nll, lse


def linear_nll_backward(
    grad: Tensor, x: Tensor, weight: Tensor, target: Tensor, lse: Tensor, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """See `autopar.kernels.loss.linear_nll_backward`."""
    dx, dw = backward_in_chunks(grad, x, weight, target, lse, ignore_index, nll_backward)
    return dx, dw
