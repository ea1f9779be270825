"""Attention: batch and heads are local; the sequence needs the ring, or replicated keys.

out = softmax(q kᵀ · scale + mask) v with q (B, H, S, D) and k, v (B, H_kv, T, D). With the
variant "ring" (Liu et al. 2023, arXiv 2310.01889) the sequence of q, k and v is sharded, k and v
travel around the ring, and the partial results merge by their log-sum-exp. With "causal_rows"
only q's sequence is sharded, and the causal mask starts at the block's row.
"""

from __future__ import annotations

import torch

from autopar.core.placement import Partial, Placement, Replicate, Shard
from autopar.core.strategy import AxisStrategy, Communication, OpCall
from autopar.solver.rules.labels import replicated_row
from autopar.solver.rules.registry import rule

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


def _ring_comm(tensors: tuple[int, ...], axis_size: int) -> tuple[Communication, ...]:
    return tuple(Communication("send_recv", t) for t in tensors) * (axis_size - 1)


@rule(torch.ops.autopar.attention.default)
def attention_rule(call: OpCall) -> list[AxisStrategy]:
    """(q, k, v, mask?) -> (out, lse)."""
    rows = [replicated_row(call)]
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
    add(_ROWS, _R, "causal_rows" if call.args[4] else "")
    add(_ROWS, Shard(2), "ring", _ring_comm((1, 2), call.axis_size))
    return rows


@rule(torch.ops.autopar.attention_backward.default)
def attention_backward_rule(call: OpCall) -> list[AxisStrategy]:
    """(grad, q, k, v, mask?, out, lse) -> (dq, dk, dv); in the ring dk and dv travel too."""
    rows = [replicated_row(call)]
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
    add(_ROWS, _R, Partial(), "causal_rows" if call.args[7] else "")
    add(_ROWS, Shard(2), Shard(2), "ring", _ring_comm((2, 3, ~1, ~2), call.axis_size))
    return rows
