"""Softmax over blocks of columns: partial results merge by their log-sum-exp (arXiv 2310.01889)."""

from __future__ import annotations

import torch
from torch import fx

from autopar.codegen.builder import Builder

__all__ = ["Merged"]

aten = torch.ops.aten


class Merged:
    """Running result of rows over the blocks seen so far.

    Attributes:
        out: (B, H, rows, D), in at least float32 once there are two blocks.
        lse: log-sum-exp of each row, (B, H, rows).
    """

    def __init__(self, b: Builder, out: fx.Node, lse: fx.Node) -> None:
        self.b, self.out, self.lse = b, out, lse

    def add(self, out: fx.Node, lse: fx.Node) -> None:
        """Merge what the rows have of another block."""
        b = self.b
        self.out, out = b.widen(self.out), b.widen(out)
        total = b.call(aten.logaddexp.default, self.lse, lse)
        # a row with nothing to attend to so far has lse −inf, and keeps the weights 0
        infinite = b.call(aten.isinf.default, total)
        safe = b.call(aten.masked_fill.Scalar, total, infinite, 0.0)
        self.out = b.call(
            aten.add.Tensor,
            self._weighted(self.out, self.lse, safe),
            self._weighted(out, lse, safe),
        )
        self.lse = total

    def _weighted(self, out: fx.Node, lse: fx.Node, total: fx.Node) -> fx.Node:
        b = self.b
        weight = b.call(aten.exp.default, b.call(aten.sub.Tensor, lse, total))
        return b.call(aten.mul.Tensor, out, b.call(aten.unsqueeze.default, weight, -1))
