"""Dropout, whose mask is drawn inside the kernel, with the residual add behind it."""

from __future__ import annotations

import torch
from torch import fx

from autopar.codegen.fusion.matching import K, Op, V, find
from autopar.codegen.fusion.patterns.activation import _biased
from autopar.codegen.fusion.registry import pattern
from autopar.codegen.fusion.rewriter import Rewriter
from autopar.core.graph import value_of

aten = torch.ops.aten
_DROPOUT = Op(
    torch.ops.autopar.dropout.default, V("x"), K("p"), V("seed"), K("salt"), K("shape"), K("offset")
)
_ADDED = Op(aten.add.Tensor, V("residual"), _DROPOUT)


@pattern("dropout_add", aten.add.Tensor, rank=55)
def dropout_add(rewriter: Rewriter, root: fx.Node) -> bool:
    """residual + dropout(x + bias)."""
    match = find(_ADDED, root)
    if match is None or not rewriter.is_private(match.inner, {root}):
        return False
    if value_of(match["residual"]).shape != value_of(root).shape:
        return False
    x, bias = _biased(match["x"])
    if bias is not None and not rewriter.is_private({match["x"], *match.inner}, {root}):
        x, bias = match["x"], None
    random = (match["p"], match["seed"], match["salt"], match["shape"], match["offset"])
    if value_of(x).shape != value_of(root).shape:
        return False
    return rewriter.fused("dropout_add", root, (x, bias, match["residual"], *random), {0: root})


@pattern("dropout", torch.ops.autopar.dropout.default, rank=80)
def dropout(rewriter: Rewriter, root: fx.Node) -> bool:
    """What is left of dropout."""
    match = find(_DROPOUT, root)
    return match is not None and rewriter.fused("dropout", root, root.args, {0: root})
