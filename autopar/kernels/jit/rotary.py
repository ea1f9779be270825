"""Rotary embedding: positions of one head a program, both halves of the last dim."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from autopar.kernels.jit import common


@triton.jit
def _kernel(
    x_ptr, cos_ptr, sin_ptr, out_ptr, num_heads, length, half, tiles,
    xb, xh, xs, xd, cb, ch, cs, cd, sb, sh, ss, sd,
    INVERSE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    outer = program // tiles
    b = (outer // num_heads).to(tl.int64)
    h = (outer % num_heads).to(tl.int64)
    s = ((program % tiles) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    d = tl.arange(0, COLS)[None, :]
    mask = (s < length) & (d < half)
    x_at = x_ptr + b * xb + h * xh + s * xs + d * xd
    cos_at = cos_ptr + b * cb + h * ch + s * cs + d * cd
    sin_at = sin_ptr + b * sb + h * sh + s * ss + d * sd
    x1 = tl.load(x_at, mask=mask, other=0.0).to(WIDE)
    x2 = tl.load(x_at + half * xd, mask=mask, other=0.0).to(WIDE)
    c1 = tl.load(cos_at, mask=mask, other=0.0).to(WIDE)
    c2 = tl.load(cos_at + half * cd, mask=mask, other=0.0).to(WIDE)
    s1 = tl.load(sin_at, mask=mask, other=0.0).to(WIDE)
    s2 = tl.load(sin_at + half * sd, mask=mask, other=0.0).to(WIDE)
    if INVERSE:
        y1 = x1 * c1 + x2 * s2
        y2 = x2 * c2 - x1 * s1
    else:
        y1 = x1 * c1 - x2 * s1
        y2 = x2 * c2 + x1 * s2
    out_at = out_ptr + ((b * num_heads + h) * length + s) * (2 * half) + d
    tl.store(out_at, y1.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out_at + half, y2.to(out_ptr.dtype.element_ty), mask=mask)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """See `autopar.kernels.rotary.rotary`."""
    batch, heads, length, size = x.shape
    cos, sin = cos.expand(x.shape), sin.expand(x.shape)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    cols = common.row_block(size // 2)
    rows = min(common.row_block(length), max(1, 1024 // cols))
    tiles = triton.cdiv(length, rows)
    _kernel[(batch * heads * tiles,)](
        x, cos, sin, out, heads, length, size // 2, tiles,
        *x.stride(), *cos.stride(), *sin.stride(),
        INVERSE=inverse, WIDE=common.wide_type(x), ROWS=rows, COLS=cols,
    )  # fmt: skip
    return out
