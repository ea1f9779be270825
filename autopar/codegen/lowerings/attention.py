"""Attention on blocks of the sequence or of heads.

The ring, causal masks that start at a row, and key heads of which a rank needs some.

Forward (Liu et al. 2023, arXiv 2310.01889): each rank keeps its queries while blocks of keys and
values travel; block results o_j with log-sum-exp l_j merge as l = log Σ exp l_j and
o = Σ exp(l_j − l) o_j. Backward: with the whole l saved, each block's gradients are exact by
themselves; dk and dv travel with their block and take the last hop home.

The ranks of a ring must run the same sequence of nodes, so no block is skipped. A causal one needs
no mask where a rank's keys are those of its own rows: its own block comes first, with the op's
causal mask, and of each of the others either all counts or nothing. Elsewhere masks are made for
each block, by global position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from autopar.codegen.builder import Builder
from autopar.codegen.lowering import LocalCall, lowering
from autopar.codegen.lowerings.merging import Merged
from autopar.codegen.lowerings.zigzag import lower_zigzag, lower_zigzag_backward
from autopar.core.key_blocks import is_diagonal
from autopar.core.placement import Layout

aten = torch.ops.aten
autopar = torch.ops.autopar

Nodes = tuple[fx.Node, ...]
Work = Callable[[Nodes, int], Nodes]
"""(blocks, global column that they begin at) -> what to send home with them."""


class _Blocks:
    """Positions and masks of the blocks that a rank sees.

    `column` is the global column at which a block begins.

    Args:
        local: the call.
        first: index of q among the operands; k and v follow.
        mask: the local mask: whole columns, this rank's rows.
    """

    def __init__(
        self, b: Builder, local: LocalCall, first: int, mask: fx.Node | None, is_causal: bool
    ) -> None:
        self.b, self.local, self.mask, self.is_causal = b, local, mask, is_causal
        self.ring = local.axes_of("ring")
        specs = local.call.operands
        self.row = local.offset(b, local.inputs[first], specs[first].shape)[2]
        self.length = specs[first + 1].shape[2]
        unmasked = is_causal and mask is None
        self.is_diagonal = unmasked and is_diagonal(local.call, local.inputs, local.mesh_shape)

    def column(self, steps: dict[int, int]) -> int:
        """Where the block begins that has come `steps` hops along each axis of the ring."""
        start, length = 0, self.length
        for axis in self.ring:
            size = self.local.mesh_shape[axis]
            length //= size
            start += (self.b.coords[axis] - steps.get(axis, 0)) % size * length
        return start

    def masked(self, num_rows: int, num_columns: int, column: int) -> tuple[fx.Node | None, bool]:
        """Mask of a block of scores, and whether the op is to mask it causally."""
        if self.is_diagonal:
            return None, column == self.row
        return self._mask(num_rows, num_columns, column), False

    def counted(self, lse: fx.Node, column: int, none: float) -> fx.Node:
        """The log-sum-exp of a block: `none` where nothing of it counts, which no mask says."""
        if not self.is_diagonal or column == self.row:
            return lse
        return self.b.call(aten.add.Scalar, lse, none if column > self.row else 0.0)

    def _mask(self, num_rows: int, num_columns: int, column: int) -> fx.Node | None:
        b, mask = self.b, self.mask
        if mask is not None and b.shape(mask)[-1] > 1:
            mask = b.call(aten.slice.Tensor, mask, -1, column, column + num_columns)
        if not self.is_causal:
            return mask
        rows = self._positions(self.row, num_rows)
        columns = self._positions(column, num_columns)
        allowed = b.call(aten.ge.Tensor, b.call(aten.unsqueeze.default, rows, -1), columns)
        if mask is None:
            return allowed
        if b.value(mask).dtype == torch.bool:
            return b.call(aten.logical_and.default, mask, allowed)
        return b.call(aten.where.ScalarOther, allowed, mask, -math.inf)

    def _positions(self, start: int, count: int) -> fx.Node:
        return self.b.call(
            aten.arange.start, start, start + count, dtype=torch.int64, device=self.b.device
        )


def _travel(
    blocks: _Blocks, axes: Sequence[int], held: Nodes, steps: dict[int, int], work: Work
) -> Nodes:
    """Run `work` on every block of the ring, one hop apart; returns this rank's own share.

    On each axis the blocks make n − 1 hops, and so do the shares: the first one is made at home,
    and the last hop of the others is to there.
    """
    if not axes:
        return work(held, blocks.column(steps))
    b, axis, rest = blocks.b, axes[0], axes[1:]
    own = _travel(blocks, rest, held, steps, work)
    away: Nodes = ()
    for step in range(1, b.mesh_shape[axis]):
        held = tuple(b.rotate(x, axis) for x in held)
        new = _travel(blocks, rest, held, {**steps, axis: step}, work)
        if step > 1:
            away = tuple(b.rotate(x, axis) for x in away)
            new = tuple(b.call(aten.add.Tensor, x, y) for x, y in zip(away, new, strict=True))
        away = new
    if b.mesh_shape[axis] == 1:
        return own
    home = (b.rotate(x, axis) for x in away)
    return tuple(b.call(aten.add.Tensor, x, y) for x, y in zip(own, home, strict=True))


def _is_plain(local: LocalCall) -> bool:
    return not any(map(local.axes_of, ("ring", "zigzag", "causal_rows")))


class _OwnGroups:
    """The key heads that this rank's query heads attend to, among those that it has.

    Args:
        first: index of q among the operands; k and v follow.
    """

    def __init__(self, b: Builder, local: LocalCall, first: int) -> None:
        self.b = b
        self.begin = self.count = self.held = 0
        if not local.axes_of("grouped"):
            return
        q, k = (spec.shape for spec in local.call.operands[first : first + 2])
        of_q, of_k = local.inputs[first : first + 2]
        group = q[1] // k[1]
        self.held = k[1] // self._ranks(of_k)
        self.count = max(1, q[1] // self._ranks(of_q) // group)
        self.begin = local.offset(b, of_q, q)[1] // group - local.offset(b, of_k, k)[1]

    def _ranks(self, layout: Layout) -> int:
        """How many ranks share the heads."""
        sizes = zip(layout, self.b.mesh_shape, strict=True)
        return math.prod(size for p, size in sizes if p.is_shard and p.dim == 1)

    def pick(self, x: fx.Node) -> fx.Node:
        """The heads of k or v that are needed."""
        if self.count == self.held:
            return x
        return self.b.call(aten.slice.Tensor, x, 1, self.begin, self.begin + self.count)

    def put_back(self, grad: fx.Node) -> fx.Node:
        """A gradient of the needed heads as one of all, a summand of the sum over ranks."""
        if self.count == self.held:
            return grad
        behind = self.held - self.begin - self.count
        return self.b.call(aten.constant_pad_nd.default, grad, [0, 0, 0, 0, self.begin, behind])


@lowering(autopar.attention.default)
def lower_attention(b: Builder, local: LocalCall) -> fx.Node:
    q, k, v, mask, is_causal, scale = local.args
    groups = _OwnGroups(b, local, 0)
    k, v = groups.pick(k), groups.pick(v)
    if _is_plain(local):
        return b.call(autopar.attention.default, q, k, v, mask, is_causal, scale)
    if local.axes_of("zigzag"):
        return lower_zigzag(b, local)
    blocks = _Blocks(b, local, 0, mask, is_causal)
    merged: list[Merged] = []

    def attend(held: Nodes, column: int) -> Nodes:
        how = (*blocks.masked(b.shape(q)[2], b.shape(held[0])[2], column), scale)
        both = b.call(autopar.attention.default, q, *held, *how)
        found = b.item(both, 0), blocks.counted(b.item(both, 1), column, -math.inf)
        if merged:
            merged[0].add(*found)
        else:
            merged.append(Merged(b, *found))
        return ()

    _travel(blocks, blocks.ring, (k, v), {}, attend)
    (whole,) = merged
    out_spec, lse_spec = local.call.outputs
    return b.pack(b.cast(whole.out, out_spec.dtype), b.cast(whole.lse, lse_spec.dtype))


@lowering(autopar.attention_backward.default)
def lower_attention_backward(b: Builder, local: LocalCall) -> fx.Node:
    grad, q, k, v, mask, out, lse, is_causal, scale = local.args
    groups = _OwnGroups(b, local, 1)
    k, v = groups.pick(k), groups.pick(v)
    if _is_plain(local):
        grads = b.call(local.call.target, grad, q, k, v, mask, out, lse, is_causal, scale)
        if groups.count == groups.held:
            return grads
        dq, dk, dv = (b.item(grads, i) for i in range(3))
        return b.pack(dq, groups.put_back(dk), groups.put_back(dv))
    if local.axes_of("zigzag"):
        return lower_zigzag_backward(b, local)
    blocks = _Blocks(b, local, 1, mask, is_causal)
    grads_q: list[fx.Node] = []

    def attend(held: Nodes, column: int) -> Nodes:
        block_mask, causal = blocks.masked(b.shape(q)[2], b.shape(held[0])[2], column)
        counted = blocks.counted(lse, column, math.inf)  # weights are exp(scores - lse)
        rest: tuple[Any, ...] = (block_mask, out, counted, causal, scale)
        grads = b.call(autopar.attention_backward.default, grad, q, *held, *rest)
        grad_q = b.item(grads, 0)
        both = [(b.widen(x), b.widen(grad_q)) for x in grads_q]
        grads_q[:] = [b.call(aten.add.Tensor, *each) for each in both] or [grad_q]
        return b.item(grads, 1), b.item(grads, 2)

    grad_k, grad_v = _travel(blocks, blocks.ring, (k, v), {}, attend)
    grad_k, grad_v = groups.put_back(grad_k), groups.put_back(grad_v)
    return b.pack(b.cast(grads_q[0], b.value(q).dtype), grad_k, grad_v)
