"""`cut`: from the graph of one microbatch to the graphs of pipeline stages.

A stage is a run of blocks (`cells.py`) with what stands between them. Forward values flow from a
stage to the next, backward values to the one before; a value that is needed further on is handed
on. What no parameter reaches (masks, positions) is computed by every stage that needs it. A
parameter is held by the first stage that reads it (in the step that was planned first): others get
what they read of it once a step, and send the sum of their contributions to its gradient once. So a
tied weight is one tensor.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from autopar.core.cells import Cells
from autopar.core.graph import (
    OutputSpec,
    TracedModel,
    dependents,
    node_info,
    op_nodes,
    producer,
    tensor_meta,
)
from autopar.core.ops import REARRANGING
from autopar.core.stage_writer import Contribution, StageWriter
from autopar.core.transfers import Transfer, TransferPhase, port_of
from autopar.errors import ConstraintError

__all__ = ["Stages", "cut"]

# what a sum of gradients may pass through: linear, element by element
_LINEAR = REARRANGING | {torch.ops.aten.alias.default}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """The graphs of all stages, and what they send each other.

    Attributes:
        models: by stage.
        transfers: in a fixed order; between two stages and in one phase, values go in it.
    """

    models: tuple[TracedModel, ...]
    transfers: tuple[Transfer, ...]


def cut(traced: TracedModel, starts: Sequence[str]) -> Stages:
    """Cut the graph of a microbatch into `len(starts) + 1` stages.

    Args:
        traced: of one microbatch, with its hoisted ops (`codegen.microbatch.localise`).
        starts: FQN of the block that each stage but the first begins with, in forward order, or of
            a module that begins with it.

    Raises:
        ConstraintError: a start is no block, or they are not in forward order.
    """
    return _Cutter(traced, starts).run()


class _Cutter:
    def __init__(self, traced: TracedModel, starts: Sequence[str]) -> None:
        self.traced = traced
        self.named = traced.nodes()
        self.nodes = op_nodes(traced.graph.nodes)
        self.specs = {s.node: s for s in traced.inputs}
        self.count = len(starts) + 1
        cells = Cells(traced)
        self.place = cells.place
        self.stage_of_block = self._blocks(cells, starts)
        self.weighted = dependents(traced, "parameter")
        self.loose = self._loose()
        self.stage: dict[str, int] = {}
        self.needs: list[set[fx.Node]] = [set() for _ in range(self.count)]
        self.extra: list[list[Contribution]] = [[] for _ in range(self.count)]

    def _blocks(self, cells: Cells, starts: Sequence[str]) -> dict[str, int]:
        names = cells.names
        begun = [cells.of_cut(start) for start in starts]
        for start, cell in zip(starts, begun, strict=True):
            if cell not in names:
                raise cells.no_cut(start, names)
        positions = [names.index(cell) for cell in begun]
        if positions != sorted(set(positions)) or (positions and positions[0] == 0):
            raise ConstraintError(
                f"pipeline cuts {list(starts)} must be in forward order, behind the first block "
                f"{names[0]}"
            )
        return {name: sum(p <= i for p in positions) for i, name in enumerate(names)}

    def _loose(self) -> set[str]:
        """Aliases that serve readers in several blocks: each stage makes its own."""
        return {
            n.name
            for n in self.nodes
            if n.target is torch.ops.aten.alias.default
            and n.name in self.weighted
            and n.name not in self.place
            and not self._is_hoisted(n)
            and self._phase(n.all_input_nodes[0]) == "forward"
        }

    def run(self) -> Stages:
        self._assign()
        self._split_gradients()
        self._collect()
        transfers = self._transfers()
        models = tuple(self._model(s, transfers) for s in range(self.count))
        for number, model in enumerate(models):
            if not op_nodes(model.graph.nodes):
                raise ConstraintError(
                    f"stage {number} of {self.count} of the pipeline has nothing to run: no "
                    "parameter reaches the blocks that it consists of. Use fewer stages, or cut "
                    "at other blocks"
                )
        return Stages(models=models, transfers=tuple(transfers))

    # --- which stage runs what -----------------------------------------------------------------
    def _is_hoisted(self, node: fx.Node) -> bool:
        return node.name in self.traced.hoisted

    def _is_shared(self, node: fx.Node) -> bool:
        """Computed, or given, wherever it is needed."""
        return producer(node).name not in self.weighted

    def _phase(self, node: fx.Node) -> str:
        return node_info(self.traced, producer(node)).phase

    def _assign(self) -> None:
        self._assign_forward()
        self._assign_backward()
        self._assign_hoisted()

    def _body(self, phase: str) -> list[fx.Node]:
        return [n for n in self.nodes if self._is_placed(n) and self._phase(n) == phase]

    def _is_placed(self, node: fx.Node) -> bool:
        """An op of the body that runs in one stage."""
        elsewhere = self._is_hoisted(node) or self._is_shared(node) or node.name in self.loose
        return node.op == "call_function" and not elsewhere

    def _operands(self, node: fx.Node) -> list[fx.Node]:
        """The ops whose results a node reads."""
        found = [producer(a) for a in node.all_input_nodes]
        found = [producer(a.all_input_nodes[0]) if a.name in self.loose else a for a in found]
        return [a for a in found if self._is_placed(a)]

    def _assign_forward(self) -> None:
        last = 0
        self.of_module: dict[str, int] = {}
        for node in self._body("forward"):
            block = self.place.get(node.name)
            own = self.stage_of_block.get(block, last) if block is not None else last
            last = max(last, own)
            self.stage[node.name] = max([own, *(self.stage[a.name] for a in self._operands(node))])
            if block is None:
                self.of_module[node_info(self.traced, node).module] = self.stage[node.name]

    def _assign_backward(self) -> None:
        for node in self._body("backward"):
            operands = self._operands(node)
            after = [self.stage[a.name] for a in operands if self._phase(a) == "backward"]
            block = self.place.get(node.name)
            module = node_info(self.traced, node).module
            if block is not None and block in self.stage_of_block:
                own = self.stage_of_block[block]
            elif module in self.of_module:
                own = self.of_module[module]
            else:
                own = min(after or [self.stage[a.name] for a in operands] or [self.count - 1])
            self.stage[node.name] = min([own, *after])

    def _assign_hoisted(self) -> None:
        """Parameters, and what is made of them, stand where they are read first, or their block."""
        chain = [n for n in self.traced.graph.nodes if n.name in self.weighted]
        for node in reversed(chain):
            parameter = node.op == "placeholder"
            if node.target is operator.getitem or not (parameter or self._is_hoisted(node)):
                continue
            readers = [u for user in node.users for u in _calls(user)]
            readers += [u for r in readers if r.name in self.loose for u in r.users]
            stages = [self.stage[u.name] for u in readers if u.name in self.stage]
            own = self.stage_of_block.get(self.place.get(node.name, ""), 0)
            self.stage[node.name] = min(stages, default=own)
            if parameter:
                self._settle(self.specs[node.name].target, node, stages)

    def _settle(self, name: str, node: fx.Node, readers: Sequence[int]) -> None:
        """A parameter stays where another step has it, which may read what this one does not.

        Raises:
            ConstraintError: a stage before that one reads it.
        """
        holder = self.traced.held_by.get(name)
        if holder is None:
            return
        if holder > min(readers, default=holder):
            raise ConstraintError(
                f"stage {min(readers)} of the pipeline reads {name}, which stage {holder} holds, "
                "as no stage before that one read it in the step that was planned first. Pass "
                "example_inputs with which it is read as early as in any step"
            )
        self.stage[node.name] = holder

    # --- gradients of parameters that several stages read --------------------------------------
    def _split_gradients(self) -> None:
        """Take apart sums of contributions from several stages; each stage sums its own."""
        owners = {s.target: self.stage.get(s.node, 0) for s in self.traced.parameters()}
        self.dropped: set[str] = set()
        self.taken_apart: set[fx.Node] = set()
        for spec in self.traced.outputs:
            if spec.kind != "gradient" or spec.node is None:
                continue
            owner, node = owners[spec.target], self.named[spec.node]
            if self._is_shared(node):
                continue
            parts: dict[int, list[list[fx.Node]]] = defaultdict(list)
            for path in _leaves(node):
                # what no parameter reaches, as the loss's own gradient, is in every stage
                parts[self.stage.get(producer(path[-1]).name, owner)].append(path)
            if set(parts) == {owner}:
                continue
            self.dropped.add(spec.target)
            for stage, paths in parts.items():
                output = spec
                if stage != owner:
                    port = port_of(f"gradient of {spec.target}")
                    output = replace(spec, kind="sent", port=port, accumulated=True)
                for path in paths:
                    self.taken_apart.update(path[:-1])
                    self.extra[stage].append((spec.target, path, output))

    # --- what a stage needs --------------------------------------------------------------------
    def _collect(self) -> None:
        """Ops of each stage with the shared ones that they read; values that cross."""
        self.crossing: dict[fx.Node, set[int]] = defaultdict(set)
        for node in self.nodes:
            if node.name in self.stage and node not in self.taken_apart:
                self._need(node, self.stage[node.name])
        for stage, extras in enumerate(self.extra):
            for _, path, _ in extras:
                self._need(path[-1], stage)
        for given in self.traced.parameters():
            if not any(self.named[given.node] in needs for needs in self.needs):
                self.needs[self.stage.get(given.node, 0)].add(self.named[given.node])  # not read
        for spec in self.traced.outputs:
            if spec.node is not None and not (
                spec.kind == "gradient" and spec.target in self.dropped
            ):
                self._need(self.named[spec.node], self._output_stage(spec))

    def _output_stage(self, spec: OutputSpec) -> int:
        node = self.named[str(spec.node)]
        if spec.kind == "gradient":
            owner = next(s for s in self.traced.parameters() if s.target == spec.target)
            return self.stage.get(owner.node, 0)
        module = node_info(self.traced, producer(node)).module
        block = self.place.get(producer(node).name)
        known = self.stage_of_block.get(block) if block is not None else self.of_module.get(module)
        return self.stage.get(producer(node).name, known or 0)

    def _need(self, node: fx.Node, stage: int) -> None:
        """Make a value available in a stage: run it there, or have it sent."""
        stack = [node]
        while stack:
            top = stack.pop()
            base = producer(top)
            free = self._is_shared(base) or base.name in self.loose
            if not free and self.stage[base.name] != stage:
                self.crossing[top].add(stage)
                self.needs[self.stage[base.name]].add(top)
                continue
            for each in (top, base):
                if each not in self.needs[stage]:
                    self.needs[stage].add(each)
                    stack.extend(each.all_input_nodes)

    # --- transfers -----------------------------------------------------------------------------
    def _transfers(self) -> list[Transfer]:
        found: list[Transfer] = []
        for node in self.traced.graph.nodes:
            if node not in self.crossing:
                continue
            source, targets = self.stage[producer(node).name], self.crossing[node]
            if node.op == "placeholder" or self._is_hoisted(producer(node)):
                found += [self._transfer(node, source, t, "hoist") for t in sorted(targets)]
                continue
            up = [t for t in targets if t > source]
            for stage in range(source, max(up, default=source)):
                found.append(self._transfer(node, stage, stage + 1, "forward"))
            down = [t for t in targets if t < source]
            for stage in range(source, min(down, default=source), -1):
                found.append(self._transfer(node, stage, stage - 1, "backward"))
        sent = {
            (name, stage): output
            for stage, extras in enumerate(self.extra)
            for name, _, output in extras
            if output.kind == "sent"
        }
        owners = {s.target: s for s in self.traced.parameters()}
        for name, stage in sorted(sent):
            spec = owners[name]
            target = self.stage.get(spec.node, 0)
            found.append(Transfer(name, stage, target, "finish", spec.shape, spec.dtype))
        return found

    def _transfer(self, node: fx.Node, source: int, target: int, phase: TransferPhase) -> Transfer:
        value = tensor_meta(node)
        assert value is not None, f"{node} yields several tensors"
        return Transfer(node.name, source, target, phase, tuple(value.shape), value.dtype)

    # --- the graph of a stage ------------------------------------------------------------------
    def _model(self, stage: int, transfers: Sequence[Transfer]) -> TracedModel:
        writer = StageWriter(self.traced, stage, transfers, self.needs[stage])
        return writer.run(self._outputs(stage), self.extra[stage])

    def _outputs(self, stage: int) -> list[OutputSpec]:
        """The step's results, without the values that other stages have."""
        found: list[OutputSpec] = []
        for spec in self.traced.outputs:
            gone = spec.kind == "gradient" and spec.target in self.dropped
            if spec.node is None or (not gone and self._output_stage(spec) == stage):
                found.append(spec)
            elif spec.kind == "output":
                found.append(replace(spec, node=None))
        return found


def _calls(node: fx.Node) -> list[fx.Node]:
    """A user, or the users of the outputs that it takes out."""
    if node.op == "call_function" and node.target is operator.getitem:
        return [u for user in node.users for u in _calls(user)]
    return [node]


def _leaves(node: fx.Node) -> list[list[fx.Node]]:
    """Paths from a gradient down to the parts that it is the sum of, through linear ops."""
    shape = tensor_meta(node)
    assert shape is not None
    found: list[list[fx.Node]] = []
    stack: list[list[fx.Node]] = [[node]]
    while stack:
        path = stack.pop()
        top = path[-1]
        plain_sum = (
            top.target is torch.ops.aten.add.Tensor
            and not top.kwargs
            and len(top.args) == 2
            and all(isinstance(a, fx.Node) for a in top.args)
        )
        inner = len(path) == 1 or len(top.users) == 1
        if inner and (plain_sum or top.target in _LINEAR):
            stack.extend([*path, a] for a in reversed(top.all_input_nodes))
        else:
            found.append(path)
    return [_trimmed(path) for path in found]


def _trimmed(path: list[fx.Node]) -> list[fx.Node]:
    """A path that ends behind its last sum: what is linear below that stays as it is."""
    last = max(
        (i for i, n in enumerate(path[:-1]) if n.target is torch.ops.aten.add.Tensor), default=-1
    )
    return path[: last + 2]
