"""What fused kernels keep out of memory, and what they do not where a choice of layouts cuts them.

A value that no kernel writes takes no memory, and one that a kernel of the backward computes again
is not kept for it (`Share.held`). A kernel is cut by a value inside it that is redistributed, by an
op with collectives of its own, and by an operand that two of its ops read in different layouts.
Then each of its ops reads what it would read alone; and so it does of an operand that is moved.

`PlannedKernels` says so of a plan, `KernelRows` in rows that are linear in the states chosen. Rows
have no pairs of states that the problem does not have, so some of the third kind are not in them.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from autopar.core.placement import Layout, shard_factor
from autopar.solver.build import StepProblem
from autopar.solver.candidates import unlike
from autopar.solver.discrete.problem import Array, Row
from autopar.solver.step import Op, Step, Value, storage_of

if TYPE_CHECKING:
    from autopar.solver.price import Pricing

__all__ = ["KernelRows", "PlannedKernels"]


class PlannedKernels:
    """The fused kernels of a decided plan.

    Args:
        pricing: of the plan.

    Attributes:
        cut: those that are cut, named as in `Step.kernels`.
    """

    def __init__(self, pricing: Pricing) -> None:
        self.pricing = pricing
        self.step = pricing.step
        self.cut: set[str] = set()
        layouts: dict[tuple[str, Value], Layout] = {}
        for name, kernel in self.step.kernels.items():
            chosen, inside = pricing.decision.candidates[name], self.step.shares[name].inside
            read = zip(self.step.ops[name].operands, chosen.inputs, strict=True)
            if (
                chosen.comm
                or any(self._is_moved(name, each.index) for each in inside)
                or any(layouts.setdefault((kernel, v), layout) != layout for v, layout in read)
            ):
                self.cut.add(kernel)

    def reads(self, op: Op) -> tuple[Value, ...]:
        """What must be in memory while an op runs."""
        if op.name not in self.step.shares or self.step.kernels[op.name] in self.cut:
            return op.operands
        wanted = self.pricing.decision.candidates[op.name].inputs
        pairs = zip(op.operands, wanted, strict=True)
        moved = (value for value, layout in pairs if self.pricing.moves(value, layout))
        return *self.step.held(op), *moved

    def _is_moved(self, name: str, index: int) -> bool:
        """True if an operand, or what it is a view of, comes in another layout than it has."""
        op = self.step.ops[name]
        value, wanted = op.operands[index], self.pricing.decision.candidates[name].inputs[index]
        if self.pricing.moves(value, wanted):
            return True
        maker = self.step.ops.get(value[0])
        return maker is not None and maker.view and self._is_moved(maker.name, 0)


class _Read(NamedTuple):
    """An operand of an op at a position of the order."""

    position: int
    op: Op
    number: int

    @property
    def value(self) -> Value:
        return self.op.operands[self.number]


class KernelRows:
    """What is in memory only where a value is moved or a kernel is cut.

    Args:
        step: with shares of fused ops.
        built: the states of each class.
        order: of the ops.
    """

    def __init__(self, step: Step, built: StepProblem, order: Sequence[Op]) -> None:
        self.step = step
        self.built = built
        self.mesh = built.moves.cluster.mesh_shape
        self._members: dict[str, list[Op]] = defaultdict(list)
        # by what is read, or shown by what is read
        self._if_moved: dict[Value, list[_Read]] = defaultdict(list)
        self._if_cut: dict[Value, dict[str, int]] = defaultdict(dict)
        self._rows: dict[str, Row] = {}
        for position, op in enumerate(order):
            if op.name not in step.shares:
                continue
            kernel, held = step.kernels[op.name], set(step.held(op))
            self._members[kernel].append(op)
            for index, value in enumerate(op.operands):
                base = storage_of(step.ops, value)
                self._if_cut[base][kernel] = position
                if value not in held:
                    self._if_moved[base].append(_Read(position, op, index))

    def last_read(self, view: Op) -> int:
        """Position of the last op that may read what a view shows; -1 if none may."""
        reads = self._if_moved.get(storage_of(self.step.ops, (view.name, 0)), ())
        return max((r.position for r in reads if self._shows(r.value, view)), default=-1)

    def _shows(self, value: Value, view: Op) -> bool:
        """True for what a view makes, and for views of that."""
        maker = self.step.ops.get(value[0])
        while maker is not None and maker.view and maker is not view:
            maker = self.step.ops.get(maker.operands[0][0])
        return maker is view

    def add(self, row: Row, value: Value, times: int, position: int) -> None:
        """Count a value, which nothing reads for certain, where ops from a position on read it."""
        num_bytes = times * self.step.specs[value].num_bytes
        for read in self._if_moved.get(value, ()):
            sources = self.built.produced(read.value)
            if read.position >= position and sources is not None:
                moved = unlike(sources, self._wanted(read), self.mesh)
                shares = num_bytes * self._shares(sources)[:, None] * moved
                self._add_pair(row, read.value[0], read, shares)
        for kernel, last in self._if_cut.get(value, {}).items():
            if last >= position:
                row.add_row(self._cut(kernel), num_bytes)

    def _cut(self, kernel: str) -> Row:
        """Where a kernel is cut, the part that a rank has of what its ops read, or about that."""
        if kernel not in self._rows:
            row = self._rows[kernel] = Row()
            for maker, read, shares in self._cuts(self._members[kernel]):
                self._add_pair(row, maker, read, shares)
            for op in self._members[kernel]:
                owner = self.built.classes[op.name]
                candidates = self.built.candidates[owner]
                if any(c.comm for c in candidates):
                    parts = [max(self._shares(c.outputs)) if c.comm else 0.0 for c in candidates]
                    row.add(owner, np.array(parts))
        return self._rows[kernel]

    def _add_pair(self, row: Row, maker: str, read: _Read, shares: Array) -> None:
        first, second = self.built.classes[maker], self.built.classes[read.op.name]
        edges = self.built.problem.edges
        if first == second or (first, second) in edges or (second, first) in edges:
            row.add_pair(first, second, shares)

    def _cuts(self, members: list[Op]) -> Iterator[tuple[str, _Read, Array]]:
        readers: dict[Value, list[_Read]] = defaultdict(list)
        for op in members:
            for each in self.step.shares[op.name].inside:
                yield from self._moved_inside(_Read(-1, op, each.index))
            for index, value in enumerate(op.operands):
                readers[value].append(_Read(-1, op, index))
        for reads in readers.values():
            for one, other in itertools.pairwise(reads):
                yield one.op.name, other, self._larger(self._wanted(one), self._wanted(other))

    def _moved_inside(self, read: _Read) -> Iterator[tuple[str, _Read, Array]]:
        """A value that an op has from another one, and the views on its way."""
        maker, sources = self.step.ops.get(read.value[0]), self.built.produced(read.value)
        if maker is None or sources is None:
            return
        yield maker.name, read, self._larger(sources, self._wanted(read))
        if maker.view:
            yield from self._moved_inside(_Read(-1, maker, 0))

    def _wanted(self, read: _Read) -> list[Layout]:
        candidates = self.built.candidates[self.built.classes[read.op.name]]
        return [c.inputs[read.number] for c in candidates]

    def _larger(self, one: Sequence[Layout], other: Sequence[Layout]) -> Array:
        """The larger of the shares that a rank has in two layouts, where they differ."""
        larger = np.maximum(self._shares(one)[:, None], self._shares(other))
        return np.asarray(larger * unlike(one, other, self.mesh))

    def _shares(self, layouts: Sequence[Layout]) -> Array:
        return np.array([1.0 / shard_factor(x, self.mesh) for x in layouts])
