"""The traced step as the solver sees it: ops, tensors between them, and who holds what.

A value is `(producer, output index)`; `getitem` nodes are looked through. Producers are ops,
parameters (whose storage is chosen) and other inputs, which every rank can slice for free.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.core.graph import InputSpec, TracedModel, node_info
from autopar.core.strategy import OpCall, TensorSpec, op_call
from autopar.solver.candidates import is_view

__all__ = ["Op", "Step", "Value", "ordered", "resolve"]

Value = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Op:
    """One op of the step.

    Attributes:
        name: of its graph node.
        call: with axis size 1; the solver sets the size.
        operands: the value behind each tensor operand.
        backward: runs in the backward pass.
    """

    name: str
    call: OpCall
    operands: tuple[Value, ...]
    backward: bool


@dataclass(frozen=True, slots=True)
class Step:
    """Ops in order, and the ends of the graph.

    Attributes:
        ops: by name, in execution order.
        parameters: by placeholder name.
        inputs: other placeholders, by name.
        gradients: value of each parameter's gradient, by placeholder name.
        required: values that must end up replicated (loss, outputs, updated buffers).
        saved: forward values that the backward uses, with their global bytes.
    """

    ops: dict[str, Op]
    parameters: dict[str, InputSpec]
    inputs: dict[str, InputSpec]
    gradients: dict[str, Value]
    required: tuple[Value, ...]
    saved: dict[Value, int]
    specs: dict[Value, TensorSpec]

    def weight(self, name: str) -> int:
        """How many times an op or a parameter of the graph stands in the model."""
        return 1

    def consumers(self) -> Iterator[tuple[Value, Op, int]]:
        """Every use of a value by an op: `(value, op, operand index)`."""
        for op in self.ops.values():
            for index, value in enumerate(op.operands):
                yield value, op, index


def ordered(step: Step) -> list[Op]:
    """The ops in execution order: the forward, then the backward."""
    ops = list(step.ops.values())
    return [op for op in ops if not op.backward] + [op for op in ops if op.backward]


def resolve(node: fx.Node) -> Value:
    """The value that a graph node yields, looking through `getitem`."""
    if node.op == "call_function" and node.target is operator.getitem:
        source, index = node.args
        assert isinstance(source, fx.Node) and isinstance(index, int)
        return source.name, index
    return node.name, 0


def build_step(traced: TracedModel) -> Step:
    """Read a traced graph."""
    by_node = {spec.node: spec for spec in traced.inputs}
    ops: dict[str, Op] = {}
    specs: dict[Value, TensorSpec] = {}
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            given = by_node[node.name]
            specs[node.name, 0] = TensorSpec(given.shape, given.dtype)
        elif node.op == "call_function" and node.target is not operator.getitem:
            call = op_call(node, 1)
            operands = tuple(resolve(n) for n in call.nodes)
            backward = node_info(traced, node).phase == "backward"
            ops[node.name] = Op(node.name, call, operands, backward)
            for index, spec in enumerate(call.outputs):
                specs[node.name, index] = spec
    nodes = {n.name: n for n in traced.graph.nodes}
    owner = {spec.target: spec.node for spec in traced.parameters()}
    gradients: dict[str, Value] = {}
    required: list[Value] = []
    for output in traced.outputs:
        if output.node is None:
            continue
        value = resolve(nodes[output.node])
        if output.kind == "gradient":
            gradients[owner[output.target]] = value
        elif output.kind == "buffer" or is_required(traced, output.target):
            required.append(value)
    return Step(
        ops=ops,
        parameters={s.node: s for s in traced.parameters()},
        inputs={s.node: s for s in traced.inputs if s.kind != "parameter"},
        gradients=gradients,
        required=tuple(required),
        saved=_saved(ops, specs),
        specs=specs,
    )


def is_required(traced: TracedModel, index: str) -> bool:
    """User outputs come back whole, except those beside a loss, which stay sharded."""
    return traced.loss_index is None or str(traced.loss_index) == index


def storage_of(ops: dict[str, Op], value: Value) -> Value:
    """The value whose memory a view shows."""
    name, _ = value
    while name in ops and is_view(ops[name].call.target) and ops[name].operands:
        value = ops[name].operands[0]
        name, _ = value
    return value


def _saved(ops: dict[str, Op], specs: dict[Value, TensorSpec]) -> dict[Value, int]:
    saved: dict[Value, int] = {}
    for op in ops.values():
        if not op.backward:
            continue
        for value in op.operands:
            base = storage_of(ops, value)
            if base[0] in ops and not ops[base[0]].backward:
                saved[base] = specs[base].num_bytes
    return saved


def unview(ops: dict[str, Op], value: Value) -> Value:
    """Look through views that keep every element (not slices): to a parameter, for instance."""
    keeps: set[Any] = {
        torch.ops.aten.view.default,
        torch.ops.aten.transpose.int,
        torch.ops.aten.permute.default,
        torch.ops.aten.t.default,
        torch.ops.aten.unsqueeze.default,
        torch.ops.aten._to_copy.default,
        torch.ops.aten.alias.default,
    }
    name, _ = value
    while name in ops and ops[name].call.target in keeps:
        value = ops[name].operands[0]
        name, _ = value
    return value
