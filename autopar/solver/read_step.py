"""`build_step`: reads the ops and ends of a step from its graph."""

from __future__ import annotations

import operator

import torch

from autopar.core.blocks import Blocks
from autopar.core.fused import FusedShares, origin_of
from autopar.core.graph import InputSpec, TracedModel, Value, node_info, resolve
from autopar.core.ops import NARROW, REARRANGING
from autopar.core.strategy import TensorSpec, op_call
from autopar.core.work import is_away, is_view, op_class
from autopar.solver.shares import shares_of
from autopar.solver.step import Op, Send, Step, storage_of

__all__ = ["build_step"]

_ALIAS = torch.ops.aten.alias.default


def build_step(traced: TracedModel, fused: FusedShares | None = None) -> Step:
    """Read a traced graph.

    Args:
        traced: the graph.
        fused: what fusion will leave of the work of its ops.
    """
    ops, specs = _read_ops(traced)
    gradients, results, required = _read_outputs(traced)
    sends = _read_sends(traced)
    ports = {s.node: specs[s.node, 0] for s in traced.inputs if s.kind == "received"}
    for send in sends:
        ports.setdefault(send.port, specs[send.value])
    parameters = {s.node: s for s in traced.parameters()}
    prepared, copies = _read_parameters(ops, parameters)
    blocks = Blocks(traced)
    return Step(
        ops=ops,
        parameters=parameters,
        inputs={s.node: s for s in traced.inputs if s.kind not in ("parameter", "received")},
        gradients=gradients,
        required=required,
        results=results,
        saved=_saved(ops, specs),
        specs=specs,
        prepared=prepared,
        copies=copies,
        blocks=blocks,
        ports=ports,
        sends=sends,
        closing=_closing(ops, gradients),
        told=_told(ops, gradients) if gradients else frozenset(),
        shares=shares_of(ops, sends, blocks, fused) if fused else {},
    )


def _read_ops(traced: TracedModel) -> tuple[dict[str, Op], dict[Value, TensorSpec]]:
    """Ops by name, and what is known of every value."""
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
            info = node_info(traced, node)
            backward = info.phase == "backward"
            view = is_view(call.target) and bool(operands) and op_class(call) == "view"
            ops[node.name] = Op(
                node.name, call, operands, backward, info.recomputed, view, origin_of(node)
            )
            for index, spec in enumerate(call.outputs):
                specs[node.name, index] = spec
    return ops, specs


def _read_outputs(
    traced: TracedModel,
) -> tuple[dict[str, Value], tuple[Value, ...], tuple[Value, ...]]:
    """Gradients by parameter, other results that are held, and those that must be whole.

    `train_step` returns the loss, and lets go of what is beside it with the last reader.
    """
    nodes = traced.nodes()
    owner = {spec.target: spec.node for spec in traced.parameters()}
    gradients: dict[str, Value] = {}
    results: list[Value] = []
    required: list[Value] = []
    for output in traced.outputs:
        if output.node is None or output.kind == "sent":
            continue
        value = resolve(nodes[output.node])
        if output.kind == "gradient":
            gradients[owner[output.target]] = value
            continue
        needed = output.kind == "buffer" or _is_required(traced, output.target)
        if needed or not traced.training:
            results.append(value)
        if needed:
            required.append(value)
    return gradients, tuple(results), tuple(required)


def _read_sends(traced: TracedModel) -> tuple[Send, ...]:
    """What goes to other stages."""
    nodes = traced.nodes()
    sends: list[Send] = []
    for output in traced.outputs:
        if output.kind == "sent" and output.node is not None:
            value = resolve(nodes[output.node])
            once = output.accumulated or value[0] in traced.hoisted
            sends.append(Send(value, output.port, 1 if once else traced.microbatches))
    return tuple(sends)


def _closing(ops: dict[str, Op], gradients: dict[str, Value]) -> frozenset[str]:
    found: set[str] = set()
    for name, _ in gradients.values():
        while name in ops and (
            ops[name].call.target in REARRANGING or ops[name].call.target in (NARROW, _ALIAS)
        ):
            found.add(name)
            name, _ = ops[name].operands[0]
    return frozenset(found)


def _told(ops: dict[str, Op], gradients: dict[str, Value]) -> frozenset[str]:
    """Ops of a training step that no gradient is made of."""
    needed = {name for name, _ in gradients.values()}
    for op in reversed(ops.values()):
        if op.backward or op.name in needed:
            needed.update(name for name, _ in op.operands)
    return frozenset(n for n, op in ops.items() if not op.backward and n not in needed)


def _is_required(traced: TracedModel, index: str) -> bool:
    """User outputs come back whole, except those beside a loss, which stay sharded."""
    return traced.loss_index is None or str(traced.loss_index) == index


def _saved(ops: dict[str, Op], specs: dict[Value, TensorSpec]) -> dict[Value, int]:
    saved: dict[Value, int] = {}
    for op in ops.values():
        if not op.backward:
            continue
        for value in op.operands:
            base = storage_of(ops, value)
            kept = base[0] in ops and not ops[base[0]].backward
            if kept and not is_away(ops[base[0]].call.target):
                saved[base] = specs[base].num_bytes
    return saved


def _read_parameters(
    ops: dict[str, Op], parameters: dict[str, InputSpec]
) -> tuple[dict[str, str], dict[str, str]]:
    """Parameter behind each op that only rearranges one, and behind each alias of such."""
    prepared: dict[str, str] = {}
    copies: dict[str, str] = {}
    for op in ops.values():
        if op.call.target in REARRANGING or op.call.target is _ALIAS:
            source = op.operands[0][0]
            owner = source if source in parameters else prepared.get(source)
            if owner is not None:
                (copies if op.call.target is _ALIAS else prepared)[op.name] = owner
    return prepared, copies
