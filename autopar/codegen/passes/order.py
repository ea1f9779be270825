"""Putting the nodes of a graph in another order."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping

import torch
from torch import fx

from autopar.core.work import is_view

__all__ = ["feeding", "is_packing", "phase_starts", "reorder"]

aten = torch.ops.aten
_PACKING = (
    aten.clone.default,
    aten.contiguous.default,
    aten.cat.default,
    aten._to_copy.default,
)


def is_packing(node: fx.Node) -> bool:
    """True for views, copies and casts: what brings a tensor into the form that is sent."""
    return node.op == "call_function" and (is_view(node.target) or node.target in _PACKING)


def feeding(start: fx.Node) -> list[fx.Node]:
    """A collective and the packing in front of it, in no order."""
    found = {start: None}
    stack = [start]
    while stack:
        for source in stack.pop().all_input_nodes:
            if source not in found and is_packing(source):
                found[source] = None
                stack.append(source)
    return list(found)


def phase_starts(nodes: Iterable[fx.Node]) -> dict[str, int]:
    """Position of the first node of each phase."""
    found: dict[str, int] = {}
    for index, node in enumerate(nodes):
        if node.op == "call_function":
            found.setdefault(node.meta.get("phase", "forward"), index)
    return found


def reorder(graph: fx.Graph, keys: Mapping[fx.Node, float]) -> None:
    """Sort by key, in place, as far as operands allow; a node without a key keeps its position.

    Equal keys, and a node that its operands hold back, go by the present order.
    """
    nodes = list(graph.nodes)
    rank = {node: (keys.get(node, float(i)), i) for i, node in enumerate(nodes)}
    missing = {node: len(node.all_input_nodes) for node in nodes}
    ready = [(*rank[node], node) for node in nodes if not missing[node]]
    heapq.heapify(ready)
    (output,) = (node for node in nodes if node.op == "output")
    count = 0
    while ready:
        node = heapq.heappop(ready)[-1]
        if node is not output:
            output.prepend(node)
        count += 1
        for user in node.users:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, (*rank[user], user))
    assert count == len(nodes), "the graph has a cycle"
