"""Heads joined onto the batch, `torch.cat(x.split(width, -1), 0)`: rows that still split by batch.

Each head has the whole batch in its part of the dim, so that a shard of the batch is one of
`Shard(dim, split=heads)` there. A row of a rule that shards a dim says that the op works for each
index of it alone (`own_order`), so it is right for such a shard too. It is offered where it can
come from: behind such a join, as far as ops go on index by index.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from autopar.core.ops import RANDOM, ops
from autopar.core.placement import Placement, Shard
from autopar.core.strategy import AxisStrategy, OpCall, op_call
from autopar.solver.rules.registry import find_rule

__all__ = ["Joined", "joined_of", "joined_rows", "note_joined"]

aten = torch.ops.aten
_KEY = "joined"
_ALONE = frozenset(
    {
        ops.einsum.default,
        aten._softmax.default,
        aten._softmax_backward_data.default,
        aten._to_copy.default,
        aten.alias.default,
        aten.clone.default,
        aten.permute.default,
        aten.sum.dim_IntList,
        aten.transpose.int,
    }
)
_PARTS = (aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, aten.slice.Tensor)


class Joined(NamedTuple):
    """A dim in which as many runs stand behind each other, each with the whole batch."""

    dim: int
    runs: int


def note_joined(graph: fx.Graph) -> None:
    """Write into each node's meta in which dim it has the batch several times.

    Args:
        graph: a traced graph; done before it is copied, so that recomputed values have it too.
    """
    for node in graph.nodes:
        if node.op != "call_function" or _KEY in node.meta:
            continue
        if node.target is aten.cat.default:
            found = _join(node)
        elif any(_KEY in operand.meta for operand in node.all_input_nodes):
            found = _noted(node)
        else:
            continue
        if found is not None:
            node.meta[_KEY] = found


def joined_of(call: OpCall) -> tuple[Joined | None, ...]:
    """What the rows of an op behind a join depend on, beside the op; () for most ops."""
    if not any(_KEY in node.meta for node in call.nodes):
        return ()
    return tuple(node.meta.get(_KEY) for node in call.nodes)


def joined_rows(call: OpCall) -> list[AxisStrategy]:
    """Rows of an op behind a join, beside those of its rule; none for most ops."""
    return _rows(call) if joined_of(call) and _known(call.target) else []


def _join(node: fx.Node) -> Joined | None:
    """Of parts of one tensor along another dim than the one that they are joined in."""
    parts: Any = node.args[0]
    dim: Any = node.args[1] if len(node.args) > 1 else 0
    sources = {_whole(part) for part in parts}
    shapes = {tuple(part.meta["val"].shape) for part in parts}
    (source,) = sources if len(sources) == 1 else (None,)
    if source is None or dim != 0 or len(parts) < 2 or len(shapes) > 1:
        return None
    (shape,) = shapes
    return Joined(0, len(parts)) if source.meta["val"].shape[0] == shape[0] else None


def _whole(part: fx.Node) -> fx.Node | None:
    """What a node is a part of."""
    maker = part.args[0] if part.target is operator.getitem else part
    assert isinstance(maker, fx.Node)
    return maker.all_input_nodes[0] if maker.target in _PARTS else None


def _known(target: Any) -> bool:
    pointwise = torch.Tag.pointwise in getattr(target, "tags", ())
    return target in _ALONE or (pointwise and target not in RANDOM)


def _noted(node: fx.Node) -> Joined | None:
    """What the result of an op behind a join has."""
    if not _known(node.target) or not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    placements = (row.outputs[0] for row in _rows(op_call(node, 2)))
    return next((Joined(p.dim, p.split) for p in placements if p.is_shard), None)


def _rows(call: OpCall) -> list[AxisStrategy]:
    """Rows of the rule that shard a joined dim, in runs."""
    function = find_rule(call.target)
    found = []
    for row in function(call) if function is not None else ():
        runs = {
            node.meta[_KEY].runs
            for placement, node in zip(row.inputs, call.nodes, strict=True)
            if _KEY in node.meta and placement == Shard(node.meta[_KEY].dim)
        }
        if len(runs) == 1 and not row.comm and not row.variant:
            (count,) = runs
            inputs = tuple(_in_runs(placement, count) for placement in row.inputs)
            found.append(
                AxisStrategy(inputs, tuple(_in_runs(placement, count) for placement in row.outputs))
            )
    return found


def _in_runs(placement: Placement, runs: int) -> Placement:
    return Shard(placement.dim, runs) if placement.is_shard else placement
