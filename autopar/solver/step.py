"""The traced step as the solver sees it: ops, tensors between them, and who holds what.

A value is `(producer, output index)`; `getitem` nodes are looked through. Producers are ops,
parameters (whose storage is chosen) and other inputs, which every rank can slice for free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from autopar.core import flights
from autopar.core.blocks import Block, Blocks
from autopar.core.fused import Share
from autopar.core.graph import InputSpec, Value
from autopar.core.ops import REARRANGING
from autopar.core.strategy import OpCall, TensorSpec
from autopar.solver.overlap import ALL, Weights
from autopar.solver.shares import held_by, kernels_of

__all__ = [
    "ALONE",
    "Bucket",
    "Op",
    "Send",
    "Step",
    "Value",
    "storage_of",
    "unview",
]

_ALIAS = torch.ops.aten.alias.default


@dataclass(frozen=True, slots=True)
class Op:
    """One op of the step.

    Attributes:
        name: of its graph node.
        call: with axis size 1; the solver sets the size.
        operands: the value behind each tensor operand.
        backward: runs in the backward pass.
        recomputed: repeats a forward op there.
        view: shows the memory of its operand.
        origin: the op of the traced graph that it comes from.
    """

    name: str
    call: OpCall
    operands: tuple[Value, ...]
    backward: bool
    recomputed: bool = False
    view: bool = False
    origin: str = ""

    @property
    def forward(self) -> bool:
        """A forward op, or a copy of one."""
        return self.recomputed or not self.backward


@dataclass(frozen=True, slots=True)
class Bucket:
    """What the bucket pass may join with the moves of a tensor (`codegen/passes/bucket.py`).

    Attributes:
        count: tensors that may share a bucket.
        kinds: of collectives that are joined; others are calls of their own.
        chained: one that follows another on the same tensor is joined, too.
    """

    count: int = 1
    kinds: tuple[str, ...] = ()
    chained: bool = False

    def shared(self, kind: str, position: int) -> int:
        """How many tensors share the latency of a tensor's move at a position among its moves."""
        return self.count if kind in self.kinds and (self.chained or position == 0) else 1


ALONE = Bucket()


@dataclass(frozen=True, slots=True)
class Send:
    """A value that goes to another pipeline stage in the layout of a port, some times a step."""

    value: Value
    port: str
    times: int


@dataclass(frozen=True, slots=True)
class Step:
    """Ops in order, and the ends of the graph.

    Attributes:
        ops: by name, in execution order.
        parameters: by placeholder name.
        inputs: other placeholders, by name.
        gradients: value of each parameter's gradient, by placeholder name.
        required: values that must end up replicated (loss, outputs, updated buffers).
        results: what is held to the end of the step: not what `train_step` lets go of.
        saved: forward values that the backward uses, with their global bytes.
        prepared: parameter behind each op that only brings one into another shape or dtype.
        copies: parameter behind each alias that forward and backward read it by.
        blocks: where ops and parameters stand, and how often each counts.
        ports: what other stages send (placeholders) and names for layouts of what they are sent.
        sends: what goes to other stages.
        closing: ops that only cast or rearrange a gradient that is computed.
        told: forward ops that nothing but the caller reads the results of, such as a loss's sum.
        outside: producers of values that come in any layout for nothing, of a part of a step.
        shares: of ops that will be in a fused kernel, what is left of their work.
        beside: of copies with host memory, seconds of compute that they hide behind.
        weights: what seconds of ops, and of collectives that may hide, count in the search.
        waits: what those of each part do (`Flight.waits`).
    """

    ops: dict[str, Op]
    parameters: dict[str, InputSpec]
    inputs: dict[str, InputSpec]
    gradients: dict[str, Value]
    required: tuple[Value, ...]
    results: tuple[Value, ...]
    saved: dict[Value, int]
    specs: dict[Value, TensorSpec]
    prepared: dict[str, str]
    copies: dict[str, str]
    blocks: Blocks
    ports: dict[str, TensorSpec] = field(default_factory=dict)
    sends: tuple[Send, ...] = ()
    closing: frozenset[str] = frozenset()
    told: frozenset[str] = frozenset()
    outside: frozenset[str] = frozenset()
    shares: Mapping[str, Share] = field(default_factory=dict)
    beside: Mapping[str, float] = field(default_factory=dict)
    weights: Weights = ALL
    waits: flights.Waits = flights.ALONE
    _buckets: dict[Block | None, Bucket] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _held: dict[str, tuple[Value, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _kernels: dict[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def in_turns(self) -> bool:
        """The step runs microbatch by microbatch: gradients are added up between them.

        A stage without parameters has nothing that runs once, and others that it hands values to.
        """
        return bool(self.blocks.traced.hoisted or self.ports)

    def is_hoisted(self, name: str) -> bool:
        """True for what is computed once, before the microbatches."""
        return name in self.blocks.traced.hoisted

    @property
    def reductions(self) -> Bucket:
        """Of gradients on their way to storage."""
        if None not in self._buckets:
            count = sum(self.blocks.copies(name) for name in self.gradients)
            kinds = ("all_reduce", "reduce_scatter")
            self._buckets[None] = Bucket(max(1, count), kinds, chained=True)
        return self._buckets[None]

    def is_given(self, value: Value) -> bool:
        """True for what comes in any layout for nothing: no move of it is counted."""
        return value[0] in self.inputs or value[0] in self.outside

    def may_hide(self, value: Value, consumer: str) -> bool:
        """True if the moves of a value on its way to an op run beside other ops.

        Parameters are there before; gradients that are only cast or rearranged are not waited for,
        nor is what only the caller reads.
        """
        beside = consumer in self.closing or consumer in self.told
        return beside or self._owner(value) in self.parameters

    def _owner(self, value: Value) -> str:
        """The parameter that a value shows; else its own producer."""
        return self.prepared.get(value[0]) or self.copies.get(value[0]) or value[0]

    def bucket(self, value: Value, consumer: str) -> Bucket:
        """What a value on its way to an op may share a bucket with.

        Gradients that are only cast or rearranged behind their reduction; parameters of one block.
        Nothing for all else and outside of blocks.
        """
        if consumer in self.closing:
            return self.reductions
        owner = self._owner(value)
        if owner not in self.parameters or owner not in self.blocks.place:
            return ALONE
        block, _ = self.blocks.place[owner]
        if block not in self._buckets:
            members = sum(node.name in self.parameters for node in self.blocks.members[block])
            self._buckets[block] = Bucket(members, ("all_gather",))
        return self._buckets[block]

    def held(self, op: Op) -> tuple[Value, ...]:
        """Values that must be in memory while an op runs, if no move cuts the kernel it is in."""
        if op.name not in self._held:
            self._held[op.name] = held_by(op, self.ops, self.shares.get(op.name))
        return self._held[op.name]

    @property
    def kernels(self) -> dict[str, str]:
        """By op of a fused kernel, one that stands for all of them."""
        if self.shares and not self._kernels:
            self._kernels.update(kernels_of(self.ops, self.shares, self.blocks))
        return self._kernels

    def is_written(self, value: Value) -> bool:
        """False for what stays inside a fused kernel, unless it is redistributed."""
        share = self.shares.get(value[0])
        return share is None or value[1] >= len(share.writes) or share.writes[value[1]] > 0

    def label(self, name: str) -> str:
        """What people call the producer of a value: a parameter by its FQN, an op by its node."""
        return self.parameters[name].target if name in self.parameters else name

    def named(self, name: str) -> str:
        """An op for messages: what it is, in which module, and the user's line."""
        op = self.ops[name]
        info = self.blocks.traced.info.get(op.origin or name)
        where = f" ({info.module or 'top level'}, {info.source})" if info else ""
        return f"{op.call.target}{where}"

    def consumers(self) -> Iterator[tuple[Value, Op, int]]:
        """Every use of a value by an op: `(value, op, operand index)`."""
        for op in self.ops.values():
            for index, value in enumerate(op.operands):
                yield value, op, index


def storage_of(ops: dict[str, Op], value: Value) -> Value:
    """The value whose memory a view shows."""
    name, _ = value
    while name in ops and ops[name].view:
        value = ops[name].operands[0]
        name, _ = value
    return value


def unview(ops: dict[str, Op], value: Value) -> Value:
    """Look through views that keep every element (not slices): to a parameter, for instance."""
    name, _ = value
    while name in ops and (ops[name].call.target in REARRANGING or ops[name].call.target is _ALIAS):
        value = ops[name].operands[0]
        name, _ = value
    return value
