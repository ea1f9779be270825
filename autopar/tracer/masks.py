"""Attention masks that depend on no input, expressed by attention's own arguments.

`torch.export` of a model that makes its mask from positions leaves the mask in the graph, where the
model, when it runs, leaves it out (it sees that nothing is masked) or asks for `is_causal`. Such a
mask is computed here, once, on the CPU: one that allows everything is dropped, and a square lower
triangle becomes `is_causal`, for which kernels do half the work and no mask is stored or read.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from autopar.tracer.constants import constant

__all__ = ["say_plain_masks"]

aten = torch.ops.aten


def say_plain_masks(graph: fx.Graph) -> None:
    """Drop or shorten constant boolean masks of `scaled_dot_product_attention`, in place."""
    kinds: dict[fx.Node, str | None] = {}
    for node in graph.nodes:
        if node.target is not aten.scaled_dot_product_attention.default:
            continue
        mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
        if not isinstance(mask, fx.Node) or mask.meta["val"].dtype != torch.bool:
            continue
        if mask not in kinds:
            kinds[mask] = _kind(mask)
        if kinds[mask] is not None:
            query, key, value, *rest = node.args
            dropout = rest[1] if len(rest) > 1 else node.kwargs.get("dropout_p", 0.0)
            node.args = (query, key, value, None, dropout, kinds[mask] == "causal")
            node.kwargs = {k: v for k, v in node.kwargs.items() if k in ("scale", "enable_gqa")}


def _kind(mask: fx.Node) -> str | None:
    """What a mask says: "all", "causal", or None for all else and where it is not a constant."""
    with _disable_current_modes():
        value = constant(mask, {})
        if value is None:
            return None
        # a dim that was expanded says the same everywhere
        part = value[tuple(slice(None) if step else slice(1) for step in value.stride())]
        if bool(part.all()):
            return "all"
        rows, columns = value.shape[-2:]
        if rows == columns and part.shape[-2:] == (rows, columns):
            if bool((part == torch.ones(rows, columns, dtype=torch.bool).tril()).all()):
                return "causal"
    return None
