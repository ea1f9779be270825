"""`Rewriter`: puts fused calls into an emitted graph, and takes out what they replace."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from autopar.codegen.fakes import fake_call
from autopar.codegen.fusion.matching import is_cast, look_through
from autopar.core.graph import value_of

__all__ = ["ANNOTATIONS", "Rewriter", "sort_graph"]

aten = torch.ops.aten
ANNOTATIONS = ("origin", "phase", "times")
"""What a fused call takes over from the last op that it replaces."""


class Rewriter:
    """Replaces nodes of one graph by calls of fused ops.

    Attributes:
        counts: number of fused calls, by kernel.
        calls: the fused calls, in order of their making; some may be gone again.
        replaced: what a new node stands for.
    """

    def __init__(self, graph: fx.Graph, fake_mode: FakeTensorMode) -> None:
        self.graph = graph
        self.fake_mode = fake_mode
        self.counts: dict[str, int] = {}
        self.calls: list[fx.Node] = []
        self.replaced: dict[fx.Node, fx.Node] = {}

    def users(self, node: fx.Node) -> set[fx.Node]:
        """Users, seen through views that change nothing and through casts."""
        found: set[fx.Node] = set()
        for user in node.users:
            if user.op == "call_function" and look_through(user) is not user:
                found |= self.users(user) or {user}
            else:
                found.add(user)
        return found

    def is_private(self, inner: Collection[fx.Node], kept: Collection[fx.Node]) -> bool:
        """True if nobody outside reads a node of `inner` that is not replaced."""
        return all(self.users(n) <= set(inner) for n in inner if n not in kept)

    def call(self, root: fx.Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """A call in the phase and on behalf of `root`, in front of it."""
        return self._annotated(root, root, target, args, kwargs)

    def _annotated(
        self, root: fx.Node, place: fx.Node, target: Any, args: Any, kwargs: Any
    ) -> fx.Node:
        with self.graph.inserting_before(place):
            node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = fake_call(self.fake_mode, target, args, kwargs)
        for key in ANNOTATIONS:
            if key in root.meta:
                node.meta[key] = root.meta[key]
        return node

    def fused(
        self,
        kernel: str | OpOverload,
        root: fx.Node,
        args: Sequence[Any],
        outputs: Mapping[int, fx.Node],
    ) -> bool:
        """Replace `outputs`, by index of the op's results, by one call of a fused op.

        Args:
            kernel: the name of one of autopar's, or an op of another package.
            root: the last node of the chain, on whose behalf the op runs.
            args: of the op.
            outputs: what is replaced.

        Returns:
            False, with nothing done, where an operand depends on a replaced node.
        """
        operands = [a for a in pytree.tree_leaves(list(args)) if isinstance(a, fx.Node)]
        if self._depends(operands, set(outputs.values())):
            return False
        first = min([root, *(user for old in outputs.values() for user in old.users)])
        early = any(first <= operand for operand in operands)
        place = root if early else first
        target: Any = kernel
        if isinstance(kernel, str):
            target = getattr(torch.ops.autopar_kernels, kernel).default
        kernel = str(kernel)
        node = self._annotated(root, place, target, tuple(args), {})
        several = not isinstance(node.meta["val"], Tensor)
        results = node.meta["val"] if several else (node.meta["val"],)
        replaced = {i: self._as_wide(old, results[i].dtype) for i, old in outputs.items()}
        if not all(replaced.values()):
            self.graph.erase_node(node)
            return False
        fresh = [
            (
                old,
                self._annotated(root, place, operator.getitem, (node, i), {}) if several else node,
            )
            for i, olds in replaced.items()
            for old in olds
        ]
        stands = [node, *(self.replace(old, new) for old, new in fresh)]
        if early:
            users = (user for new in stands for user in new.users)
            sort_graph(self.graph, (min([node, *users]), max(stands)))
        self.calls.append(node)
        self.counts[kernel] = self.counts.get(kernel, 0) + 1
        return True

    def _as_wide(self, old: fx.Node, dtype: torch.dtype) -> list[fx.Node]:
        """What a result of `dtype` may replace: `old`, or the casts that alone read it.

        Empty where the result would round what was not rounded.
        """
        if torch.promote_types(dtype, value_of(old).dtype) == dtype:
            return [old]
        users = list(old.users)
        narrow = all(is_cast(u) and value_of(u).dtype == dtype for u in users)
        return users if narrow else []

    def replace(self, old: fx.Node, new: fx.Node) -> fx.Node:
        """Let users of `old` read `new`, cast and shaped alike; drop what is no longer read.

        Returns:
            What the users read.
        """
        want, have = value_of(old), value_of(new)
        self.replaced[new] = old
        if have.shape != want.shape:
            new = self._annotated(new, new.next, aten.reshape.default, (new, list(want.shape)), {})
        if have.dtype != want.dtype:
            new = self._annotated(
                new, new.next, aten._to_copy.default, (new,), {"dtype": want.dtype}
            )
        self.replaced[new] = old
        old.replace_all_uses_with(new)
        self.drop(old)
        return new

    def drop(self, node: fx.Node) -> None:
        """Erase a node that nobody reads, and what only it read."""
        stack = [node]
        while stack:
            node = stack.pop()
            if node.users or node.op != "call_function" or "collective" in node.meta:
                continue
            if getattr(node, "_erased", False) or "c10d" in str(node.target):
                continue
            sources = node.all_input_nodes
            self.graph.erase_node(node)
            stack.extend(sources)

    def _depends(self, operands: Sequence[fx.Node], on: set[fx.Node]) -> bool:
        """True if an operand is computed from one of `on`, casts of which count as themselves."""
        first = min(on)
        seen: set[fx.Node] = set()
        stack = [n for n in operands if n >= first]
        while stack:
            node = stack.pop()
            if node in on:
                return True
            for source in node.all_input_nodes:
                if source >= first and source not in seen:
                    seen.add(source)
                    stack.append(source)
        return False


def sort_graph(graph: fx.Graph, between: tuple[fx.Node, fx.Node] | None = None) -> None:
    """Put every node behind its operands, otherwise in the order as it is.

    Args:
        graph: whose nodes are moved.
        between: the first and the last node of those that may be out of order; default: all.

    Raises:
        AssertionError: the graph has a cycle.
    """
    nodes = list(graph.nodes) if between is None else _run_of_nodes(*between)
    order = {node: index for index, node in enumerate(nodes)}
    sources = [[s for s in n.all_input_nodes if s in order] for n in nodes]
    if all(order[s] < index for index, known in enumerate(sources) for s in known):
        return
    waiting = dict(zip(nodes, map(len, sources), strict=True))
    ready = [order[n] for n in nodes if not waiting[n]]
    heapq.heapify(ready)
    done: list[fx.Node] = []
    before = nodes[0].prev
    while ready:
        node = nodes[heapq.heappop(ready)]
        done.append(node)
        for user in node.users:
            if user in order:
                waiting[user] -= 1
                if not waiting[user]:
                    heapq.heappush(ready, order[user])
    assert len(done) == len(nodes), "a fused call reads what depends on it"
    for node in done:
        before.append(node)
        before = node


def _run_of_nodes(first: fx.Node, last: fx.Node) -> list[fx.Node]:
    nodes = [first]
    while nodes[-1] is not last:
        nodes.append(nodes[-1].next)
    return nodes
