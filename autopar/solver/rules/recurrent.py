"""Recurrent layers: samples shard. A step needs the whole state before it: nothing else does."""

from __future__ import annotations

import torch

from autopar.core.placement import Partial, Placement, Replicate, Shard
from autopar.core.recurrent import OPERANDS, RECURRENT, RECURRENT_BACKWARD
from autopar.core.strategy import AxisStrategy, OpCall
from autopar.solver.rules.labels import linear_rows, replicated
from autopar.solver.rules.registry import rule

_SAMPLES: dict[str, Placement] = {
    "x": Shard(1), "h": Shard(0), "c": Shard(0), "lengths": Shard(0),
}  # fmt: skip


def _named(call: OpCall, first: int) -> list[str]:
    """Names of the operands that are given, in order."""
    return [n for i, n in enumerate(OPERANDS, first) if call.operand_index(i) is not None]


@rule(torch.ops.autopar.longest.default)
def longest_rule(call: OpCall) -> list[AxisStrategy]:
    """The longest of all samples is on one rank."""
    return [replicated(call)]


@rule(RECURRENT)
def recurrent_rule(call: OpCall) -> list[AxisStrategy]:
    """(x, h, c?, weights, lengths?) -> (out, h, c or nothing)."""
    names = _named(call, 1)
    inputs = tuple(_SAMPLES.get(name, Replicate()) for name in names)
    cell = Shard(0) if "c" in names else Replicate()
    return [replicated(call), AxisStrategy(inputs, (Shard(1), Shard(0), cell))]


@rule(RECURRENT_BACKWARD)
def recurrent_backward_rule(call: OpCall) -> list[AxisStrategy]:
    """(d out, d h, d c?, x, h, c?, weights, lengths?) -> their gradients, but for lengths."""
    names = _named(call, 4)
    gradients = (Shard(1), *(Shard(0) for _ in call.operands[1 : len(call.operands) - len(names)]))
    inputs = tuple(_SAMPLES.get(name, Replicate()) for name in names)
    outputs = tuple(_SAMPLES.get(name, Partial()) for name in names if name != "lengths")
    rows = [replicated(call), AxisStrategy((*gradients, *inputs), outputs)]
    return rows + linear_rows(call, [range(len(gradients))])
