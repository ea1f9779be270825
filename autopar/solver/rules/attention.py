"""Attention: batch and heads are local; the sequence needs the ring, or replicated keys.

out = softmax(q kᵀ · scale + mask) v with q (B, H, S, D) and k, v (B, H_kv, T, D). With the
variant "ring" (Liu et al. 2023, arXiv 2310.01889) the sequence of q, k and v is sharded, k and v
travel around the ring, and the partial results merge by their log-sum-exp. With "zigzag", that of
causal attention, ranks exchange rows so that all have equally much to do. With "causal_rows"
only q's sequence is sharded, and the causal mask starts at the block's row. With "grouped" the
query heads are sharded over more ranks than there are key heads: k and v are whole, and a rank
takes the heads of them that its query heads attend to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from autopar.core.key_blocks import first_operand, is_causal
from autopar.core.placement import Partial, Placement, Replicate, Shard
from autopar.core.strategy import AxisStrategy, Communication, OpCall
from autopar.solver.rules.labels import replicated
from autopar.solver.rules.registry import combination, rule

_BATCH, _HEADS, _ROWS = 0, 1, 2
_R = Replicate()


def _mask_placement(call: OpCall, position: int, dim: int) -> tuple[Placement, ...]:
    """How the mask (if any) follows a shard of dim `dim` of the scores `(B, H, S, T)`."""
    index = call.operand_index(position)
    if index is None:
        return ()
    shape = call.operands[index].shape
    own = dim - (4 - len(shape))
    return (Shard(own) if own >= 0 and shape[own] > 1 else _R,)


def _regular(call: OpCall, first: int) -> bool:
    """Four dims each, and no batch that broadcasts."""
    q, k, v = call.operands[first : first + 3]
    same_batch = q.shape[:1] == k.shape[:1] == v.shape[:1]
    return len(q.shape) == len(k.shape) == len(v.shape) == 4 and same_batch


def _is_grouped(call: OpCall, first: int) -> bool:
    """Several key heads, each of several query heads."""
    return 1 < call.operands[first + 1].shape[1] < call.operands[first].shape[1]


@combination(torch.ops.autopar.attention.default, torch.ops.autopar.attention_backward.default)
def heads_nest(call: OpCall, rows: Sequence[AxisStrategy], mesh: Sequence[int]) -> bool:
    """A rank's query heads attend to key heads that it has, and all to equally many.

    So axes that shard the key heads come before those on which a rank picks its own, and a rank has
    a part of one group of query heads, or whole groups. Ranks exchange rows over one axis alone.
    """
    first = first_operand(call)
    variants = {row.variant for row in rows}
    if "zigzag" in variants and sum(row.inputs[first] == Shard(_ROWS) for row in rows) > 1:
        return False
    if "grouped" not in variants:
        return True
    if variants & {"ring", "zigzag"}:  # it would send heads that the next rank does not need
        return False
    picking = False
    for row in rows:
        picking |= row.variant == "grouped"
        kv = row.inputs[first + 1]
        if picking and kv.is_shard and kv.dim == 1:
            return False
    placed = zip((row.inputs[first] for row in rows), mesh, strict=True)
    ranks = math.prod(size for p, size in placed if p.is_shard and p.dim == 1)
    heads, kv_heads = (call.operands[i].shape[1] for i in (first, first + 1))
    group, own = heads // kv_heads, heads // ranks
    return own > 0 and (own % group == 0 or group % own == 0)


def _may_zigzag(call: OpCall) -> bool:
    """Causal and without another mask, and each rank's rows are two chunks."""
    first = first_operand(call)
    q, k = (spec.shape[_ROWS] for spec in call.operands[first : first + 2])
    plain = is_causal(call) and call.operand_index(first + 3) is None
    return plain and q == k and q % (2 * call.axis_size) == 0 and call.axis_size % 2 == 0


def _exchanged(tensors: tuple[int, ...]) -> tuple[Communication, ...]:
    return tuple(Communication("all_to_all", t) for t in tensors)


def _ring_comm(tensors: tuple[int, ...], axis_size: int) -> tuple[Communication, ...]:
    return tuple(Communication("send_recv", t, nested=True) for t in tensors) * (axis_size - 1)


@rule(torch.ops.autopar.attention.default)
def attention_rule(call: OpCall) -> list[AxisStrategy]:
    """(q, k, v, mask?) -> (out, lse)."""
    rows = [replicated(call)]
    if not _regular(call, 0):
        return rows

    def add(
        dim: int, kv: Placement, variant: str = "", comm: tuple[Communication, ...] = ()
    ) -> None:
        shard = Shard(dim)
        inputs = (shard, kv, kv, *_mask_placement(call, 3, dim))
        rows.append(AxisStrategy(inputs, (shard, shard), variant, comm))

    add(_BATCH, Shard(0))
    add(_HEADS, _R if call.operands[1].shape[1] == 1 else Shard(1))
    if _is_grouped(call, 0):
        add(_HEADS, _R, "grouped")
    add(_ROWS, _R, "causal_rows" if call.args[4] else "")
    ring = _ring_comm((1, 2), call.axis_size)
    add(_ROWS, Shard(2), "ring", ring)
    if _may_zigzag(call):
        add(_ROWS, Shard(2), "zigzag", _exchanged((0, 1, 2, ~0, ~1)) + ring)
    return rows


@rule(torch.ops.autopar.attention_backward.default)
def attention_backward_rule(call: OpCall) -> list[AxisStrategy]:
    """(grad, q, k, v, mask?, out, lse) -> (dq, dk, dv); in the ring dk and dv travel too."""
    rows = [replicated(call)]
    if not _regular(call, 1):
        return rows

    def add(
        dim: int,
        kv: Placement,
        grad_kv: Placement,
        variant: str = "",
        comm: tuple[Communication, ...] = (),
    ) -> None:
        shard = Shard(dim)
        inputs = (shard, shard, kv, kv, *_mask_placement(call, 4, dim), shard, shard)
        rows.append(AxisStrategy(inputs, (shard, grad_kv, grad_kv), variant, comm))

    add(_BATCH, Shard(0), Shard(0))
    if call.operands[2].shape[1] == 1:
        add(_HEADS, _R, Partial())
    else:
        add(_HEADS, Shard(1), Shard(1))
    if _is_grouped(call, 1):
        add(_HEADS, _R, Partial(), "grouped")
    add(_ROWS, _R, Partial(), "causal_rows" if call.args[7] else "")
    ring = _ring_comm((2, 3, ~1, ~2), call.axis_size)
    add(_ROWS, Shard(2), Shard(2), "ring", ring)
    if _may_zigzag(call):
        exchanged = _exchanged((*range(6), ~0, ~1, ~2))
        add(_ROWS, Shard(2), Shard(2), "zigzag", exchanged + ring)
    return rows
