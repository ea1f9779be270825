"""`extended`: a folded graph with more of the periods that it leaves out, to be cut into stages.

The folded period is copied, and each copy is wired to the one before as period 0 is to -1, and to
the one behind as -1 is to 0 (`stage_folding.py` numbers them, and says which are held).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from torch import fx
from torch.fx.node import map_arg

from autopar.core.blocks import Block, Blocks, renumbered
from autopar.core.graph import InputSpec, NodeInfo, OutputSpec, Repeat, TracedModel
from autopar.core.late_module import late_module
from autopar.errors import ConstraintError

__all__ = ["extended"]

_Key: TypeAlias = tuple[fx.Node, int]


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
        self.env: dict[_Key, fx.Node] = {}
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

    def _write(self, key: _Key, operands: Mapping[fx.Node, _Key]) -> None:
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

    def _operands(self, node: fx.Node, copy: int) -> dict[fx.Node, _Key]:
        """What a copy of a node reads, by what the node reads."""
        mine = self._period(node)
        last = len(self.inner) - 1
        like: Sequence[fx.Node] = ()
        if node in self.names and copy < last:
            like = self.before[node].all_input_nodes
        found: dict[fx.Node, _Key] = {}
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
