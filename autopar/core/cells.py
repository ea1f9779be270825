"""Cells: the smallest pieces of a model that pipeline stages consist of, from its graph.

A stage begins where a cell begins. The numbered children of outermost containers are cells, as they
are what repeats. One of them that holds a list in turn (a Swin stage of blocks, a wrapper of the
real list) is opened: its cells are the children of that list, if they are alike and no more values
cross between two of them than at the ends of what holds them. Where such blocks are less than half
of a model, the children of any module are cells (`_Line.chain`), down to the deepest level at which
no more values cross than one level up. What has no cell of its own goes with what runs before it.

A value crosses where it is made before and read behind; it counts if it depends on a parameter and
on an input, as others are there in every stage. Modules whose ops are not in one run, such as one
that is called twice, are never cells.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Sequence
from functools import cached_property
from typing import TypeVar

import torch
from torch import fx

from autopar.core.blocks import Block, Blocks, block_of, members_by, names_of, within
from autopar.core.graph import TracedModel, dependents, node_info, producer
from autopar.core.ops import REARRANGING
from autopar.errors import ConstraintError

__all__ = ["Cells", "block_order"]

_FEW = 4  # values over a cut between the outermost modules, where there are no blocks
Owner = TypeVar("Owner", bound=Hashable)
_ALIKE = 0.5  # of the ops of the largest child of a list, the least that another one has


def block_order(traced: TracedModel) -> list[Block]:
    """Blocks in the order in which their forward begins."""
    return _in_order(traced, Blocks(traced).members, _kept(traced))


def _kept(traced: TracedModel) -> set[fx.Node]:
    """What a step in microbatches runs: it returns the loss alone, and a forward all outputs."""
    nodes = traced.nodes()
    stack = [
        nodes[spec.node]
        for spec in traced.outputs
        if spec.node is not None
        and (
            spec.kind != "output"
            or not traced.training
            or traced.loss_index is None
            or spec.target == str(traced.loss_index)
        )
    ]
    found = set(stack)
    while stack:
        for operand in stack.pop().all_input_nodes:
            if operand not in found:
                found.add(operand)
                stack.append(operand)
    return found


class Cells:
    """The cells of one graph.

    Attributes:
        names: FQN of each cell the graph holds, in the order in which their forward begins.
        members: nodes of each, in graph order.
        place: cell of each node in one, by name.
    """

    def __init__(self, traced: TracedModel) -> None:
        self.traced = traced
        self._kept = _kept(traced)
        self._owners: dict[str, str | None] = {}
        self._find()
        self.members = members_by(traced, self.of_module)
        self.names = _in_order(traced, self.members, self._kept)
        self.place = {n.name: cell for cell, nodes in self.members.items() for n in nodes}

    def of_module(self, path: str) -> str | None:
        """The cell that a module, or a parameter, stands in."""
        missing = []
        while path and path not in self._owners:
            missing.append(path)
            path = path.rpartition(".")[0]
        found = self._owners.get(path)
        self._owners |= dict.fromkeys(missing, found)
        return found

    def of_cut(self, name: str) -> str:
        """The cell that begins where a module does, or the name as it is if none does."""
        return name if name in self.members else self._beginnings.get(name, name)

    def no_cut(self, name: str, names: Sequence[str]) -> ConstraintError:
        """What is wrong with a cut, of a model of which all cells are given."""
        if not names:
            return ConstraintError(
                f"pipeline cut {name!r}: no parameter reaches a block of the model in a microbatch"
            )
        known = ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
        if name not in self._line.first:
            return ConstraintError(
                f"pipeline cut {name!r} is no block of the model; its blocks are {known}"
            )
        crossing = self._line.crossing[self._line.first[name]]
        inside = self.of_module(name)
        return ConstraintError(
            f"pipeline cut {name!r} is no block of the model: it stands inside of, or behind, "
            f"{inside or 'others'}, and {crossing} values that depend on parameters cross in front "
            f"of it; the model can be cut at its blocks {known}"
        )

    @cached_property
    def _line(self) -> _Line:
        return _Line(self.traced, self._kept)

    @cached_property
    def _beginnings(self) -> dict[str, str]:
        """The cell that begins with a module, by the module."""
        line = self._line
        firsts: dict[str, int] = {}
        for position, node in enumerate(line.nodes):
            if (cell := self.place.get(node.name)) is not None:
                firsts.setdefault(cell, position)
        by_position = {position: cell for cell, position in firsts.items()}
        return {m: by_position[p] for m, p in line.first.items() if p in by_position}

    def _find(self) -> None:
        folded = {r.container for r in self.traced.repeats}
        if not folded and not self._most_in_blocks():
            line = self._line
            if chain := line.chain("", _FEW, outermost=True):
                self._owners |= line.owners("", chain)
                return
        for block in block_order(self.traced):
            name, *parts = names_of(block)
            nested = block.container not in folded and not parts and self._nested(name)
            whole = dict.fromkeys((name, *parts), name)
            self._owners |= self._line.opened(name) if nested else whole

    def _most_in_blocks(self) -> bool:
        """True if half of the parameters, or more, are in blocks."""
        inside = [block_of(s.target) is not None for s in self.traced.parameters()]
        return 2 * sum(inside) >= len(inside)

    @cached_property
    def _lists(self) -> set[str]:
        """Blocks with numbered modules inside."""
        found = set()
        for spec in self.traced.parameters():
            block = block_of(spec.target, self.traced.nested)
            if block is not None:
                name = f"{block.container}.{block.number}"
                if any(part.isdigit() for part in within(spec.target, block).split(".")):
                    found.add(name)
        return found

    def _nested(self, block: str) -> bool:
        return block in self._lists


class _Line:
    """The forward ops that a parameter and an input reach, in order, and what crosses between them.

    Attributes:
        nodes: these ops.
        crossing: values that are made before each of them and read by it or later, (n + 1,).
        first: position of the first op of each module and of those that hold it.
    """

    def __init__(self, traced: TracedModel, kept: Collection[fx.Node]) -> None:
        moving = dependents(traced, "parameter") & dependents(traced, "input", "seed")
        # not what the backward alone reads, which a recomputed forward leaves to it
        self.nodes = [n for n in _of_forward(traced) if n in kept and n.name in moving]
        self.holders = {s.target.rpartition(".")[0] for s in traced.parameters()}
        self.holders = {p for path in self.holders for p in _prefixes(path)}
        self.first: dict[str, int] = {}
        self.behind: dict[str, int] = {}  # the position behind the last op
        self.counts: Counter[str] = Counter()
        self.ops: dict[str, Counter[str]] = defaultdict(Counter)
        for position, node in enumerate(self.nodes):
            for path in _prefixes(node_info(traced, producer(node)).module):
                self.first.setdefault(path, position)
                self.behind[path] = position + 1
                self.counts[path] += 1
                if node.target not in _FREE:
                    self.ops[path][str(node.target)] += 1
        self.children: dict[str, list[str]] = defaultdict(list)
        for path in self.first:  # in the order of their first ops
            self.children[path.rpartition(".")[0]].append(path)
        self.crossing = self._crossing()

    def _crossing(self) -> list[int]:
        positions = {node: i for i, node in enumerate(self.nodes)}
        last: dict[fx.Node, int] = {}
        for i, node in enumerate(self.nodes):
            for operand in node.all_input_nodes:
                source = operand
                while source.target is torch.ops.aten.alias.default:
                    source = source.all_input_nodes[0]
                if producer(source) in positions:
                    last[source] = i
        changes = [0] * (len(self.nodes) + 2)
        for source, end in last.items():
            changes[positions[producer(source)] + 1] += 1
            changes[end + 1] -= 1
        found = [0]
        for change in changes[1:-1]:
            found.append(found[-1] + change)
        return found

    def _at_ends(self, path: str) -> int:
        """Values that cross where a module begins or ends, or one."""
        return max(1, self.crossing[self.first[path]], self.crossing[self.behind[path]])

    def _in_one_run(self, path: str) -> bool:
        return self.counts[path] == self.behind[path] - self.first[path]

    def opened(self, block: str) -> dict[str, str | None]:
        """The cells of a block, by the modules that they consist of."""
        if block not in self.first:
            return {block: block}
        limit = self._at_ends(block)
        found = self._lists(block, limit)
        found = [*found[:1], *(c for c in found[1:] if self.crossing[self.first[c]] <= limit)]
        return self.owners(block, found) if len(found) > 1 else {block: block}

    def _lists(self, path: str, limit: int) -> list[str]:
        """Children of lists in a module, and of those in these."""
        numbered = [c for c in self.children[path] if c.rpartition(".")[2].isdigit()]
        if len(numbered) > 1 and not self._may_part(numbered, limit):
            return []
        found: list[str] = []
        for child in numbered if len(numbered) > 1 else self.children[path]:
            inside = self._lists(child, self._at_ends(child) if len(numbered) > 1 else limit)
            found += inside or ([child] if len(numbered) > 1 else [])
        return found

    def _may_part(self, children: Sequence[str], limit: int) -> bool:
        """True if a list may be cut between any two of its children, which are alike."""
        if not all(self._in_one_run(c) for c in children):
            return False
        if any(self.crossing[self.first[c]] > limit for c in children[1:]):
            return False
        largest = max((self.ops[c] for c in children), key=lambda ops: ops.total())
        return all(
            self.ops[c] <= largest and self.ops[c].total() >= _ALIKE * largest.total()
            for c in children
        )

    def chain(self, path: str, limit: int, outermost: bool = False) -> list[str]:
        """Modules that hold parameters and follow each other, at the deepest level that serves.

        Args:
            path: of the module to look into.
            limit: values that may cross between two of them.
            outermost: leave out those in front of which more values cross, instead of all.
        """
        inside = [c for c in self.children[path] if c in self.holders]
        inside = [c for c in inside if self._in_one_run(c)]
        if len(inside) == 1:
            return self.chain(inside[0], limit, outermost)
        behind = [c for c in inside[1:] if self.crossing[self.first[c]] <= limit]
        if not behind or (not outermost and len(behind) + 1 < len(inside)):
            return []
        found: list[str] = []
        for child in (inside[0], *behind):
            found += self.chain(child, self._at_ends(child)) or [child]
        return found

    def owners(self, path: str, cells: Sequence[str]) -> dict[str, str | None]:
        """The cell of each module inside of one: others go with the cell before, or the first.

        None for modules that hold cells: what these compute themselves goes with what runs before.
        """
        holding = {p for cell in cells for p in _prefixes(cell.rpartition(".")[0])}
        found: dict[str, str | None] = {path: None} if path else {}
        current = cells[0]
        stack = list(reversed(self.children[path]))
        while stack:
            top = stack.pop()
            if top in holding:
                found[top] = None
                stack.extend(reversed(self.children[top]))
                continue
            current = top if top in cells else current
            found[top] = current
        return found


def _of_forward(traced: TracedModel) -> list[fx.Node]:
    """Ops of the forward that it needs itself, in order."""
    found: dict[fx.Node, None] = {}
    for node in reversed(traced.graph.nodes):
        if (
            node.op == "call_function"
            and node_info(traced, producer(node)).phase == "forward"
            and any(user.op == "output" or user in found for user in node.users)
        ):
            found[node] = None
    return list(reversed(found))


_FREE = REARRANGING | {torch.ops.aten.alias.default}


def _prefixes(path: str) -> list[str]:
    parts = path.split(".") if path else []
    return [".".join(parts[:i]) for i in range(1, len(parts) + 1)]


def _in_order(
    traced: TracedModel, members: dict[Owner, list[fx.Node]], kept: Collection[fx.Node]
) -> list[Owner]:
    """Those in which forward ops run at each turn, in the order of the first of them.

    What no input reaches runs once a step: a network that makes a filter is no block.
    """
    position = {node: i for i, node in enumerate(traced.graph.nodes)}
    fed = dependents(traced, "input", "received", "seed")

    def first(nodes: Iterable[fx.Node]) -> int | None:
        running = (
            position[n]
            for n in nodes
            if n.op == "call_function"
            and n in kept
            and node_info(traced, n).phase == "forward"
            and n.name in fed
            and n.name not in traced.hoisted
        )
        return next(running, None)

    begins = {owner: first(nodes) for owner, nodes in members.items()}
    found = {owner: position for owner, position in begins.items() if position is not None}
    return sorted(found, key=found.__getitem__)
