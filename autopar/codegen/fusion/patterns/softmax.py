"""Softmax with its scale and mask, and its gradient."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from autopar.codegen.fusion.matching import K, Op, V, find, look_through
from autopar.codegen.fusion.registry import pattern
from autopar.codegen.fusion.rewriter import Rewriter
from autopar.core.graph import value_of

aten = torch.ops.aten
_TIMES = (aten.mul.Tensor, aten.mul.Scalar)
_OVER = (aten.div.Tensor, aten.div.Scalar)
_NOT = (aten.bitwise_not.default, aten.logical_not.default)


def _last(x: fx.Node, dim: Any) -> bool:
    return dim in (-1, value_of(x).dim() - 1)


def _scaled(node: fx.Node, inner: set[fx.Node]) -> tuple[fx.Node, float]:
    """Operand and factor of a product with a number."""
    for targets, inverse in ((_TIMES, False), (_OVER, True)):
        match = find(Op(targets, V("x"), K("scale")), look_through(node))
        if match is not None and isinstance(match["scale"], (int, float)) and match["scale"]:
            inner.add(match.root)
            return match["x"], 1.0 / match["scale"] if inverse else float(match["scale"])
    return node, 1.0


@pattern("softmax", aten._softmax.default, rank=60)
def softmax(rewriter: Rewriter, root: fx.Node) -> bool:
    """softmax(x · scale with −∞ where the mask is False); a plain softmax is left to ATen."""
    source, dim, _ = root.args
    assert isinstance(source, fx.Node)
    if not _last(root, dim):
        return False
    inner, mask, logits = {root}, None, source
    masked = find(
        Op(aten.masked_fill.Scalar, V("x"), Op(_NOT, V("mask"), given=True), -math.inf),
        look_through(source),
    )
    if masked is not None and value_of(masked["mask"]).dtype == torch.bool:
        inner.add(masked.root)
        logits, mask = masked["x"], masked["mask"]
    x, scale = _scaled(logits, inner)
    if len(inner) == 1 or not rewriter.is_private(inner, {root}):
        return False
    if any(n.meta.get("phase") != root.meta.get("phase") for n in inner):
        return False
    return rewriter.fused("masked_softmax", root, (x, mask, scale), {0: root})


@pattern("softmax", aten._softmax_backward_data.default, rank=20)
def softmax_backward(rewriter: Rewriter, root: fx.Node) -> bool:
    """scale · p · (dp − Σ p dp); what the mask hides has p = 0 and needs no mask."""
    grad, out, dim, _ = root.args
    assert isinstance(grad, fx.Node) and isinstance(out, fx.Node)
    if not _last(root, dim):
        return False
    last, scale, inner = root, 1.0, {root}
    for targets, hidden in ((aten.masked_fill.Scalar, True), (_TIMES, False)):
        users = rewriter.users(last)
        if len(users) != 1:
            break
        (user,) = users
        if hidden:
            match = find(Op(targets, V("x"), V("mask"), 0), user)
            if match is None or not _hides(out, match["mask"]):
                continue
        else:
            match = find(Op(targets, V("x"), K("scale")), user)
            if match is None or not isinstance(match["scale"], (int, float)):
                continue
            scale = float(match["scale"])
        if look_through(match["x"]) is not last or user.meta.get("phase") != root.meta.get("phase"):
            break
        last = user
        inner.add(user)
    if last is root:
        return False
    return rewriter.fused("softmax_backward", last, (grad, out, scale), {0: last})


def _hides(out: fx.Node, mask: fx.Node) -> bool:
    """True if the softmax `out` is 0 wherever `mask` is True."""
    source = look_through(out)
    if source.target is torch.ops.autopar_kernels.masked_softmax.default:
        kept = source.args[1]
        negated = look_through(mask)
        return (
            isinstance(kept, fx.Node)
            and negated.target in _NOT
            and isinstance(negated.args[0], fx.Node)
            and look_through(negated.args[0]) is look_through(kept)
        )
    if source.target is not aten._softmax.default or not isinstance(source.args[0], fx.Node):
        return False
    found = find(
        Op(aten.masked_fill.Scalar, V("x"), V("mask"), -math.inf), look_through(source.args[0])
    )
    return found is not None and look_through(found["mask"]) is look_through(mask)
