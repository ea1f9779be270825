"""Cuts the graph of a step in microbatches into the parts that run one by one.

The backward is there as a whole and in two: what the stage before waits for, and the rest. The
*last* part takes the place of a stage's last backward, or of the rest of it, and of *finish*: a
gradient is reduced as soon as the last microbatch has added to its sum, beside what is left of the
backward, and waited for at the end.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import fx

from autopar.codegen.accumulate import PREFIX, accumulated, add_up
from autopar.codegen.partition import EmptiesItsList, copy_part
from autopar.codegen.passes import phase_of
from autopar.codegen.passes.in_place import mark_in_place, reduce_in_place
from autopar.codegen.passes.order import copied, reorder
from autopar.codegen.passes.overlap import begin_early
from autopar.codegen.passes.sends import is_start

__all__ = ["Cutter", "Part", "Parts", "behind", "inputs_first"]

_ORDER = ("prepare", "forward", "backward", "finish")
"""Phases of the graph as they run."""

_LAST = ("last", "close", "wait")
"""The last part, and its two halves: up to the last op of the backward, and what is behind."""


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of the program.

    Attributes:
        module: takes one list of the values in `reads`, which it empties; returns `writes`, of
            which contributions to gradients are added to the sums that it reads.
        reads, writes: names of values.
    """

    module: fx.GraphModule
    reads: tuple[str, ...]
    writes: tuple[str, ...]


class Parts(Mapping[str, Part]):
    """The parts of a graph by name, each cut out when it is asked for.

    Args:
        cutter: of the graph.
        graph: behind its last passes.
        passes: names of those; with "early" there is a last part, where gradients are reduced.
    """

    def __init__(self, cutter: Cutter, graph: fx.Graph, passes: Collection[str]) -> None:
        self._cutter, self._graph, self._passes = cutter, graph, passes
        self._found: dict[str, Part] = {}
        self._ends: Mapping[str, Callable[[], Part]] = {}
        reduces = any(is_start(n) and phase_of(n) == "finish" for n in graph.nodes)
        self._last = _LAST if reduces and "early" in passes else ()
        self._names = (*_ORDER, "input", "weight", *self._last)

    def __getitem__(self, name: str) -> Part:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._found and name in _LAST:
            if not self._ends:
                self._ends = self._cutter.last(self._graph, "in_place" in self._passes)
            self._found[name] = self._ends[name]()
        elif name not in self._found:
            self._found[name] = self._cutter.part(self._graph, name)
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cutter:
    """Cuts a graph whose nodes know their phase.

    Attributes:
        outputs: names of what leaves the step.
        sums: names of values of the backward that are added up over the microbatches.
        sent: names of outputs that other stages wait for.
        splits: the backward runs in two parts.
    """

    outputs: Collection[str]
    sums: Collection[str]
    sent: Collection[str]
    splits: bool

    def part(self, graph: fx.Graph, name: str) -> Part:
        """A part of the graph, any but the last."""
        summed = set(self.sums)
        inside = self._bodies(graph)[name]
        return _part(inside, {*self.outputs, *summed}, set() if name == "finish" else summed)

    def last(self, graph: fx.Graph, in_place: bool) -> dict[str, Callable[[], Part]]:
        """Cut the last part, whole and in two: the stage before does not wait for the reductions.

        What begins earlier must fit: the peak stays that of the two parts one after the other.

        Args:
            graph: behind its last passes.
            in_place: reductions may work on the sums.
        """
        graph = copied(graph)
        bodies = self._bodies(graph)
        base, finish = bodies["weight" if self.splits else "backward"], bodies["finish"]
        read: dict[str, str] = {}
        for node in [n for n in base if n.name in set(self.sums)]:
            total, made = _sum_of(graph, node, finish)
            read[total.name] = PREFIX + node.name
            base.insert(base.index(node) + 1, made)
        own = {*base, *finish}

        def part_of(node: fx.Node) -> Hashable:
            return "last" if node in own else phase_of(node)

        if in_place:
            mark_in_place(graph, part_of)
        begin_early(graph, base, finish)
        if in_place:
            reduce_in_place(graph, part_of)
        nodes = [n for n in graph.nodes if n in own]
        end = max(nodes.index(n) for n in base) + 1

        def cut(inside: list[fx.Node]) -> Part:
            part = _part(inside, set(self.outputs), set())
            return replace(part, reads=tuple(read.get(n, n) for n in part.reads))

        pieces = (nodes, nodes[:end], nodes[end:])
        return {name: partial(cut, inside) for name, inside in zip(_LAST, pieces, strict=True)}

    def _bodies(self, graph: fx.Graph) -> dict[str, list[fx.Node]]:
        """Nodes of each phase, and of the backward in two."""
        calls = [n for n in graph.nodes if n.op == "call_function"]
        found = {phase: [n for n in calls if phase_of(n) == phase] for phase in _ORDER}
        ends = [n for n in found["backward"] if n.name in self.sent]
        needed = _needed(ends, found["backward"])
        found["input"] = [n for n in found["backward"] if n in needed]
        found["weight"] = [n for n in found["backward"] if n not in needed]
        return found


def _sum_of(graph: fx.Graph, node: fx.Node, finish: Collection[fx.Node]) -> tuple[fx.Node, fx.Node]:
    """A placeholder for the sum of the microbatches before, and the whole sum, for `finish`."""
    value = node.meta["val"]
    with graph.inserting_before(next(iter(graph.nodes))):
        total = graph.placeholder(f"{node.name}_sum")
    with value.fake_mode:
        total.meta = {"val": torch.empty_like(value), "dies": True}
    with graph.inserting_after(node):
        made = graph.call_function(add_up, (total, node))
    made.meta = {key: node.meta[key] for key in ("phase", "origin", "val") if key in node.meta}
    for user in [n for n in node.users if n in finish]:
        user.replace_input_with(node, made)
    return total, made


def inputs_first(graph: fx.Graph, sent: Iterable[fx.Node]) -> None:
    """Put what the backward sends, and what that needs, before the rest, as it will run.

    Passes then see what lives when: gathers are issued no earlier than memory allows.
    """
    late = behind(graph, sent)
    last = max((i for i, n in enumerate(graph.nodes) if phase_of(n) == "backward"), default=0)
    reorder(graph, {n: last + (i + 1) / (len(late) + 1) for i, n in enumerate(late)})


def behind(graph: fx.Graph, sent: Iterable[fx.Node]) -> Mapping[fx.Node, None]:
    """What the backward does when it has sent what it sends, wherever it stands in the graph."""
    backward = [n for n in graph.nodes if phase_of(n) == "backward" and n.op == "call_function"]
    needed = _needed([n for n in sent if phase_of(n) == "backward"], backward)
    return dict.fromkeys(n for n in backward if n not in needed)


def _needed(ends: Iterable[fx.Node], among: Sequence[fx.Node]) -> set[fx.Node]:
    """Ends and what they are made of; both results of an op are taken out where it runs."""
    found = _ancestors(ends, set(among))
    return found | {n for n in among if n.target is operator.getitem and n.args[0] in found}


def _ancestors(ends: Iterable[fx.Node], among: set[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    stack = [n for n in ends if n in among]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(a for a in node.all_input_nodes if a in among)
    return found


def _part(inside: list[fx.Node], leaving: set[str], sums: set[str]) -> Part:
    members = set(inside)
    reads = dict.fromkeys(a for n in inside for a in n.all_input_nodes if a not in members)
    writes = [
        n for n in inside if n.name in leaving or any(
            u not in members and u.op != "output" for u in n.users)
    ]  # fmt: skip
    module = copy_part(list(reads), inside, tuple(writes))
    totals = accumulated(module.graph, [n.name for n in writes], sums)
    module.graph.set_codegen(EmptiesItsList())
    module.recompile()
    names = tuple(n.name for n in reads)
    return Part(module, (*names, *totals), tuple(n.name for n in writes))
