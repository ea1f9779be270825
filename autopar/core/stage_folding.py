"""Stages of a folded graph: of equal stages one is made, and of its equal blocks four periods.

A folded graph holds four periods of a run of equal blocks, numbered here -2, -1, 0 and `times`,
where period 0 stands for all from 0 to `times - 1`. An `Outline` says which stages of a pipeline
are equal, and which periods are kept of the others. `extended` writes the graph that holds these:
the folded period is copied, and each copy is wired to the one before as period 0 is to -1, and to
the one behind as -1 is to 0. Cut between its blocks, the graph gives stages that are folded again.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx
from torch.fx.node import map_arg

from autopar.core.blocks import Block, Blocks, block_of
from autopar.core.cells import Cells
from autopar.core.graph import InputSpec, NodeInfo, OutputSpec, Repeat, TracedModel
from autopar.core.late_module import late_module
from autopar.errors import ConstraintError

__all__ = ["Outline", "block_names", "extended", "outline", "renumbered"]

_KEPT = 4  # periods of a stage that is folded


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """Which stages are made of a pipeline's.

    Attributes:
        kinds: of each stage, the index of the made stage that it equals.
        shifts: of each stage, by how much its block numbers exceed those of the made one.
        starts: FQN of the block that each made stage but the first begins with.
        repeats: of each made stage.
        periods: by container, the periods that are kept.
    """

    kinds: tuple[int, ...]
    shifts: tuple[int, ...]
    starts: tuple[str, ...]
    repeats: tuple[tuple[Repeat, ...], ...]
    periods: Mapping[str, tuple[int, ...]]


def block_names(traced: TracedModel, cells: Cells) -> list[tuple[str, str]]:
    """Every cell of the model in forward order, with the cell of the graph that it is like.

    Raises:
        ConstraintError: blocks that repeat together do not follow each other.
    """
    repeats = {r.container: r for r in traced.repeats}
    order = [block_of(name) for name in cells.names]
    found: list[tuple[str, str]] = []
    position = 0
    while position < len(order):
        block = order[position]
        repeat = repeats.get(block.container) if block is not None else None
        if block is None or repeat is None or not repeat.holds(block.number):
            found.append((cells.names[position],) * 2)
            position += 1
            continue
        period = order[position : position + repeat.period]
        if period != [Block(block.container, repeat.first + i) for i in range(repeat.period)]:
            raise ConstraintError(
                f"the blocks of {block.container} that repeat do not run one after the other: a "
                "pipeline is not offered"
            )
        found += [
            (
                f"{block.container}.{repeat.first + i + turn * repeat.period}",
                cells.names[position + i],
            )
            for turn in range(repeat.times)
            for i in range(repeat.period)
        ]
        position += repeat.period
    return found


def outline(traced: TracedModel, cuts: Sequence[str]) -> Outline:
    """Which stages the cuts of a folded graph make.

    Args:
        traced: folded.
        cuts: FQN of the block that each stage but the first begins with, as in `stages.cut`.

    Raises:
        ConstraintError: a cut is no block, or lies inside a period of blocks that repeat together.
    """
    repeats = {r.container: r for r in traced.repeats}
    cells = Cells(traced)
    stages = _stages([name for name, _ in block_names(traced, cells)], cuts, cells)
    found = [_Stage.of(blocks, repeats) for blocks in stages]
    made: list[_Stage] = []
    kinds: list[int] = []
    shifts: list[int] = []
    for stage in found:
        twin = next((i for i, s in enumerate(made) if s.equals(stage)), None)
        if twin is None:
            twin = len(made)
            made.append(stage)
        kinds.append(twin)
        shifts.append(stage.number - made[twin].number)
    periods: dict[str, set[int]] = {name: {-2, -1, 0, r.times} for name, r in repeats.items()}
    for stage in made:
        for name, kept in stage.kept().items():
            periods[name] |= kept
    return Outline(
        kinds=tuple(kinds),
        shifts=tuple(shifts),
        starts=tuple(s.first for s in made[1:]),
        repeats=tuple(s.repeats(repeats) for s in made),
        periods={name: tuple(sorted(kept)) for name, kept in periods.items()},
    )


def _stages(names: list[str], cuts: Sequence[str], cells: Cells) -> list[list[str]]:
    begun = [cut if cut in names else cells.of_cut(cut) for cut in cuts]
    for cut, cell in zip(cuts, begun, strict=True):
        if cell not in names:
            raise cells.no_cut(cut, names)
    starts = [names.index(cell) for cell in begun]
    if starts != sorted(set(starts)) or (starts and starts[0] == 0):
        raise ConstraintError(
            f"pipeline cuts {list(cuts)} must be in forward order, behind the first block "
            f"{names[0]}"
        )
    ends = [*starts, len(names)]
    return [names[a:b] for a, b in zip([0, *starts], ends, strict=True)]


@dataclass(frozen=True, slots=True)
class _Stage:
    """Cells of a stage; `runs` are the periods of each folded container, `inner` as below."""

    first: str
    runs: dict[str, tuple[int, int]]
    inner: bool  # it holds nothing but periods that the folded one stands for

    @classmethod
    def of(cls, names: list[str], repeats: Mapping[str, Repeat]) -> _Stage:
        runs: dict[str, tuple[int, int]] = {}
        inner = True
        counts: dict[tuple[str, int], int] = {}
        for name in names:
            block = block_of(name)
            repeat = repeats.get(block.container) if block is not None else None
            period = (block.number - repeat.first) // repeat.period if block and repeat else -3
            if block is None or repeat is None or not -2 <= period <= repeat.times:
                inner = False
                continue
            inner &= 0 <= period < repeat.times
            low, high = runs.get(block.container, (period, period))
            runs[block.container] = min(low, period), max(high, period)
            counts[block.container, period] = counts.get((block.container, period), 0) + 1
        for (name, period), count in counts.items():
            if count != repeats[name].period:
                start = repeats[name].first + period * repeats[name].period
                raise ConstraintError(
                    f"{name}.{start} and the {repeats[name].period - 1} blocks behind it repeat "
                    "together: a pipeline cannot be cut between them"
                )
        return cls(names[0], runs, inner and len(runs) == 1)

    @property
    def number(self) -> int:
        """Of the first block; 0 if there is none."""
        block = block_of(self.first)
        return block.number if block is not None else 0

    def equals(self, other: _Stage) -> bool:
        if not (self.inner and other.inner and self.runs.keys() == other.runs.keys()):
            return False
        return all(b - a == d - c for (a, b), (c, d) in self._with(other))

    def _with(self, other: _Stage) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        return ((run, other.runs[name]) for name, run in self.runs.items())

    def kept(self) -> dict[str, set[int]]:
        """Periods of the stage that its graph holds, by container."""
        return {
            name: set(range(low, high + 1)) if high - low < _KEPT else {low, low + 1, low + 2, high}
            for name, (low, high) in self.runs.items()
        }

    def repeats(self, whole: Mapping[str, Repeat]) -> tuple[Repeat, ...]:
        """Of the stage's own graph."""
        found = []
        for name, (low, high) in self.runs.items():
            if high - low >= _KEPT:
                given = whole[name]
                first = given.first + (low + 2) * given.period
                times = high - low - 2
                found.append(Repeat(container=name, first=first, period=given.period, times=times))
        return tuple(found)


def renumbered(name: str, container: str, by: int) -> str:
    """A name in a block of a container, in the block `by` numbers further on."""
    block = block_of(name)
    if block is None or block.container != container:
        return name
    return f"{container}.{block.number + by}{name[len(f'{block.container}.{block.number}') :]}"


def extended(traced: TracedModel, periods: Mapping[str, Sequence[int]]) -> TracedModel:
    """The folded graph with some more of the periods that it leaves out, and no repeats.

    Args:
        traced: folded.
        periods: by container, those to hold; -2, -1, 0 and `times` among them.

    Returns:
        A graph to be cut. What it computes is of no use: blocks are missing.
    """
    for repeat in traced.repeats:
        inner = [p for p in periods[repeat.container] if 0 <= p < repeat.times]
        traced = _Extender(traced, repeat, inner).run()
    return replace(traced, repeats=())


Key = tuple[fx.Node, int]


class _Extender:
    """Copies the folded period of one container; copy i stands for period `inner[i]`."""

    def __init__(self, traced: TracedModel, repeat: Repeat, inner: list[int]) -> None:
        self.traced = traced
        self.repeat = repeat
        self.inner = inner
        self.blocks = Blocks(traced)
        self.folded = [n for n in traced.graph.nodes if self._period(n) == 0]
        self.names = set(self.folded)
        self.twins = self._twins()  # in period 0, of the nodes of period -1
        self.before = {twin: node for node, twin in self.twins.items()}
        self.graph = fx.Graph()
        self.env: dict[Key, fx.Node] = {}
        self.info: dict[str, NodeInfo] = {}
        self.hoisted: set[str] = set()

    def _period(self, node: fx.Node) -> int | None:
        """Period of the container that a node stands in; a `getitem` goes with what it is of."""
        place = self.blocks.place.get(node.name)
        if place is None or place[0].container != self.repeat.container:
            return None
        return self.repeat.unit(place[0].number)

    def _twins(self) -> dict[fx.Node, fx.Node]:
        found: dict[fx.Node, fx.Node] = {}
        for offset in range(self.repeat.period):
            number = self.repeat.first + offset
            mine = self.blocks.members[Block(self.repeat.container, number)]
            before = self.blocks.members[Block(self.repeat.container, number - self.repeat.period)]
            same = len(mine) == len(before) and all(
                str(a.target) == str(b.target) or a.op == "placeholder"
                for a, b in zip(mine, before, strict=True)
            )
            if not same:
                raise ConstraintError(
                    f"the blocks of {self.repeat.container} are not equal in microbatches: a "
                    "pipeline is not offered"
                )
            found.update(zip(before, mine, strict=True))
        return found

    def run(self) -> TracedModel:
        order = list(self.traced.graph.nodes)
        inputs = self._placeholders(order)
        calls = [n for n in self.folded if n.op == "call_function"]
        # a constant of the backward may count as forward, as no microbatch changes it
        turn = next((i for i, n in enumerate(calls) if not self._is_forward(n)), len(calls))
        forward, backward = calls[:turn], calls[turn:]
        last = len(self.inner) - 1
        for node in order:
            if node.op != "call_function":
                continue
            if node in self.names and backward and node is backward[0]:
                for copy in range(last, 0, -1):
                    self._emit_all(backward, copy)
            self._emit(node, 0)
            if forward and node is forward[-1]:
                for copy in range(1, last + 1):
                    self._emit_all(forward, copy)
        outputs = self._outputs()
        self.graph.output(tuple(node for node, _ in outputs))
        self.graph.lint()
        return replace(
            self.traced,
            graph_module=late_module(self.graph),
            inputs=tuple(inputs),
            outputs=tuple(spec for _, spec in outputs),
            info=self.info,
            hoisted=frozenset(self.hoisted),
        )

    def _is_forward(self, node: fx.Node) -> bool:
        info = self.traced.info.get(node.name)
        return info is None or info.phase == "forward"

    def _emit_all(self, nodes: list[fx.Node], copy: int) -> None:
        for node in nodes:
            self._emit(node, copy)

    def _emit(self, node: fx.Node, copy: int) -> fx.Node:
        """A node, after what it reads."""
        stack = [(node, copy)]
        while stack:
            key = stack[-1]
            if key in self.env:
                stack.pop()
                continue
            operands = self._operands(*key)
            waiting = [k for k in operands.values() if k not in self.env]
            if waiting:
                stack.extend(waiting)
                continue
            stack.pop()
            self._write(key, operands)
        return self.env[node, copy]

    def _write(self, key: Key, operands: Mapping[fx.Node, Key]) -> None:
        node, copy = key
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: self.env[operands[n]])
        twin = self.graph.create_node(
            node.op, node.target, args, kwargs, name=self._named(node.name, copy)
        )
        twin.meta = {"origin": node.name, **node.meta}
        self._noted(node, twin, copy)

    def _named(self, name: str, copy: int) -> str:
        return f"{name}_period{self.inner[copy]}" if copy else name

    def _noted(self, node: fx.Node, twin: fx.Node, copy: int) -> None:
        assert twin.name == self._named(node.name, copy), f"{twin.name} is not the name"
        self.env[node, copy] = twin
        info = self.traced.info.get(node.name)
        if info is not None:
            self.info[twin.name] = replace(info, module=self._moved(info.module, copy))
        if node.name in self.traced.hoisted:
            self.hoisted.add(twin.name)

    def _moved(self, name: str, copy: int) -> str:
        by = self.inner[copy] * self.repeat.period if copy else 0
        return renumbered(name, self.repeat.container, by)

    def _operands(self, node: fx.Node, copy: int) -> dict[fx.Node, Key]:
        """What a copy of a node reads, by what the node reads."""
        mine = self._period(node)
        last = len(self.inner) - 1
        like: Sequence[fx.Node] = ()
        if node in self.names and copy < last:
            like = self.before[node].all_input_nodes
        found: dict[fx.Node, Key] = {}
        for index, operand in enumerate(node.all_input_nodes):
            theirs = self._period(operand)
            if operand in self.names:
                found[operand] = operand, (copy if mine == 0 else last if (mine or 0) > 0 else 0)
            elif mine == 0 and theirs == -1 and copy:
                found[operand] = self.twins[operand], copy - 1
            elif mine == 0 and theirs is not None and theirs > 0 and copy < last:
                found[operand] = like[index], copy + 1
            else:
                found[operand] = operand, 0
        return found

    def _placeholders(self, order: list[fx.Node]) -> list[InputSpec]:
        specs = {s.node: s for s in self.traced.inputs}
        found: list[InputSpec] = []
        for node in order:
            if node.op != "placeholder":
                continue
            for copy in range(len(self.inner) if node in self.names else 1):
                name = self._named(node.name, copy)
                twin = self.graph.placeholder(name)
                twin.meta = dict(node.meta)
                self._noted(node, twin, copy)
                spec = specs[node.name]
                target = self._moved(spec.target, copy)
                found.append(replace(spec, node=name, target=target))
        return found

    def _outputs(self) -> list[tuple[fx.Node | None, OutputSpec]]:
        nodes = self.traced.nodes()
        found: list[tuple[fx.Node | None, OutputSpec]] = []
        for spec in self.traced.outputs:
            if spec.node is None:
                found.append((None, spec))
                continue
            node = nodes[spec.node]
            base = node.all_input_nodes[0] if node.target is operator.getitem else node
            for copy in range(len(self.inner) if base in self.names else 1):
                made = self._emit(node, copy)
                target: Any = self._moved(spec.target, copy)
                found.append((made, replace(spec, node=made.name, target=target)))
        return found
