"""What is live while a graph runs, from the storages of its fake values.

A storage is live from the node that creates it to the last reader of any of its views. A collective
holds what it sends until the wait for it, save an all-reduce, which works on a copy or in place.
Placeholders are the caller's and count nothing, but for those that the caller lets go of (`dies` in
their `meta`); and neither does what is in host memory. Outputs live to the end, but for those that
`train_step` does not return (their positions are `let_go` in the output's `meta`).
What blocks of a folded program make counts as often as it is there (`folded_runs`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autopar.codegen.passes.folded_runs import Bytes, FoldedRuns
from autopar.codegen.passes.sends import is_wait
from autopar.core.work import is_away

__all__ = ["FUSED_BYTES", "LITTLE", "Lifetimes"]

LITTLE = 1e-3
"""Of a peak: a rise by so much is not asked after."""
FUSED_BYTES = "fused_bytes"
"""Key in the `meta` of a node: what more (or less) is live from there on, once it is fused."""

c10d = torch.ops._c10d_functional


class Lifetimes:
    """Live bytes at each position of a graph.

    Args:
        graph: with fake values.
        resident: bytes that live beside the graph's own while the nodes of a phase run: sums over
            microbatches, to which the graph's contributions are added where they arise.

    Attributes:
        nodes: of the graph, in order.
        position: of each node.
        live: bytes while each node runs, its operands and results included, and what it is known to
            need beside these (`scratch` in its `meta`).
    """

    def __init__(self, graph: fx.Graph, resident: Mapping[str, int] | None = None) -> None:
        self.nodes = list(graph.nodes)
        self.position = {node: index for index, node in enumerate(self.nodes)}
        self._root: dict[int, int] = {}
        self._given: set[int] = set()
        self._bytes: dict[int, int] = {}
        self._first: dict[int, int] = {}
        self._last: dict[int, int] = {}
        self._shown: dict[fx.Node, list[int]] = {}
        for index, node in enumerate(self.nodes):
            self._see(index, node)
        change = np.zeros(len(self.nodes) + 1, dtype=np.int64)
        self._folded = FoldedRuns(self.nodes, sums=bool(resident))
        for storage, first in self._first.items():
            num_bytes = self._bytes[storage]
            for held in self._folded.held(first, self._last.get(storage, first)):
                change[held.begin] += held.copies * num_bytes
                change[held.end] -= held.copies * num_bytes
                self._folded.note(held, num_bytes)
        for storage, made, end in self._added() if resident else ():
            change[made + 1] -= self._bytes[storage]
            change[end + 1] += self._bytes[storage]
        scratch = [node.meta.get("scratch", 0) for node in self.nodes]
        fused = _carried(node.meta.get(FUSED_BYTES) for node in self.nodes)
        self.live = np.cumsum(change)[:-1] + np.array(scratch, dtype=np.int64) + fused
        # what goes at a node is still there right in front of it
        self._going = np.maximum(0, -np.diff(fused, prepend=fused[:1]))
        if resident:
            phases = (str(node.meta.get("phase")) for node in self.nodes)
            self.live += np.array([resident.get(phase, 0) for phase in phases], dtype=np.int64)

    @property
    def peak_bytes(self) -> int:
        """The most that is live at once."""
        return int(self.live.max(initial=0))

    def _added(self) -> Iterator[tuple[int, int, int]]:
        """Storages that are in a sum from where they are made to the last node of the backward."""
        phases = [node.meta.get("phase") for node in self.nodes]
        end = max((i for i, phase in enumerate(phases) if phase == "backward"), default=0)
        finish = (n for n, phase in zip(self.nodes, phases, strict=True) if phase == "finish")
        made: dict[int, int] = {}
        for source in (s for n in finish for s in n.all_input_nodes):
            if source.meta.get("phase") == "backward":
                for storage in self._storages(source):
                    made[storage] = max(made.get(storage, 0), self.position[source])
        for storage, at in made.items():
            if at < end <= self._last[storage]:
                yield storage, at, end

    def _see(self, index: int, node: fx.Node) -> None:
        shown = self._shown
        for source in _read(node):
            for storage in shown[source]:
                self._last[storage] = index
        own = _own(node)
        self._make(index, node, own)
        shown[node] = [self._root[mine] for mine in own if mine in self._root]

    def _make(self, index: int, node: fx.Node, own: Mapping[int, int]) -> None:
        """Note the storages that a node makes, and whose storage its value is."""
        if is_away(node.target):
            self._given.update(own)
        elif node.op == "placeholder":
            if "dies" not in node.meta:
                self._given.update(own)
                return
            for mine, num_bytes in own.items():
                self._root[mine], self._first[mine] = mine, index
                self._bytes[mine] = num_bytes
        elif "in_place" in node.meta and (shown := self._storages(node.all_input_nodes[0])):
            self._root[next(iter(own))] = shown[0]
        elif is_wait(node):
            start = node.args[0]
            assert isinstance(start, fx.Node)
            (mine,), (given,) = own, self._storages(start)
            self._root[mine] = given
            for held in self.held(start):
                self._last[held] = index
        elif node.op == "call_function":
            for mine, num_bytes in own.items():
                if mine not in self._root and mine not in self._given:
                    self._root[mine] = mine
                    self._bytes[mine] = num_bytes
                    self._first[mine] = index

    def _storages(self, node: fx.Node) -> list[int]:
        """Storages that a node's value shows; none of a placeholder's."""
        return self._shown[node]

    def held(self, start: fx.Node) -> list[int]:
        """Storages that a collective holds until the wait for it."""
        if start.target is c10d.all_reduce.default:
            return []
        return [s for source in start.all_input_nodes for s in self._storages(source)]

    def created(self, node: fx.Node) -> int:
        """Bytes of the storages that a node creates."""
        here = self.position[node]
        return sum(self._bytes[s] for s in self._storages(node) if self._first[s] == here)

    def beside(self, node: fx.Node) -> Bytes:
        """Live bytes at each position, as most of the blocks that a node stands for find them."""
        fewer = self._folded.fewer(self.position[node])
        return self.live if fewer is None else self.live - fewer

    def earliest(self, node: fx.Node, first: int, num_bytes: int, budget: int) -> int:
        """Lowest position from which `num_bytes` more may live until `node`; at least `first`."""
        here = self.position[node]
        beside = self.beside(node)[first:here] + num_bytes
        over = np.nonzero(beside > budget)[0]
        begin = int(over[-1] + 1) if len(over) else 0
        fits = np.nonzero(beside[begin:] + self._going[first + begin : here] <= budget)[0]
        return first + begin + int(fits[0]) if len(fits) else max(first, here)

    def latest(self, start: fx.Node, last: int, budget: int) -> int:
        """Highest position up to which a collective may hold what it sends; at most `last`.

        What it holds until then is counted from now on.
        """
        held = {s: self._last[s] for s in self.held(start) if self._last[s] < last}
        beside = self.beside(start)
        for storage, read in held.items():
            over = np.nonzero(beside[read + 1 : last] + self._bytes[storage] > budget)[0]
            last = int(read + 1 + over[0]) if len(over) else last
        for storage, read in held.items():
            if read < last:
                self.live[read + 1 : last] += self._bytes[storage]
                self._last[storage] = last
        return last


def _carried(noted: Iterable[int | None]) -> Bytes:
    """What is noted at each position, or else at the last one before."""
    last, found = 0, []
    for each in noted:
        last = last if each is None else each
        found.append(last)
    return np.array(found, dtype=np.int64)


def _read(node: fx.Node) -> list[fx.Node]:
    """What a node needs live: of the output, what is returned."""
    if node.op != "output" or "let_go" not in node.meta:
        return node.all_input_nodes
    (values,) = node.args
    assert isinstance(values, tuple)
    kept = (n for i, n in enumerate(values) if i not in node.meta["let_go"])
    return [n for n in kept if isinstance(n, fx.Node)]


def _own(node: fx.Node) -> Mapping[int, int]:
    """Bytes of the storages of a node's value, by address; noted, as passes ask many times."""
    value = node.meta.get("val")
    if value is None:
        return {}
    known = node.meta.get("storages")
    if known is None or known[0] is not value:
        tensors = (v for v in pytree.tree_leaves(value) if isinstance(v, Tensor))
        storages = (tensor.untyped_storage() for tensor in tensors)
        known = node.meta["storages"] = value, {s._cdata: s.nbytes() for s in storages}
    found: Mapping[int, int] = known[1]
    return found
