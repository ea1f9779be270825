"""Softmax over the last dim with its scale and mask: p = exp(z − max z) / Σ exp(z − max z).

z = x · scale, −∞ where the mask is False. Backward: dx = scale · p · (dp − Σ p·dp). One pass over a
row, held in registers (after Milakov and Gimelshein 2018, arXiv 1805.02867).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from autopar.kernels.registry import define, row_fits, wide

__all__: list[str] = []


def _fits(x: Tensor, *_: object) -> bool:
    return row_fits(x)


def _softmax_fake(x, mask, scale):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape)


def _backward_fake(grad, out, scale):  # type: ignore[no-untyped-def]
    return out.new_empty(out.shape)


@define(
    "masked_softmax(Tensor x, Tensor? mask, float scale) -> Tensor",
    module="softmax",
    fake=_softmax_fake,
    takes=_fits,
)
def masked_softmax(x: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Softmax of x · scale where `mask` (bool, broadcasts to `x`) is True, 0 elsewhere.

    A row without any True gives NaN, as in torch.
    """
    z = wide(x) * scale
    if mask is not None:
        z = z.masked_fill(~mask, -math.inf)
    return torch.softmax(z, -1).to(x.dtype).contiguous()


@define(
    "softmax_backward(Tensor grad, Tensor out, float scale) -> Tensor",
    module="softmax",
    fake=_backward_fake,
    takes=_fits,
)
def softmax_backward(grad: Tensor, out: Tensor, scale: float) -> Tensor:
    """Gradient of x from that of the softmax and the softmax itself."""
    grad32, p = wide(grad), wide(out)
    dx = scale * p * (grad32 - (grad32 * p).sum(-1, keepdim=True))
    return dx.to(out.dtype).contiguous()
