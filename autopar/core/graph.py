"""The traced program that the packages hand to each other: one joint forward and backward graph."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopar.core.eager_calls import EAGER_CALL, EagerCall
from autopar.core.flights import Flight

__all__ = [
    "InputSpec",
    "KnownValue",
    "NodeInfo",
    "OutputSpec",
    "Repeat",
    "TracedModel",
    "Value",
    "dependents",
    "kept_in_turns",
    "node_info",
    "op_nodes",
    "output_paths",
    "port_names",
    "producer",
    "resolve",
    "tensor_meta",
    "tensor_operands",
    "value_of",
]

InputKind = Literal["parameter", "buffer", "constant", "input", "seed", "tangent", "received"]
OutputKind = Literal["output", "buffer", "gradient", "sent"]
Phase = Literal["forward", "backward"]
Value = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """What one placeholder of the graph stands for.

    Attributes:
        node: name of the placeholder.
        kind: parameter, buffer, lifted constant, user input, random seed, output gradient, or what
            another pipeline stage sends.
        target: FQN of a parameter, buffer or constant; name of a user input; name of a value that
            is sent.
        shape, dtype: of the global tensor; empty and int64 for a non-tensor input.
        trainable: the parameter requires a gradient.
    """

    node: str
    kind: InputKind
    target: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSpec:
    """What one output of the graph is: a user output, a buffer's new value or a gradient.

    Attributes:
        node: name of the node that computes it; None where the model returns a constant.
        kind: user output, updated buffer, gradient, or what another pipeline stage receives.
        target: FQN of the buffer or parameter; index of a user output; name of a value sent.
        constant: the value where `node` is None.
        port: of a value sent: whose layout it takes, a placeholder of kind "received" or a name
            of its own.
        accumulated: of a value sent: the sum over all microbatches goes, once.
    """

    node: str | None
    kind: OutputKind
    target: str
    constant: Any = None
    port: str = ""
    accumulated: bool = False


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """Where a node comes from.

    Attributes:
        phase: forward, or backward where the node depends on an output gradient.
        module: FQN of the innermost module that the op runs in.
        source: the user's line, `file:line`, or "" where unknown.
        recomputed: it repeats a forward op in the backward.
    """

    phase: Phase
    module: str
    source: str
    recomputed: bool = False


@dataclass(frozen=True, slots=True)
class KnownValue:
    """A tensor whose value a graph was traced for, as its sizes depend on it.

    Attributes:
        kind: "input" or "buffer".
        name: position among the tensors of the inputs, or the buffer's FQN.
        value: its elements, as Python writes a list of them.
    """

    kind: str
    name: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """Blocks of a container that stand in the graph once, for many.

    Attributes:
        container: FQN of the list of blocks.
        first: index of the first block that stands for others.
        period: blocks that repeat together, such as a local and a global layer.
        times: how often they stand in the model; the blocks behind them follow `period * (times -
            1)` indices later.
    """

    container: str
    first: int
    period: int
    times: int

    @property
    def skipped(self) -> int:
        """Blocks that the graph leaves out."""
        return self.period * (self.times - 1)

    def rank(self, index: int) -> int:
        """Position of a block among those that the graph holds, were there no other repeat."""
        return index - self.skipped if index >= self.first + self.period else index

    def unit(self, index: int) -> int:
        """Number of the period that a block of the graph belongs to; the folded one is 0.

        Periods before it are negative.
        """
        return (self.rank(index) - self.first) // self.period

    def holds(self, index: int) -> bool:
        """True for a block that stands for others."""
        return self.first <= index < self.first + self.period

    def covers(self, index: int) -> bool:
        """True for a block that stands for others, and for those that it stands for."""
        return self.first <= index < self.first + self.period * self.times

    def instances(self) -> range:
        """Indices of all these blocks."""
        return range(self.first, self.first + self.period * self.times)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedModel:
    """A model's training (or inference) step as one flat graph of ATen and autopar ops.

    Attributes:
        graph_module: placeholders in the order of `inputs`, outputs in the order of `outputs`.
        inputs, outputs: descriptors.
        info: origin of every node, by name.
        in_spec, out_spec: pytree structure of `(args, kwargs)` and of the user's output.
        training: traced in training mode, with gradients.
        loss_index: position of the scalar loss among the user outputs, if there is one.
        beside: positions of outputs beside the loss that depend on parameters, of which the
            gradients hold no part.
        numbers: positions of outputs that are Python numbers made of tensors; a step returns None.
        tied: FQNs that share storage with a parameter, `(alias, owner)`.
        state_values: tensors lifted from the code, by FQN.
        repeats: blocks that the graph holds once for many; empty for a graph to run. A container
            has several where its blocks are recomputed or placed in several ways.
        nested: FQNs of lists inside of numbered modules whose children are the blocks there.
        known: inputs and buffers whose values the graph was traced for.
        eager_calls: functions that the graph calls by name, kept for as long as it is.
        sections: container and number of the blocks from which on equal blocks are placed apart.
        reduce_dtype: of sums of gradients over ranks; None where it is the solver's choice.
        precision: what its parameters and inputs are cast to: "fp32" (nothing), "bf16", "fp16".
        microbatches: how often the graph runs in a step; `hoisted` nodes run once, before.
        hoisted: names of nodes whose values are the same for all microbatches.
        flight: how many microbatches are held at once, and what is on its way to other stages.
        batch_bytes: of the whole batch and what is computed from it, where the graph is of a
            microbatch.
        held_by: pipeline stage that holds each parameter, where another step has settled it.
    """

    graph_module: fx.GraphModule
    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    info: Mapping[str, NodeInfo]
    in_spec: Any
    out_spec: Any
    training: bool
    loss_index: int | None
    tied: tuple[tuple[str, str], ...] = ()
    state_values: Mapping[str, torch.Tensor] = field(default_factory=dict)
    repeats: tuple[Repeat, ...] = ()
    nested: tuple[str, ...] = ()
    precision: str = "fp32"
    microbatches: int = 1
    hoisted: frozenset[str] = frozenset()
    flight: Flight = field(default_factory=Flight)
    batch_bytes: int = 0
    reduce_dtype: str | None = None
    beside: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()
    sections: tuple[tuple[str, int], ...] = ()
    known: tuple[KnownValue, ...] = ()
    eager_calls: tuple[EagerCall, ...] = ()
    held_by: Mapping[str, int] = field(default_factory=dict)

    @property
    def graph(self) -> fx.Graph:
        return self.graph_module.graph

    def nodes(self) -> dict[str, fx.Node]:
        """Nodes of the graph by name."""
        return {node.name: node for node in self.graph.nodes}

    def parameters(self) -> Iterator[InputSpec]:
        """Descriptors of the parameters, in graph order."""
        return (spec for spec in self.inputs if spec.kind == "parameter")

    def leaves_turns(self, spec: OutputSpec) -> bool:
        """True for a kind of output that a step in microbatches has: not what training drops."""
        results = not self.training or spec.target == str(self.loss_index)
        return spec.kind != "output" or results

    def fingerprint(self) -> str:
        """Hash of the ops, shapes, dtypes and parameter names: what a plan is valid for."""
        digest = hashlib.sha256(repr(self.repeats).encode())
        for spec in self.inputs:
            digest.update(repr((spec.kind, spec.target, spec.shape, str(spec.dtype))).encode())
        for node in self.graph.nodes:
            if node.op == "call_function":
                value = tensor_meta(node)
                shape = tuple(value.shape) if value is not None else ()
                digest.update(repr((node.name, str(node.target), shape)).encode())
        if self.microbatches > 1:
            digest.update(repr((self.microbatches, sorted(self.hoisted))).encode())
        return digest.hexdigest()[:16]

    def digest(self) -> str:
        """Hash of everything that a plan's price depends on: arguments and wiring too."""
        digest = hashlib.sha256(self.fingerprint().encode())
        digest.update(repr((self.training, self.loss_index, self.tied, self.reduce_dtype)).encode())
        digest.update(repr(sorted(self.held_by.items())).encode() if self.held_by else b"")
        digest.update(repr(self.nested).encode() if self.nested else b"")
        for spec in (*self.inputs, *self.outputs):
            digest.update(repr(spec).encode())
        for node in self.graph.nodes:
            # names of eager calls tell traces of one model apart
            args = node.args[:1] if node.target is EAGER_CALL else node.args
            digest.update(repr((node.name, args, node.kwargs)).encode())
            digest.update(repr(self.info.get(node.name)).encode())
        return digest.hexdigest()


def output_paths(out_spec: Any) -> list[str]:
    """Where each leaf of the user's output is in it, such as `.loss` or `[0]`; "" is all of it."""
    tree = pytree.tree_unflatten(list(range(out_spec.num_leaves)), out_spec)
    paths = {index: pytree.keystr(path) for path, index in pytree.tree_leaves_with_path(tree)}
    return [paths[index] for index in range(out_spec.num_leaves)]


def node_info(traced: TracedModel, node: fx.Node) -> NodeInfo:
    """Origin of a node; an unknown one counts as forward, without a module."""
    return traced.info.get(node.name, NodeInfo("forward", "", ""))


def tensor_meta(node: fx.Node) -> torch.Tensor | None:
    """The fake tensor that a node yields, or None where it yields several or none."""
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def value_of(node: fx.Node) -> torch.Tensor:
    """The fake tensor that a node yields, which is one."""
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor)
    return value


def tensor_operands(node: fx.Node) -> list[fx.Node]:
    """Tensor arguments of a call in the order of its flattened args, one entry per use.

    The same tensor in two places makes two entries: each may need another placement.
    """
    return [*_tensors_in(node.args), *_tensors_in(node.kwargs)]


def _tensors_in(value: Any) -> list[fx.Node]:
    if isinstance(value, fx.Node):
        is_tensor = tensor_meta(value) is not None
        return [value] if is_tensor or isinstance(value.meta.get("val"), (list, tuple)) else []
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [node for item in value for node in _tensors_in(item)]


def op_nodes(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Calls of ops, in order; a `getitem` only names one of an op's results."""
    return [n for n in nodes if n.op == "call_function" and n.target is not operator.getitem]


def resolve(node: fx.Node) -> Value:
    """The value that a node yields: its producer and the index there, seen through `getitem`."""
    if node.op == "call_function" and node.target is operator.getitem:
        source, index = node.args
        assert isinstance(source, fx.Node) and isinstance(index, int)
        return source.name, index
    return node.name, 0


def producer(node: fx.Node) -> fx.Node:
    """The op behind a `getitem`."""
    while node.op == "call_function" and node.target is operator.getitem:
        node = node.all_input_nodes[0]
    return node


def dependents(traced: TracedModel, *kinds: InputKind) -> set[str]:
    """Names of placeholders of some kinds, and of all nodes that depend on one of them."""
    found = {spec.node for spec in traced.inputs if spec.kind in kinds}
    for node in traced.graph.nodes:
        if any(a.name in found for a in node.all_input_nodes):
            found.add(node.name)
    return found


def kept_in_turns(traced: TracedModel) -> set[str]:
    """Names of what a step in microbatches computes: all that its loss, gradients, buffers need.

    In training other results are dropped; a forward alone returns them.
    """
    nodes = traced.nodes()
    stack = [
        nodes[spec.node]
        for spec in traced.outputs
        if spec.node is not None and traced.leaves_turns(spec)
    ]
    found: set[str] = set()
    while stack:
        node = stack.pop()
        if node.name not in found:
            found.add(node.name)
            stack.extend(node.all_input_nodes)
    return found


def port_names(model: TracedModel) -> list[str]:
    """Names of the layouts that the graph of a pipeline stage shares with others."""
    names = [s.node for s in model.inputs if s.kind == "received"]
    return [*names, *dict.fromkeys(s.port for s in model.outputs if s.kind == "sent")]
