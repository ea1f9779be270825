"""Grouped-query attention: key and value heads that a model repeats are passed on unrepeated.

Models repeat each of H_kv key heads for the G query heads of its group before they call attention
(Ainslie et al. 2023, arXiv 2305.13245). Attention takes fewer key heads itself: the repeated ones
are neither made nor saved for the backward, which for G = 8 is most of what attention saves.
Heads that are repeated behind their tokens, dim 2 of (B, S, H, D), are left as they are.
"""

from __future__ import annotations

import torch
from torch import fx

__all__ = ["join_repeated_heads"]

aten = torch.ops.aten

_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_COPIES = (aten.clone.default, aten.contiguous.default)


def join_repeated_heads(graph: fx.Graph) -> None:
    """Let `scaled_dot_product_attention` read keys and values as they are before repetition."""
    for node in graph.nodes:
        if node.target is not aten.scaled_dot_product_attention.default:
            continue
        query, key, value, *rest = node.args
        if not isinstance(key, fx.Node) or not isinstance(value, fx.Node):
            continue
        sources = _repeated(key), _repeated(value)
        if sources[0] is None or sources[1] is None:
            continue
        heads = {_shape(source)[1] for source in sources if source is not None}
        if len(heads) == 1 and _shape(query)[1] == _shape(key)[1]:
            node.args = (query, *sources, *rest)
            node.kwargs = {**node.kwargs, "enable_gqa": True}


def _shape(node: object) -> tuple[int, ...]:
    assert isinstance(node, fx.Node)
    return tuple(node.meta["val"].shape)


def _repeated(node: fx.Node) -> fx.Node | None:
    """`(B, H_kv, S, D)` of which `node` repeats each head some times in a row; None if it is not.

    As `repeat_interleave`, or as a new dim behind the heads that is expanded and flattened.
    """
    if len(_shape(node)) != 4:
        return None
    if node.target is aten.repeat_interleave.self_int:
        source, _, *dim = node.args
        (where,) = dim or [node.kwargs.get("dim")]
        return source if isinstance(source, fx.Node) and where in (1, -3) else None
    wide = node
    while wide.target in (*_VIEWS, *_COPIES) and len(_shape(wide)) == 4:
        wide = wide.args[0]  # type: ignore[assignment]
    while wide.target in _COPIES:
        wide = wide.args[0]  # type: ignore[assignment]
    if wide.target is not aten.expand.default or len(_shape(wide)) != 5:
        return None
    batch, heads, groups, rows, width = _shape(wide)
    narrow = wide.args[0]
    if _shape(node) != (batch, heads * groups, rows, width):
        return None
    if _shape(narrow) != (batch, heads, 1, rows, width):
        return None
    assert isinstance(narrow, fx.Node)
    if narrow.target not in (aten.unsqueeze.default, *_VIEWS):  # an input has no operand, for one
        return None
    source = narrow.args[0]
    if not isinstance(source, fx.Node) or _shape(source) != (batch, heads, rows, width):
        return None
    return source
