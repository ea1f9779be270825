"""Writes one collective in the place of several: what goes in, and what is taken out again."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopar.codegen.passes.order import call_like, is_packing, reorder, show_anew
from autopar.codegen.passes.strides import is_contiguous
from autopar.core.split_copy import SPLIT_COPY

__all__ = ["ancestors", "is_copied_out", "join_all", "size_of"]

aten = torch.ops.aten
_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default


def size_of(start: fx.Node) -> int:
    """Bytes that a collective sends, as the cost model counts them."""
    num_bytes = start.meta["collective"][2]
    assert isinstance(num_bytes, int)
    return num_bytes


def ancestors(node: fx.Node) -> Iterable[fx.Node]:
    """All nodes that one is made of, maybe several times."""
    stack = list(node.all_input_nodes)
    while stack:
        source = stack.pop()
        yield source
        stack += source.all_input_nodes


def is_copied_out(member: fx.Node) -> bool:
    """True for a gather whose part of a joined one has to be copied, and into no other order."""
    if member.target is not _GATHER:
        return False
    (wait,) = member.users
    shown = wait.meta["val"].untyped_storage()._cdata
    stack = list(wait.users)
    while stack:
        node = stack.pop()
        if is_packing(node):
            values = pytree.tree_leaves(node.meta["val"])
            if any(value.untyped_storage()._cdata != shown for value in values):
                return False
            stack += node.users
    return True


def join_all(graph: fx.Graph, buckets: Iterable[Sequence[fx.Node]], split: bool) -> None:
    """Replace the members of each bucket by one collective, and sort.

    A gather is issued where the first of its members is, a reduction where the last one is.

    Args:
        graph: in order.
        buckets: collectives of one group, kind and dtype each.
        split: what is to be copied out of a gather is, all at once, where the first of it is read;
            else each part where it is read.
    """
    keys: dict[fx.Node, float] = {node: float(i) for i, node in enumerate(graph.nodes)}
    old = set(keys)
    for members in buckets:
        gather = members[0].target is _GATHER
        at = keys[members[0]] if gather else keys[members[-1]]
        if gather:
            before = {n for m in members for n in ancestors(m) if n.op == "call_function"}
            keys.update((n, min(keys[n], at - 0.5)) for n in before)
        together = [m for m in members if split and is_copied_out(m)]
        ordered = [*together, *(m for m in members if m not in together)]
        with graph.inserting_before(members[-1]):
            writer = _Writer(ordered, at, keys if gather else {})
            writer.take_out(writer.send(), len(together))
        keys.update(writer.made)
    reorder(graph, keys)
    # views of what was gathered or reduced alone are views of what the joined collective made
    show_anew(graph, keys.keys() - old)
    graph.lint()


class _Writer:
    """Puts one collective with key `at` in the place of several, at the insertion point.

    Parts are taken out where the members' waits have their `keys`, or at once.

    Attributes:
        made: keys of the new nodes.
    """

    def __init__(
        self, members: Sequence[fx.Node], at: float, keys: Mapping[fx.Node, float]
    ) -> None:
        self.members = members
        self.at = at
        self.waits = [next(iter(member.users)) for member in members]
        self.outs = [keys.get(wait, at) for wait in self.waits]
        self.made: dict[fx.Node, float] = {}

    def call(self, like: fx.Node, key: float, target: Any, *args: Any) -> fx.Node:
        node = call_like(like, target, *args)
        node.meta["packs"] = "bucket"
        self.made[node] = key
        return node

    def send(self) -> fx.Node:
        """The wait for the joined collective."""
        first, members, at = self.members[0], self.members, self.at
        kind, axis, _, times = first.meta["collective"]
        # the first dim counts ranks: in front of a reduce-scatter, behind an all-gather
        rows = int(first.args[2]) if kind == "reduce_scatter" else 1  # type: ignore[arg-type]
        flat = [self.call(m, at, aten.reshape.default, m.args[0], [rows, -1]) for m in members]
        for member, node in zip(members, flat, strict=True):
            if not is_contiguous(member.all_input_nodes[0]):  # it will be a copy
                node.meta |= {"val": torch.empty_like(node.meta["val"]), "copies": True}
        joined = self.call(first, at, aten.cat.default, flat, 1)
        start = self.call(first, at, first.target, joined, *first.args[1:])
        start.meta["collective"] = (kind, axis, sum(map(size_of, members)), times)
        start.meta["closes_at"] = members[-1].meta.get("closes_at", 0)
        start.meta["members"] = tuple((m.meta.get("origin", ""), size_of(m)) for m in members)
        return self.call(first, at, torch.ops._c10d_functional.wait_tensor.default, start)

    def take_out(self, wait: fx.Node, count: int) -> None:
        """Give each member's readers their part, and `count` of them all at once."""
        rows = wait.meta["val"].shape[0]
        widths = [math.prod(m.meta["val"].shape) // rows for m in self.members]
        ends = [0, *itertools.accumulate(widths)]
        parts: list[fx.Node] = []
        if count:
            out, whole = min(self.outs[:count]), wait
            if count < len(self.members):
                whole = self.call(self.members[0], out, aten.slice.Tensor, wait, 1, 0, ends[count])
            copies = self.call(self.members[0], out, SPLIT_COPY, whole, widths[:count])
            parts = [
                self.call(member, out, operator.getitem, copies, index)
                for index, member in enumerate(self.members[:count])
            ]
        for index in range(count, len(self.members)):
            given = (wait, 1, ends[index], ends[index + 1])
            parts.append(
                self.call(self.members[index], self.outs[index], aten.slice.Tensor, *given)
            )
        for member, old, key, part in zip(self.members, self.waits, self.outs, parts, strict=True):
            shape = list(member.meta["val"].shape)
            old.replace_all_uses_with(self.call(member, key, aten.reshape.default, part, shape))
        for node in (*self.waits, *self.members):
            node.graph.erase_node(node)
