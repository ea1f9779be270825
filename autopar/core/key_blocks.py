"""Causal attention over shards of the sequence: which blocks of scores need a mask.

A ring that shards rows and columns alike leaves three kinds of blocks: on the diagonal, which an
op's own causal mask covers; before it, which no mask touches; and behind it, which do not count.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopar.core.placement import Layout
from autopar.core.strategy import OpCall

__all__ = ["first_operand", "is_causal", "is_diagonal", "ring_axes"]

_SEQUENCE = 2  # dim of q, k and v


def first_operand(call: OpCall) -> int:
    """Index of q among the operands of attention or its backward; k and v follow."""
    return 1 if call.target is torch.ops.autopar.attention_backward.default else 0


def is_causal(call: OpCall) -> bool:
    """True for attention with the op's own causal mask."""
    return len(call.args) > 2 and call.args[-2] is True


def ring_axes(variants: Sequence[str], mesh: Sequence[int]) -> list[int]:
    """Mesh axes of several devices around which keys travel."""
    pairs = enumerate(zip(variants, mesh, strict=True))
    return [axis for axis, (name, n) in pairs if n > 1 and name in ("ring", "zigzag")]


def is_diagonal(call: OpCall, inputs: Sequence[Layout], mesh: Sequence[int]) -> bool:
    """True where the keys that a rank holds are those of its own rows, whatever rank it is."""
    first = first_operand(call)
    q, k = call.operands[first : first + 2]
    if q.shape[_SEQUENCE] != k.shape[_SEQUENCE]:
        return False
    rows, columns = (_sharded_over(layout, mesh) for layout in inputs[first : first + 2])
    return rows == columns


def _sharded_over(layout: Layout, mesh: Sequence[int]) -> list[int]:
    pairs = enumerate(zip(layout, mesh, strict=True))
    return [axis for axis, (p, n) in pairs if n > 1 and p.is_shard and p.dim == _SEQUENCE]
