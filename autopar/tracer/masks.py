"""Attention masks that depend on no input, said as attention's own arguments.

`torch.export` of a model that makes its mask from positions leaves the mask in the graph, where the
model, when it runs, leaves it out (it sees that nothing is masked) or asks for `is_causal`. Such a
mask is computed here, once, on the CPU: one that allows everything is dropped, and a square lower
triangle becomes `is_causal`, for which kernels do half the work and no mask is stored or read.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["is_repeatable", "say_plain_masks"]

aten = torch.ops.aten

# elements of what is computed on the way: the mask of 16,384 positions
_LIMIT = 1 << 28


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
        value = _constant(mask, {})
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


def _constant(node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    """The value of a node that is computed from numbers alone; None for any other, or a large one.

    Args:
        node: of an exported graph.
        known: values of nodes met before.
    """
    if node in known:
        return known[node]
    known[node] = None
    fake = node.meta.get("val")
    if not isinstance(fake, Tensor) or not is_repeatable(node.target):
        return None
    if math.prod(fake.shape) > _LIMIT and not _is_view(node.target):
        return None
    sources = [_constant(source, known) for source in node.all_input_nodes]
    if any(source is None for source in sources):
        return None

    def swap(arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            return known[arg]
        return torch.device("cpu") if isinstance(arg, torch.device) else arg

    args, kwargs = map_aggregate((tuple(node.args), dict(node.kwargs)), swap)
    known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return known[node]


def _is_view(target: Any) -> bool:
    return target in (aten.expand.default, aten.unsqueeze.default, aten.view.default)


def is_repeatable(target: Any) -> bool:
    """True for an op that gives the same each time and writes to nothing."""
    return (
        isinstance(target, torch._ops.OpOverload)
        and not target._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in target.tags
        and "empty" not in target._schema.name
    )
