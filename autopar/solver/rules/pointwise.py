"""Elementwise ops: every dim of the output may be sharded; linear ones also pass Partial."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from autopar.core.host import WITH_HOST
from autopar.core.ops import NARROW
from autopar.core.placement import Partial, Replicate
from autopar.core.strategy import AxisStrategy, OpCall
from autopar.solver.rules.labels import by_labels, linear_rows, replicated
from autopar.solver.rules.registry import rule

aten = torch.ops.aten


def broadcast_labels(call: OpCall) -> tuple[list[list[str | None]], list[list[str]]]:
    """Labels of operands and outputs of an op that broadcasts; size-1 dims carry none."""
    full = call.outputs[0].shape
    names = [f"d{i}" for i in range(len(full))]
    operands: list[list[str | None]] = []
    for spec in call.operands:
        shift = len(full) - len(spec.shape)
        operands.append(
            [
                names[shift + i] if size == full[shift + i] else None
                for i, size in enumerate(spec.shape)
            ]
        )
    return operands, [list(names) for _ in call.outputs]


def _pointwise(call: OpCall) -> list[AxisStrategy]:
    inputs, outputs = broadcast_labels(call)
    return by_labels(call, inputs, outputs)


# ops linear in all tensor operands together, without an additive constant
_LINEAR = [
    aten.neg.default,
    aten.conj.default,
    aten._conj.default,
    aten._conj_physical.default,
    aten.real.default,
    aten.imag.default,
    aten.complex.default,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.sub.Tensor,
    aten.add.Tensor,
    aten.mul.Scalar,
    aten.div.Scalar,
    aten.copy.default,
    *WITH_HOST,
]
# ops linear in the first operand alone, the others replicated
_LINEAR_IN_FIRST = [
    aten.div.Tensor,
    aten.threshold_backward.default,
    aten.masked_fill.Scalar,
]
_NONLINEAR = [
    "abs acos acosh add.Scalar asin asinh atan atanh atan2 bitwise_and.Tensor bitwise_and.Scalar",
    "bitwise_not bitwise_or.Tensor bitwise_or.Scalar bitwise_xor.Tensor ceil celu clamp",
    "clamp.Tensor clamp_max clamp_min clamp_max.Tensor clamp_min.Tensor cos cosh div.Tensor_mode",
    "div.Scalar_mode elu eq.Scalar eq.Tensor erf erfc exp exp2 expm1 floor floor_divide",
    "fmod.Scalar fmod.Tensor ge.Scalar ge.Tensor gelu gt.Scalar gt.Tensor hardsigmoid hardswish",
    "hardtanh isinf isnan isfinite le.Scalar le.Tensor leaky_relu lerp.Tensor lerp.Scalar log",
    "log10 log1p log2 log_sigmoid_forward logical_and logical_not logical_or logical_xor logit",
    "lt.Scalar lt.Tensor maximum minimum mish nan_to_num ne.Scalar ne.Tensor pow.Scalar",
    "pow.Tensor_Scalar pow.Tensor_Tensor reciprocal relu remainder.Scalar remainder.Tensor round",
    "rsqrt rsub.Scalar rsub.Tensor sgn sigmoid sign silu sin sinh softplus softshrink sqrt square",
    "sub.Scalar tan tanh trunc where.Scalar xlogy.Tensor _prelu_kernel bitwise_left_shift.Tensor",
    "fill.Scalar bitwise_right_shift.Tensor heaviside hypot logaddexp erfinv lgamma digamma",
    "polygamma special_i0 special_entr masked_fill.Tensor addcmul addcdiv exponential frac",
    "deg2rad signbit hardshrink threshold sinc logaddexp2 i0 isposinf isneginf copysign.Tensor",
    "copysign.Scalar special_erfcx special_i0e special_log_ndtr polar __and__.Tensor",
    "__or__.Tensor __xor__.Tensor __lshift__.Scalar __rshift__.Scalar",
]


def _resolve(name: str) -> Any:
    packet, _, overload = name.partition(".")
    found = getattr(aten, packet, None)
    return getattr(found, overload or "default", None) if found is not None else None


_NONLINEAR_OPS = [
    op
    for line in _NONLINEAR
    for name in line.split()
    if (op := _resolve(name)) is not None and op not in _LINEAR
]


# additions: codegen/lowerings/pointwise.py gives each rank its share
_SUMS = (aten.add.Tensor, aten.sub.Tensor, aten.add.Scalar, aten.sub.Scalar, aten.rsub.Scalar)


def share_rows(call: OpCall) -> list[AxisStrategy]:
    """Rows that add to a sum over n ranks what all of them have: each adds an n-th of it."""
    exact = all(s.dtype.is_floating_point or s.dtype.is_complex for s in call.operands)
    if call.target not in _SUMS or not exact or not isinstance(call.args[0], fx.Node):
        return []
    count = len(call.operands)
    return [
        AxisStrategy(
            tuple(Partial() if i == summed else Replicate() for i in range(count)),
            (Partial(),),
            "share",
        )
        for summed in range(count)
    ]


def _is_number(call: OpCall) -> bool:
    return math.prod(call.outputs[0].shape) == 1


@rule(*_LINEAR)
def linear_pointwise(call: OpCall) -> list[AxisStrategy]:
    rows = _pointwise(call)
    has_constant = any(isinstance(a, (int, float)) for a in call.args[:2])
    additive = call.target in (aten.add.Tensor, aten.sub.Tensor)
    if call.operands and not (additive and (has_constant or len(call.operands) < 2)):
        rows += linear_rows(call, [range(len(call.operands))])
    return rows + (share_rows(call) if _is_number(call) else [])


@rule(*_LINEAR_IN_FIRST)
def linear_in_first(call: OpCall) -> list[AxisStrategy]:
    rows = _pointwise(call)
    if call.target is aten.masked_fill.Scalar and call.arg(2) != 0:
        return rows
    return rows + linear_rows(call, [(0,)])


@rule(aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther)
def where_rule(call: OpCall) -> list[AxisStrategy]:
    """(condition, x, y), linear in x and y together; a number beside a Partial can only be 0."""
    rows = _pointwise(call)
    chosen = call.args[1:3]
    if any(not isinstance(x, fx.Node) and x != 0 for x in chosen):
        return rows
    return rows + linear_rows(call, [range(1, len(call.operands))])


@rule(aten.mul.Tensor)
def mul_rule(call: OpCall) -> list[AxisStrategy]:
    rows = _pointwise(call)
    if len(call.operands) == 1:
        return rows + linear_rows(call, [(0,)])
    return rows + linear_rows(call, [(0,), (1,)])


@rule(aten._to_copy.default)
def cast_rule(call: OpCall) -> list[AxisStrategy]:
    """A cast between floating types passes Partial only where it does not lose precision."""
    rows = _pointwise(call)
    source, result = call.operands[0].dtype, call.outputs[0].dtype
    widens = source.is_floating_point and result.is_floating_point
    counts = source == torch.int64 and result.is_floating_point
    if source == result or counts or (widens and result.itemsize >= source.itemsize):
        rows.append(AxisStrategy((Partial(),), (Partial(),)))
    return rows


def rounding_rows(call: OpCall) -> list[AxisStrategy]:
    """Rows of casts that round each part of a sum, as those of gradients of microbatches are."""
    if call.target is not aten._to_copy.default:
        return []
    dtypes = call.operands[0].dtype, call.outputs[0].dtype
    rounds = all(dtype.is_floating_point for dtype in dtypes)
    return [AxisStrategy((Partial(),), (Partial(),))] if rounds else []


@rule(NARROW)
def narrow_rule(call: OpCall) -> list[AxisStrategy]:
    """A cast before a sum over ranks: each part is rounded, as a reduction in that dtype asks."""
    return [*_pointwise(call), AxisStrategy((Partial(),), (Partial(),))]


@rule(torch.Tag.pointwise, *_NONLINEAR_OPS)
def nonlinear_pointwise(call: OpCall) -> list[AxisStrategy]:
    return _pointwise(call) + (share_rows(call) if _is_number(call) else [])


@rule(aten.bucketize.Tensor)
def bucketize_rule(call: OpCall) -> list[AxisStrategy]:
    """(x, boundaries) -> the place of each element."""
    names = [f"d{i}" for i in range(len(call.operands[0].shape))]
    return by_labels(call, [names, [None]], [names])


@rule(aten.isin.Tensor_Tensor)
def isin_rule(call: OpCall) -> list[AxisStrategy]:
    """(x, elements) -> whether each element of x is one of those."""
    x, elements = call.operands
    names = [f"d{i}" for i in range(len(x.shape))]
    return by_labels(call, [names, [None] * len(elements.shape)], [names])


@rule(aten.searchsorted.Tensor)
def searchsorted_rule(call: OpCall) -> list[AxisStrategy]:
    """(boundaries, x) -> the place of each element, in boundaries that are whole.

    Boundaries (B, P) of each row of x (B, Q) are split with the rows.
    """
    boundaries, x = call.operands[:2]
    if len(call.operands) > 2 or not boundaries.shape:
        return [replicated(call)]
    names = [f"d{i}" for i in range(len(x.shape))]
    rows = names[:-1] if len(boundaries.shape) > 1 else []
    return by_labels(call, [[*rows, None], names], [names])


@rule(aten._prelu_kernel_backward.default)
def prelu_backward_rule(call: OpCall) -> list[AxisStrategy]:
    """(dy, x, w) of one rank, w broadcast -> (dx, dw before its sum); linear in dy."""
    inputs, outputs = broadcast_labels(call)
    return by_labels(call, inputs, outputs) + linear_rows(call, [(0,)])


@rule(torch.ops.autopar.dropout.default)
def dropout_rule(call: OpCall) -> list[AxisStrategy]:
    """The mask comes from the global index, so any shard is right; linear in x."""
    dims = [f"d{i}" for i in range(len(call.operands[0].shape))]
    rows = by_labels(call, [dims, []], [dims])
    return [*rows, AxisStrategy((Partial(), Replicate()), (Partial(),))]


@rule(torch.ops.autopar.uniform.default)
def uniform_rule(call: OpCall) -> list[AxisStrategy]:
    return by_labels(call, [[]], [[f"d{i}" for i in range(len(call.outputs[0].shape))]])
