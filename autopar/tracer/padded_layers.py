"""`nn.TransformerEncoder` without gradients, which drops the rows that a padding mask hides.

torch then packs the rows, and where they were, its layers leave zeros. With gradients, or while it
is traced, it keeps them, and what layers make of them. Here the zeros are put in the places.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["encoder_forward"]


def encoder_forward(graded: bool, original: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of an encoder, in a step with gradients or without any."""

    def forward(
        module: nn.TransformerEncoder,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        given = (src, mask, src_key_padding_mask, is_causal)
        if mask is not None or src_key_padding_mask is None or not _packs(module, src, graded):
            return original(module, *given)
        norm, module.norm = module.norm, None
        try:
            out = original(module, *given)
        finally:
            module.norm = norm
        out = torch.where(_kept(module, src_key_padding_mask).unsqueeze(-1), out, 0.0)
        return out if norm is None else norm(out)

    return forward


def _packs(module: nn.TransformerEncoder, src: Tensor, graded: bool) -> bool:
    """True where torch packs rows, as far as it does not depend on the mask."""
    first: Any = module.layers[0]
    if not getattr(module, "use_nested_tensor", False) or first.training or src.dim() != 3:
        return False
    if torch.is_autocast_enabled() or not torch.backends.mha.get_fastpath_enabled():
        return False
    inputs = (src, *first.parameters())
    return not (graded and torch.is_grad_enabled() and any(x.requires_grad for x in inputs))


def _kept(module: nn.TransformerEncoder, padding: Tensor) -> Tensor:
    """The rows (batch, steps) that are not set to zero: all, where one is hidden before others."""
    kept = padding.logical_not()
    if not getattr(module, "mask_check", True):
        return kept
    step = torch.arange(kept.shape[1], device=kept.device)
    in_front = (kept == (step < kept.sum(1, keepdim=True))).all()
    return kept | in_front.logical_not()
