"""Ops that make a tensor from its size: any shard of a constant is the constant.

What a `*_like` or `new_*` op reads of its operand is the shape, so any placement of it will do.
"""

from __future__ import annotations

from typing import Any

import torch

from autopar.core.placement import Partial, Placement, Replicate, Shard
from autopar.core.strategy import AxisStrategy, OpCall
from autopar.solver.rules.dims import dim_names
from autopar.solver.rules.labels import by_labels, replicated
from autopar.solver.rules.registry import rule

aten = torch.ops.aten


def _is_zero(call: OpCall, value_at: int) -> bool:
    """True if the op's constant is 0, so that zeros on all ranks are summands of it."""
    name = str(call.target)
    if "zeros" in name:
        return True
    return "full" in name and _equals_zero(call.arg(value_at, "fill_value", 1))


def _equals_zero(value: Any) -> bool:
    return isinstance(value, (int, float)) and value == 0


@rule(
    aten.full.default,
    aten.zeros.default,
    aten.ones.default,
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_permuted.default,
)
def constant_rule(call: OpCall) -> list[AxisStrategy]:
    rows = by_labels(call, [], [dim_names(call.outputs[0])])
    if _is_zero(call, 1):
        rows.append(AxisStrategy((), (Partial(),)))
    return rows


@rule(
    aten.full_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.empty_like.default,
)
def like_rule(call: OpCall) -> list[AxisStrategy]:
    names = dim_names(call.operands[0])
    rows = by_labels(call, [names], [names])
    rows.append(AxisStrategy((Partial(),), (Replicate(),)))
    if _is_zero(call, 1):
        rows += [AxisStrategy((held,), (Partial(),)) for held in (Replicate(), Partial())]
    return rows


@rule(
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
)
def new_rule(call: OpCall) -> list[AxisStrategy]:
    """Only the dtype of the operand is read, so that a sharded one need not be gathered."""
    source: list[Placement] = [Replicate(), Partial()]
    source += [Shard(dim) for dim in range(len(call.operands[0].shape))]
    result: list[Placement] = [Replicate()]
    result += [Shard(dim) for dim in range(len(call.outputs[0].shape))]
    if _is_zero(call, 2):
        result.append(Partial())
    return [AxisStrategy((held,), (made,)) for held in source for made in result]


@rule(
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.linspace.default,
    aten.logspace.default,
    aten.eye.default,
    aten.eye.m,
    aten.tril_indices.default,
    aten.triu_indices.default,
    aten.bartlett_window.default,
    aten.bartlett_window.periodic,
    aten.blackman_window.default,
    aten.blackman_window.periodic,
    aten.hamming_window.default,
    aten.hamming_window.periodic,
    aten.hamming_window.periodic_alpha,
    aten.hamming_window.periodic_alpha_beta,
    aten.hann_window.default,
    aten.hann_window.periodic,
    aten.kaiser_window.default,
    aten.kaiser_window.periodic,
    aten.kaiser_window.beta,
)
def whole_factory_rule(call: OpCall) -> list[AxisStrategy]:
    """Replicated: cutting a shard out of it sends nothing."""
    return [replicated(call)]


@rule(aten.scalar_tensor.default)
def number_rule(call: OpCall) -> list[AxisStrategy]:
    """Zeros on all ranks are summands of 0, as beside the gradient of a clamp."""
    rows = [replicated(call)]
    if _equals_zero(call.arg(0)) and call.outputs[0].dtype != torch.bool:
        rows.append(AxisStrategy((), (Partial(),)))
    return rows


@rule(aten.fill.Tensor)
def fill_rule(call: OpCall) -> list[AxisStrategy]:
    """Nothing of self is read but its shape; linear in the value."""
    names = dim_names(call.operands[0])
    rows = by_labels(call, [names, []], [names])
    for held in (Replicate(), Partial()):
        rows.append(AxisStrategy((held, Partial()), (Partial(),)))
    rows.append(AxisStrategy((Partial(), Replicate()), (Replicate(),)))
    return rows
