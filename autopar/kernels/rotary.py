"""Rotary position embedding of queries or keys (Su et al. 2021, arXiv 2104.09864).

With x = (x₁, x₂) the halves of the last dim, in the form that pairs element i with i + D/2:
y = x·cos + (−x₂, x₁)·sin. The gradient is the transposed map, `inverse=True`:
dx = (g₁·cos₁ + g₂·sin₂, g₂·cos₂ − g₁·sin₁), which makes no use of cos₁ = cos₂.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.kernels.registry import define, wide

__all__: list[str] = []


def _fake(x, cos, sin, inverse):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape)


def _takes(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> bool:
    return x.dim() == 4


@define(
    "rotary(Tensor x, Tensor cos, Tensor sin, bool inverse) -> Tensor",
    module="rotary",
    fake=_fake,
    takes=_takes,
)
def rotary(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """Rotate `x` `(B, H, S, D)`, of any strides, by tables that broadcast to its shape."""
    half = x.shape[-1] // 2
    x32, cos32, sin32 = wide(x), wide(cos), wide(sin)
    if inverse:
        moved = x32 * sin32
        turned = torch.cat((moved[..., half:], -moved[..., :half]), -1)
        out = x32 * cos32 + turned
    else:
        out = x32 * cos32 + torch.cat((-x32[..., half:], x32[..., :half]), -1) * sin32
    return out.to(x.dtype).contiguous()
