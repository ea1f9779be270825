"""What an exported graph writes in place, and the removal of what neither is read nor writes."""

from __future__ import annotations

import torch
from torch import fx

__all__ = ["changes_in_place", "drop_dead", "know_all_readers", "writes"]

aten = torch.ops.aten


def changes_in_place(gm: fx.GraphModule) -> bool:
    """True if an op writes to its operand, in a part without gradients too."""
    parts = (part for part in gm.modules() if isinstance(part, fx.GraphModule))
    return any(writes(node) for part in parts for node in part.graph.nodes)


def writes(node: fx.Node) -> bool:
    """True for an op that writes to its operand; torch does not say so of a batch norm."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target in (aten.detach_.default, aten.lift_fresh.default):
        return False
    if node.target is aten.batch_norm.default:
        return bool(node.args[5])
    return node.target._schema.is_mutable


def know_all_readers(graph: fx.Graph) -> None:
    """torch.export forgets a reader, itself unread, of a value that the forward also returns, or
    passes into a part with another autocast.
    """
    for node in graph.nodes:
        for source in node.all_input_nodes:
            source.users.setdefault(node)


def drop_dead(gm: fx.GraphModule) -> None:
    """As `Graph.eliminate_dead_code`, but a subgraph that writes to its operands stays.

    An unread op that draws random numbers goes: each op of a program has its own.
    """

    def stays(node: fx.Node) -> bool:
        named = (x for x in node.all_input_nodes if x.op == "get_attr")
        parts = (getattr(gm, str(x.target), None) for x in named)
        within = any(isinstance(p, fx.GraphModule) and changes_in_place(p) for p in parts)
        return within or node.is_impure(impure_random=False) or writes(node)

    gm.graph.eliminate_dead_code(stays)
