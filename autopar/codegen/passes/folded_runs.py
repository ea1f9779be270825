"""How often what a node makes is there, in a folded program in which one block stands for k.

What the forward of a block saves for its backward is there k times between the two, and (k + 1) / 2
times on average while such blocks run; so are gradients. Passes that move nodes of such a block do
what they would do for most of the k in the whole program: the k - 1 others are not all there, as
they are beside a neighbour that runs once, and what a block begins before itself, or ends behind
itself, it begins and ends beside another of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from torch import fx

from autopar.codegen.passes.order import is_packing
from autopar.codegen.passes.sends import is_start, is_wait
from autopar.core.block_counts import block_counts

__all__ = ["Bytes", "FoldedRuns", "Held"]

Bytes = np.ndarray[tuple[int], np.dtype[np.int64]]


class _Run(NamedTuple):
    """Positions of the ops of a block that stands for `times` blocks, within one phase."""

    first: int
    last: int
    times: int
    phase: object

    @property
    def mean(self) -> int:
        """Of what each block adds, how many times it is there on average while they run."""
        return (self.times + 1) // 2


class Held(NamedTuple):
    """That a storage is there `copies` times from a position up to, but not at, another.

    `runs` are those of blocks whose own nodes see it `fewer` times less.
    """

    begin: int
    end: int
    copies: int = 1
    fewer: int = 0
    runs: tuple[_Run, ...] = ()


class FoldedRuns:
    """The runs of blocks that count for several; there are none in a whole program.

    Args:
        nodes: of a graph, in order.
        sums: gradients are added up, and not held, as in microbatches.
    """

    def __init__(self, nodes: Sequence[fx.Node], sums: bool) -> None:
        self.nodes = nodes
        self.sums = sums
        calls = [node for node in nodes if node.op == "call_function"]
        folded = any(node.meta.get("times", 1) > 1 for node in calls)
        ops = {node for node in calls if _is_op(node)} if folded else set()
        self._blocks: Mapping[fx.Node, int] = block_counts(calls, ops) if folded else {}
        self._runs: dict[tuple[int, object], list[_Run]] = defaultdict(list)
        for run in self._found(ops):
            self._runs[run.times, run.phase].append(run)
        self._nearest: dict[int, _Run | None] = {}
        self._fewer: dict[_Run, Bytes] = {}

    def _found(self, ops: set[fx.Node]) -> list[_Run]:
        found: list[_Run] = []
        inside = False
        stored = _of_storage(self.nodes) if ops else set()
        for position, node in enumerate(self.nodes if ops else ()):
            if node not in ops or node in stored:
                continue
            of = self._blocks[node], node.meta.get("phase")
            if inside and (found[-1].times, found[-1].phase) == of:
                found[-1] = found[-1]._replace(last=position)
            elif of[0] > 1:
                found.append(_Run(position, position, *of))
            inside = of[0] > 1
        return found

    def held(self, first: int, last: int) -> Sequence[Held]:
        """How often a storage is there that is made and last read at these positions."""
        once = (Held(first, last + 1),)
        made = self._of(first)
        if made is None:
            return once
        own = Held(first, made.last + 1, made.mean)
        fewer = made.times - made.mean
        reader = self.nodes[last]
        if reader.op == "output" and made.phase == "backward":
            kept = Held(made.last + 1, last + 1, made.times, fewer, (made,))
            return once if self.sums or last <= made.last else (own, kept)
        read = self._of(last)
        if (made.phase, read and read.phase) == ("forward", "backward") and last > made.last:
            assert read is not None
            begin = min(read.first, last + 1)
            saved = Held(made.last + 1, begin, made.times, fewer, (made, read))
            return own, saved, Held(begin, last + 1, read.mean)
        if read != made or _is_op(self.nodes[first]):
            return once
        # of what is sent: another of the blocks runs where it begins early, or ends late
        begin, end = max(first, made.first), min(last, made.last) + 1
        return (Held(begin, end),) if begin < end else ()

    def note(self, held: Held, num_bytes: int) -> None:
        """Note a storage of that many bytes."""
        for run in held.runs:
            if run not in self._fewer:
                self._fewer[run] = np.zeros(len(self.nodes), dtype=np.int64)
            self._fewer[run][held.begin : held.end] += held.fewer * num_bytes

    def fewer(self, position: int) -> Bytes | None:
        """Bytes at each position that are not there for most of what a node stands for."""
        run = self._of(position)
        return None if run is None else self._fewer.get(run)

    def _of(self, position: int) -> _Run | None:
        """The run of the block that a node belongs to: the nearest one."""
        if not self._runs:
            return None
        if position not in self._nearest:
            node = self.nodes[position]
            runs = self._runs.get((self._blocks.get(node, 1), node.meta.get("phase")), ())
            away = [max(run.first - position, position - run.last, 0) for run in runs]
            self._nearest[position] = runs[away.index(min(away))] if runs else None
        return self._nearest[position]


def _of_storage(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Placeholders, and casts, views and gathers of them: they may stand among another block's."""
    found: set[fx.Node] = set()
    for node in nodes:
        passes_on = is_packing(node) or is_start(node) or is_wait(node)
        if node.op == "placeholder" or (passes_on and found.issuperset(node.all_input_nodes)):
            found.add(node)
    return found


def _is_op(node: fx.Node) -> bool:
    """True for an op of the model, not one of what is sent."""
    return not (is_start(node) or is_wait(node) or "packs" in node.meta)
