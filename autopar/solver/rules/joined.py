"""What is joined onto the batch: rows that still split by batch.

`torch.cat(x.split(width, -1), 0)` joins heads, `torch.cat([chosen, rejected])` two inputs that one
model is to see. Each has the whole batch in its part of the dim, so that a shard of the batch is
one of `Shard(dim, split=parts)` there. A row of a rule that shards a dim says that the op works for
each index of it alone (`own_order`), so it is right for such a shard too. It is offered where it
can come from: behind such a join, as far as ops go on index by index.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from autopar.core.graph import TracedModel, dependents
from autopar.core.ops import RANDOM, ops
from autopar.core.placement import Placement, Shard
from autopar.core.strategy import AxisStrategy, OpCall, TensorSpec, op_call
from autopar.solver.rules.registry import find_rule

__all__ = ["Joined", "joined_of", "joined_rows", "note_joined"]

aten = torch.ops.aten
_KEY = "joined"
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
# ops whose rows that shard a dim work for each index of it alone
_ALONE = frozenset(
    {
        ops.attention.default,
        ops.attention_backward.default,
        ops.einsum.default,
        ops.token_nll.default,
        ops.token_nll_backward.default,
        aten._log_softmax.default,
        aten._log_softmax_backward_data.default,
        aten._softmax.default,
        aten._softmax_backward_data.default,
        aten._to_copy.default,
        aten.alias.default,
        aten.clone.default,
        aten.convolution.default,
        aten.convolution_backward.default,
        aten.embedding.default,
        aten.embedding_dense_backward.default,
        aten.expand.default,
        aten.gather.default,
        aten.log_sigmoid_backward.default,
        aten.log_sigmoid_forward.default,
        aten.max_pool2d_with_indices.default,
        aten.max_pool2d_with_indices_backward.default,
        aten.native_group_norm.default,
        aten.native_group_norm_backward.default,
        aten.native_layer_norm.default,
        aten.native_layer_norm_backward.default,
        aten.new_zeros.default,
        aten.permute.default,
        aten.scatter_add.default,
        aten.select.int,
        aten.select_backward.default,
        aten.slice.Tensor,
        aten.slice_backward.default,
        aten.squeeze.dim,
        aten.sum.dim_IntList,
        aten.transpose.int,
        aten.unsqueeze.default,
        *_VIEWS,
    }
)
_PARTS = (aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, aten.slice.Tensor)


class Joined(NamedTuple):
    """A dim in which as many runs stand behind each other, each with the whole batch."""

    dim: int
    runs: int


def note_joined(traced: TracedModel) -> None:
    """Write into each node's meta in which dim it has the batch several times.

    Args:
        traced: a traced step; done before it is copied, so that recomputed values have it too.
    """
    fed = dependents(traced, "input", "received")
    some: Joined | None = None
    for node in traced.graph.nodes:
        if node.op != "call_function" or _KEY in node.meta:
            continue
        if node.target is aten.cat.default:
            found = _join(node, fed)
        elif any(_KEY in operand.meta for operand in node.all_input_nodes):
            found = _noted(node)
        else:
            found = _put_back(node) if some else None
        if found is not None:
            some = node.meta[_KEY] = found


def joined_of(call: OpCall) -> tuple[Joined | None, ...]:
    """What the rows of an op behind a join depend on, beside the op; () for most ops."""
    if not any(_KEY in node.meta for node in call.nodes):
        return ()
    return tuple(node.meta.get(_KEY) for node in call.nodes)


def joined_rows(call: OpCall) -> list[AxisStrategy]:
    """Rows of an op behind a join, beside those of its rule; none for most ops."""
    return _rows(call) if joined_of(call) and _known(call.target) else []


def _join(node: fx.Node, fed: Collection[str]) -> Joined | None:
    """Of parts of one tensor along another dim than they are joined in, or of several inputs."""
    parts: Any = node.args[0]
    dim: Any = node.args[1] if len(node.args) > 1 else 0
    sources = {_whole(part) for part in parts}
    shapes = {tuple(part.meta["val"].shape) for part in parts}
    if dim != 0 or len(parts) < 2 or len(shapes) > 1:
        return None
    (shape,) = shapes
    (source,) = sources if len(sources) == 1 else (None,)
    if source is not None:
        whole = source.meta["val"].shape[0] == shape[0]
    else:
        whole = len(sources) == len(parts) and all(part.name in fed for part in parts)
    return Joined(0, len(parts)) if whole else None


def _whole(part: fx.Node) -> fx.Node | None:
    """What a node is a part of; itself if of nothing."""
    maker = part.args[0] if part.target is operator.getitem else part
    assert isinstance(maker, fx.Node)
    return maker.all_input_nodes[0] if maker.target in _PARTS else part


def _known(target: Any) -> bool:
    pointwise = torch.Tag.pointwise in getattr(target, "tags", ())
    return target in _ALONE or (pointwise and target not in RANDOM)


def _put_back(node: fx.Node) -> Joined | None:
    """Of the gradient of one part of a joined batch in zeros."""
    if node.target is not aten.slice_backward.default:
        return None
    call = op_call(node, 2)
    function = find_rule(call.target)
    placements = (row.outputs[0] for row in (function(call) if function is not None else ()))
    runs = (Joined(p.dim, p.split) for p in placements if p.is_shard and p.split > 1)
    return next((found for found in runs if found.dim == 0), None)


def _noted(node: fx.Node) -> Joined | None:
    """What the result of an op behind a join has; of several, the first, and each by itself."""
    at: Any = 0
    if node.target is operator.getitem:
        node, at = node.all_input_nodes[0], node.args[1]
    if not _known(node.target):
        return None
    placements = [row.outputs[at] for row in _rows(op_call(node, 2))]
    return next((Joined(p.dim, p.split) for p in placements if p.is_shard), None)


def _rows(call: OpCall) -> list[AxisStrategy]:
    """Rows of the rule that shard a joined dim, in runs."""
    function = find_rule(call.target)
    found: list[AxisStrategy] = []
    for row in function(call) if function is not None else ():
        if any(p.is_shard and p.split > 1 for p in (*row.inputs, *row.outputs)):
            continue  # parts of the dim are taken apart
        runs = {
            node.meta[_KEY].runs
            for placement, node in zip(row.inputs, call.nodes, strict=True)
            if _KEY in node.meta and placement == Shard(node.meta[_KEY].dim)
        }
        if len(runs) == 1 and not row.comm and not row.variant:
            (count,) = runs
            inputs, outputs = (
                tuple(_in_runs(placement, count) for placement in placements)
                for placements in (row.inputs, row.outputs)
            )
            # a view that takes the runs apart leaves less than one for each rank
            if _is_even(call.operands, inputs, call) and _is_even(call.outputs, outputs, call):
                found.append(AxisStrategy(inputs, outputs))
    return found


def _is_even(specs: Sequence[TensorSpec], placements: Sequence[Placement], call: OpCall) -> bool:
    return all(
        spec.shape[p.dim] % (p.split * call.axis_size) == 0
        for spec, p in zip(specs, placements, strict=True)
        if p.is_shard
    )


def _in_runs(placement: Placement, runs: int) -> Placement:
    return Shard(placement.dim, runs) if placement.is_shard else placement
