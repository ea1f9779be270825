"""Writing nodes into a graph, and putting them in another order."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from autopar.codegen.fakes import fake_call
from autopar.codegen.passes.sends import is_wait
from autopar.core.split_copy import SPLIT_COPY
from autopar.core.work import is_view

__all__ = [
    "call_like",
    "copied",
    "erase",
    "feeding",
    "is_packing",
    "link",
    "phase_starts",
    "reorder",
    "show_anew",
]

aten = torch.ops.aten
_PACKING = (
    aten.clone.default,
    aten.contiguous.default,
    aten.cat.default,
    aten._to_copy.default,
    SPLIT_COPY,
)


def is_packing(node: fx.Node) -> bool:
    """True for views, copies and casts: what brings a tensor into the form that is sent."""
    if node.target is operator.getitem:
        return node.all_input_nodes[0].target is SPLIT_COPY
    return node.op == "call_function" and (is_view(node.target) or node.target in _PACKING)


def feeding(start: fx.Node) -> list[fx.Node]:
    """A collective and the packing in front of it, in no order."""
    return _back_to(start, is_packing)


def link(start: fx.Node) -> list[fx.Node]:
    """The same with the waits for collectives that it works on, and what is behind these."""
    return _back_to(start, lambda node: is_packing(node) or is_wait(node))


def _back_to(start: fx.Node, passes: Callable[[fx.Node], bool]) -> list[fx.Node]:
    found = {start: None}
    stack = [start]
    while stack:
        for source in stack.pop().all_input_nodes:
            if source not in found and passes(source):
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


def copied(graph: fx.Graph) -> fx.Graph:
    """A graph with the same nodes and metadata."""
    found = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        # arguments that are set behind the creation are not searched for symbols, and without
        # `Node.__setattr__` the node is not entered anew in the graph's table: most of the time
        copies[node] = new = found.create_node(node.op, node.target, (), {}, node.name, node.type)
        object.__setattr__(new, "args", fx.map_arg(node.args, copies.__getitem__))
        if node.kwargs:
            object.__setattr__(new, "kwargs", fx.map_arg(node.kwargs, copies.__getitem__))
        new.meta.update(node.meta)
    return found


def call_like(like: fx.Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
    """A call with its fake value, at the insertion point, as part of what `like` does."""
    node = like.graph.call_function(target, args, kwargs)
    node.meta.update((k, v) for k, v in like.meta.items() if k in ("phase", "origin", "times"))
    node.meta["val"] = _fake(node)
    return node


def erase(nodes: Sequence[fx.Node]) -> None:
    """Take out what nothing reads any more, users before operands."""
    left = dict.fromkeys(nodes)
    while dead := [node for node in left if not node.users]:
        for node in dead:
            node.graph.erase_node(node)
            del left[node]


def show_anew(graph: fx.Graph, changed: Iterable[fx.Node]) -> None:
    """Let views show the storage of what they are views of now.

    Args:
        graph: in order.
        changed: nodes that other nodes have been replaced by.
    """
    seen = set(changed)
    for node in graph.nodes:
        part = node.target is operator.getitem
        if (part or is_view(node.target)) and not seen.isdisjoint(node.all_input_nodes):
            node.meta["val"] = _fake(node)
            seen.add(node)


def _fake(node: fx.Node) -> Any:
    """The fake value of a call, from those of its operands."""
    values = (v for n in node.all_input_nodes for v in pytree.tree_leaves(n.meta["val"]))
    fake = next(v for v in values if isinstance(v, FakeTensor))
    assert callable(node.target)
    return fake_call(fake.fake_mode, node.target, node.args, node.kwargs)
