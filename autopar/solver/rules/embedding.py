"""Embeddings: the indices' dims and the hidden dim are local; the vocabulary by masked lookup.

With the variant "vocab" (Shoeybi et al. 2019, arXiv 1909.08053) a rank holds some rows of the
table, looks up what it has, and gives 0 for the rest: the outputs sum to the whole one.
"""

from __future__ import annotations

import torch

from autopar.core.placement import Partial, Placement, Replicate, Shard
from autopar.core.strategy import AxisStrategy, OpCall
from autopar.solver.rules.labels import by_labels, linear_rows, replicated_row
from autopar.solver.rules.registry import rule

aten = torch.ops.aten
_MODE_MAX = 2


@rule(aten.embedding.default)
def embedding_rule(call: OpCall) -> list[AxisStrategy]:
    """(weight, indices) -> out, linear in weight."""
    dims = [f"i{d}" for d in range(len(call.operands[1].shape))]
    rows = by_labels(call, [[None, "h"], dims], [[*dims, "h"]])
    rows.append(AxisStrategy((Shard(0), Replicate()), (Partial(),), "vocab"))
    return rows + linear_rows(call, [(0,)])


@rule(aten.embedding_dense_backward.default)
def embedding_backward_rule(call: OpCall) -> list[AxisStrategy]:
    """(grad, indices) -> d weight; a shard of the indices cannot count an index's frequency."""
    dims = [f"i{d}" for d in range(len(call.operands[1].shape))]
    by_frequency = call.args[4]
    rows = by_labels(call, [[*dims, "h"], dims], [[None, "h"]], summed=() if by_frequency else dims)
    rows.append(AxisStrategy((Replicate(), Replicate()), (Shard(0),), "vocab"))
    return rows + linear_rows(call, [(0,)])


@rule(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def embedding_bag_rule(call: OpCall) -> list[AxisStrategy]:
    """(weight, indices, offsets, sample weights?) -> (out, bag of each index, sizes, argmax)."""
    rest = tuple(Replicate() for _ in call.operands[1:])
    argmax = Shard(1) if call.arg(4, "mode", 0) == _MODE_MAX else Replicate()
    outputs = (Shard(1), Replicate(), Replicate(), argmax)
    return [replicated_row(call), AxisStrategy((Shard(1), *rest), outputs)]


@rule(aten._embedding_bag_dense_backward.default)
def embedding_bag_backward_rule(call: OpCall) -> list[AxisStrategy]:
    """(grad, indices, bag of each index, sizes, argmax, sample weights?) -> d weight."""
    argmax: Placement = Shard(1) if call.args[7] == _MODE_MAX else Replicate()
    weights = tuple(Replicate() for _ in call.operands[5:])
    hidden = (Shard(1), Replicate(), Replicate(), Replicate(), argmax, *weights)
    rows = [replicated_row(call), AxisStrategy(hidden, (Shard(1),))]
    return rows + linear_rows(call, [(0,)])


@rule(aten._embedding_bag_per_sample_weights_backward.default)
def embedding_bag_weights_rule(call: OpCall) -> list[AxisStrategy]:
    """(grad, weight, indices, …) -> d sample weights, a sum over the hidden dim."""
    rest = tuple(Replicate() for _ in call.operands[2:])
    rows = [replicated_row(call), AxisStrategy((Shard(1), Shard(1), *rest), (Partial(),))]
    return rows + linear_rows(call, [(0,), (1,)])
