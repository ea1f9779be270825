"""Rotary embedding of halves, and its gradient as the tracer leaves it."""

from __future__ import annotations

import sys

import torch
from torch import fx

from autopar.codegen.fusion.matching import K, Match, Op, V, find
from autopar.codegen.fusion.registry import pattern
from autopar.codegen.fusion.rewriter import Rewriter
from autopar.core.graph import value_of

aten = torch.ops.aten
_MUL, _ADD = aten.mul.Tensor, aten.add.Tensor

_TURNED = Op(
    aten.cat.default,
    [
        Op(aten.neg.default, Op(aten.slice.Tensor, V("x"), K("dim"), K("half"), K("end"))),
        Op(aten.slice.Tensor, V("x"), K("dim"), 0, K("half")),
    ],
    K("last"),
)
_FORWARD = Op(_ADD, Op(_MUL, V("x"), V("cos")), Op(_MUL, _TURNED, V("sin")))
_SIN = Op(_MUL, V("x"), V("sin"))
_BACK = Op(
    aten.cat.default,
    [
        Op(aten.slice.Tensor, _SIN, K("dim"), K("half"), K("end")),
        Op(aten.neg.default, Op(aten.slice.Tensor, _SIN, K("dim"), 0, K("half"))),
    ],
    K("last"),
)
_BACKWARD = Op(_ADD, _BACK, Op(_MUL, V("x"), V("cos")))


def _is_rotation(match: Match) -> bool:
    """Halves of the last of four dims, and tables that broadcast to it without growing it."""
    x = value_of(match["x"])
    size = x.shape[-1]
    if x.dim() != 4 or match["dim"] not in (3, -1) or match.bound.get("last", -1) not in (3, -1):
        return False
    if 2 * match["half"] != size or not size <= match["end"] <= sys.maxsize:
        return False
    tables = [value_of(match[k]) for k in ("cos", "sin")]
    return value_of(match.root).shape == x.shape and all(t.shape[-1] == size for t in tables)


def _rotate(rewriter: Rewriter, pattern_: Op, root: fx.Node, inverse: bool) -> bool:
    match = find(pattern_, root)
    if match is None or not _is_rotation(match):
        return False
    if not rewriter.is_private(match.inner, {root}):
        return False
    args = (match["x"], match["cos"], match["sin"], inverse)
    return rewriter.fused("rotary", root, args, {0: root})


@pattern("rotary", _ADD, rank=40)
def rotary(rewriter: Rewriter, root: fx.Node) -> bool:
    """x·cos + (−x₂, x₁)·sin."""
    return _rotate(rewriter, _FORWARD, root, False)


@pattern("rotary", _ADD, rank=40)
def rotary_backward(rewriter: Rewriter, root: fx.Node) -> bool:
    """Its transpose."""
    return _rotate(rewriter, _BACKWARD, root, True)
