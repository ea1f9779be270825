"""Writes the graph of one pipeline stage."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import fx
from torch.fx.node import map_arg

from autopar.core.graph import InputSpec, NodeInfo, OutputSpec, TracedModel, node_info, producer
from autopar.core.late_module import late_module
from autopar.core.transfers import Transfer, paired

__all__ = ["Contribution", "StageWriter"]

Contribution = tuple[str, list[fx.Node], OutputSpec]
"""FQN of a parameter, the path from its gradient down to a part of it, and where the sum goes."""


class StageWriter:
    """Writes the graph of one stage.

    Args:
        traced: of one microbatch.
        stage: its number.
        transfers: of all stages.
        needs: the nodes that the stage runs.
    """

    def __init__(
        self,
        traced: TracedModel,
        stage: int,
        transfers: Sequence[Transfer],
        needs: Collection[fx.Node],
    ) -> None:
        self.traced = traced
        self.needs = needs
        self.stage = stage
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.inputs: list[InputSpec] = []
        self.outputs: list[tuple[fx.Node | None, OutputSpec]] = []
        self.info = dict(traced.info)
        self.hoisted = set(traced.hoisted)
        self.arriving = {t.value: t for t in transfers if t.target == stage and t.phase != "finish"}
        self.leaving = [t for t in transfers if t.source == stage and t.phase != "finish"]
        self.ports = paired(transfers, stage)
        self.taken = {n.name for n in traced.graph.nodes}

    def run(
        self, outputs: Iterable[OutputSpec], contributions: Iterable[Contribution]
    ) -> TracedModel:
        specs = {s.node: s for s in self.traced.inputs}
        for node in self.traced.graph.nodes:
            if node.op == "placeholder" and node in self.needs:
                self.env[node] = self._copy(node)
                self.inputs.append(specs[node.name])
        for node in self.traced.graph.nodes:
            if node.name in self.arriving:
                self._receive(node)
        for node in self.traced.graph.nodes:
            if node.op == "call_function" and node in self.needs and node not in self.env:
                self.env[node] = self._copy(node)
        self._results(outputs)
        self._send()
        self._contributions(contributions)
        self.graph.output(tuple(node for node, _ in self.outputs))
        self.graph.lint()
        alive = {n.name for n in self.graph.nodes}
        return replace(
            self.traced,
            graph_module=late_module(self.graph),
            inputs=tuple(self.inputs),
            outputs=tuple(spec for _, spec in self.outputs),
            info={name: info for name, info in self.info.items() if name in alive},
            hoisted=frozenset(self.hoisted & alive),
            repeats=(),
        )

    def _copy(self, node: fx.Node) -> fx.Node:
        twin = self.graph.node_copy(node, self.env.__getitem__)
        assert twin.name == node.name, f"{node.name} is taken"
        return twin

    def _receive(self, node: fx.Node) -> None:
        transfer = self.arriving[node.name]
        twin = self.graph.placeholder(node.name)
        twin.meta = dict(node.meta)
        self.env[node] = twin
        spec = InputSpec(
            node=node.name,
            kind="received",
            target=node.name,
            shape=transfer.shape,
            dtype=transfer.dtype,
        )
        self.inputs.append(spec)
        origin = node_info(self.traced, producer(node))
        if transfer.phase == "hoist":
            self.hoisted.add(node.name)
        phase: Literal["forward", "backward"] = (
            "backward" if transfer.phase == "backward" else "forward"
        )
        self.info[node.name] = NodeInfo(phase, "", origin.source)

    def _results(self, outputs: Iterable[OutputSpec]) -> None:
        nodes = self.traced.nodes()
        for spec in outputs:
            self.outputs.append((None if spec.node is None else self.env[nodes[spec.node]], spec))

    def _send(self) -> None:
        nodes = self.traced.nodes()
        seen: set[str] = set()
        for transfer in self.leaving:
            if transfer.value not in seen:
                seen.add(transfer.value)
                made = self.env[nodes[transfer.value]]
                port = self.ports[transfer.value]
                spec = OutputSpec(node=made.name, kind="sent", target=transfer.value, port=port)
                self.outputs.append((made, spec))

    def _contributions(self, contributions: Iterable[Contribution]) -> None:
        """The sum of this stage's parts of each gradient that several stages add to."""
        sums: dict[str, tuple[fx.Node, OutputSpec]] = {}
        for name, path, spec in contributions:
            made = self.env[path[-1]]
            for step in reversed(path[:-1]):
                made = self._again(step, made)
            if name in sums:
                made = self._added(sums[name][0], made)
            sums[name] = made, spec
        for made, spec in sums.values():
            alias = self._call(torch.ops.aten.alias.default, (made,), made)
            self.info[alias.name] = replace(self.info[made.name], phase="backward")
            self.outputs.append((alias, replace(spec, node=alias.name)))

    def _again(self, step: fx.Node, operand: fx.Node) -> fx.Node:
        """A linear op of the sum, on one part of it."""
        if step.target is torch.ops.aten.add.Tensor:
            return operand
        args, kwargs = map_arg((step.args, step.kwargs), lambda _: operand)
        twin = self._call(step.target, args, step, kwargs)
        self.info[twin.name] = node_info(self.traced, step)
        return twin

    def _added(self, a: fx.Node, b: fx.Node) -> fx.Node:
        total = self._call(torch.ops.aten.add.Tensor, (a, b), a)
        self.info[total.name] = self.info[a.name]
        return total

    def _call(self, target: Any, args: Any, like: fx.Node, kwargs: Any = None) -> fx.Node:
        """A node that no stage has, by a name that none has: tables go by name."""
        numbers = itertools.count()
        name = next(n for i in numbers if (n := f"contribution_{i}") not in self.taken)
        self.taken.add(name)
        node = self.graph.create_node("call_function", target, args, kwargs, name=name)
        assert node.name == name
        node.meta = dict(like.meta)
        return node
