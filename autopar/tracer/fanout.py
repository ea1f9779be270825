"""Fan-out points: one redistribution may serve several readers of a tensor.

Two kinds of alias give the solver a place to redistribute once:

- behind a contraction whose result, perhaps a partial sum, is read more than once: it is reduced
  before it is saved, not once for the forward and again for the backward;
- in front of contractions that read one activation (query, key and value projections): it is
  gathered once. Forward and backward readers get one each, so that what is saved in between stays
  the sharded tensor.
"""

from __future__ import annotations

from collections.abc import MutableMapping

import torch
from torch import fx

from autopar.core.graph import NodeInfo

__all__ = ["insert_fanouts"]

_READERS = (
    torch.ops.autopar.einsum.default,
    torch.ops.autopar.attention.default,
    torch.ops.autopar.attention_backward.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten.convolution_backward.default,
)


_SUMMING = (
    torch.ops.autopar.einsum.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten.embedding.default,
)


def insert_fanouts(graph: fx.Graph, info: MutableMapping[str, NodeInfo]) -> None:
    """Insert both kinds of alias, in place."""
    for node in list(graph.nodes):
        if node.target in _SUMMING and len(node.users) > 1:
            _alias(graph, node, node.next, list(node.users))
            info[node.next.name] = info[node.name]
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        for phase in ("forward", "backward"):
            readers = [
                user
                for user in node.users
                if user.target in _READERS and info[user.name].phase == phase
            ]
            if len(readers) > 1:
                first = next(n for n in graph.nodes if n in readers)
                _alias(graph, node, first, readers)
                info[first.prev.name] = info[first.name]


def _alias(
    graph: fx.Graph,
    node: fx.Node,
    before: fx.Node,
    readers: list[fx.Node],
) -> None:
    """Put an alias of `node` before another node and hand it to `readers`."""
    with graph.inserting_before(before):
        alias = graph.call_function(torch.ops.aten.alias.default, (node,))
    alias.meta["val"] = node.meta["val"]
    for reader in readers:
        reader.replace_input_with(node, alias)
