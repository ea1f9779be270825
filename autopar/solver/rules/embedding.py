"""Embeddings: the indices' dims and the hidden dim are local; the vocabulary by masked lookup.

With the variant "vocab" (Shoeybi et al. 2019, arXiv 1909.08053) a rank holds some rows of the
table, looks up what it has, and gives 0 for the rest: the outputs sum to the whole one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.core.placement import Partial, Placement, Replicate, Shard
from autopar.core.strategy import AxisStrategy, OpCall, TensorSpec
from autopar.solver.rules.labels import by_labels, linear_rows, replicated
from autopar.solver.rules.registry import facts, rule

aten = torch.ops.aten
_MODE_MAX = 2
_BAGS = (
    aten._embedding_bag.default,
    aten._embedding_bag_forward_only.default,
    aten._embedding_bag_dense_backward.default,
    aten._embedding_bag_per_sample_weights_backward.default,
)


@rule(aten.embedding.default)
def embedding_rule(call: OpCall) -> list[AxisStrategy]:
    """(weight, indices) -> out, linear in weight."""
    dims = [f"i{d}" for d in range(len(call.operands[1].shape))]
    rows = by_labels(call, [[None, "h"], dims], [[*dims, "h"]])
    rows.append(AxisStrategy((Shard(0), Replicate()), (Partial(),), "vocab", copied=(~0,)))
    return rows + linear_rows(call, [(0,)])


@rule(aten.embedding_dense_backward.default)
def embedding_backward_rule(call: OpCall) -> list[AxisStrategy]:
    """(grad, indices) -> d weight; a shard of the indices cannot count an index's frequency."""
    dims = [f"i{d}" for d in range(len(call.operands[1].shape))]
    by_frequency = call.args[4]
    rows = by_labels(call, [[*dims, "h"], dims], [[None, "h"]], summed=() if by_frequency else dims)
    rows.append(AxisStrategy((Replicate(), Replicate()), (Shard(0),), "vocab"))
    return rows + linear_rows(call, [(0,)])


def _begins(offsets: Any) -> tuple[Any, Any, Any] | None:
    """Start, end and step of offsets that an arange makes: 0, L, 2L, … for bags of L indices."""
    if isinstance(offsets, fx.Node) and offsets.target is aten.alias.default:
        return _begins(offsets.args[0])
    if isinstance(offsets, fx.Node) and offsets.target is aten.arange.start_step:
        start, end, step = (*offsets.args, 1)[:3]
        return start, end, step
    if isinstance(offsets, fx.Node) and offsets.target is aten.arange.default:
        return 0, offsets.args[0], 1
    return None


def _offsets(call: OpCall) -> Any:
    """The offsets, which the gradient has the bag of each index from (`tracer/formulas.py`)."""
    node: Any = call.nodes[_INDICES.get(call.target, 1) + 1]
    if call.target is not aten._embedding_bag_dense_backward.default:
        return node
    found = node.args[0] if node.target is aten.sub.Tensor else None
    is_search = isinstance(found, fx.Node) and found.target is aten.searchsorted.Tensor
    return found.args[0] if is_search and isinstance(found, fx.Node) else None


_INDICES = {aten._embedding_bag_per_sample_weights_backward.default: 2}


@facts(*_BAGS)
def equal_bags(call: OpCall) -> bool:
    """True if all bags have as many indices, which is known before their values are."""
    num_indices = call.operands[_INDICES.get(call.target, 1)].shape[0]
    lead = call.outputs if call.target in _BAGS[:2] else call.operands
    num_bags, begins = lead[0].shape[0], _begins(_offsets(call))
    return num_bags > 0 and begins == (0, num_indices, num_indices // num_bags)


def _by_bag(spec: TensorSpec, num_bags: int) -> Placement:
    """Of the argmax: one row a bag, or nothing in modes that have none."""
    return Shard(0) if spec.shape[:1] == (num_bags,) else Replicate()


@rule(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def embedding_bag_rule(call: OpCall) -> list[AxisStrategy]:
    """(weight, indices, offsets, sample weights?) -> (out, bag of each index, sizes, argmax).

    Bags that all have as many indices, as those of a 2-D input, are split with their indices. Where
    other bags begin is known to the values of the offsets only, so no rank has a fixed share of
    the indices.
    """
    rest = tuple(Replicate() for _ in call.operands[1:])
    argmax = Shard(1) if call.arg(4, "mode", 0) == _MODE_MAX else Replicate()
    outputs = (Shard(1), Replicate(), Replicate(), argmax)
    rows = [replicated(call), AxisStrategy((Shard(1), *rest), outputs)]
    num_bags = call.outputs[0].shape[0]
    if equal_bags(call):
        weights = tuple(Shard(0) for _ in call.operands[3:])
        outputs = (Shard(0), Replicate(), Shard(0), _by_bag(call.outputs[3], num_bags))
        inputs = (Replicate(), Shard(0), Replicate(), *weights)
        rows.append(AxisStrategy(inputs, outputs, "bags"))
    return rows


@rule(aten._embedding_bag_dense_backward.default)
def embedding_bag_backward_rule(call: OpCall) -> list[AxisStrategy]:
    """(grad, indices, bag of each index, sizes, argmax, sample weights?) -> d weight.

    A share of the bags cannot count an index's frequency.
    """
    argmax: Placement = Shard(1) if call.args[7] == _MODE_MAX else Replicate()
    weights = tuple(Replicate() for _ in call.operands[5:])
    hidden = (Shard(1), Replicate(), Replicate(), Replicate(), argmax, *weights)
    rows = [replicated(call), AxisStrategy(hidden, (Shard(1),))]
    num_bags, by_frequency = call.operands[0].shape[0], call.args[6]
    if not by_frequency and equal_bags(call):
        argmax = _by_bag(call.operands[4], num_bags)
        weights = tuple(Shard(0) for _ in call.operands[5:])
        inputs = (Shard(0), Shard(0), Replicate(), Shard(0), argmax, *weights)
        rows.append(AxisStrategy(inputs, (Partial(),), "bags"))
    return rows + linear_rows(call, [(0,)])


@rule(aten._embedding_bag_per_sample_weights_backward.default)
def embedding_bag_weights_rule(call: OpCall) -> list[AxisStrategy]:
    """(grad, weight, indices, offsets, bag of each index) -> d sample weights.

    They are a sum over the hidden dim.
    """
    rest = tuple(Replicate() for _ in call.operands[2:])
    rows = [replicated(call), AxisStrategy((Shard(1), Shard(1), *rest), (Partial(),))]
    if equal_bags(call):
        inputs = (Shard(0), Replicate(), Shard(0), Replicate(), Replicate())
        rows.append(AxisStrategy(inputs, (Shard(0),), "bags"))
    return rows + linear_rows(call, [(0,), (1,)])
