"""What each fusible op is in Triton: expressions over operands that are already loaded.

Floating values are held in float32 (float64 for float64), booleans as int1, integers as they are.
Casts that a graph makes to a narrower dtype round as they do in ATen; other results are rounded
once, when they are stored.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from autopar import kernels as _kernels  # noqa: F401  (registers the ops)
from autopar.core import ops as _ops  # noqa: F401

__all__ = ["DROPOUT", "EXPRESSIONS", "IDENTITIES", "REDUCTIONS", "ROW_OPS", "literal", "power",
           "triton_type"]  # fmt: skip

aten = torch.ops.aten
DROPOUT = (torch.ops.autopar.dropout.default, torch.ops.autopar_kernels.dropout.default)

_BINARY = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}",
    "eq": "{0} == {1}", "ne": "{0} != {1}", "lt": "{0} < {1}", "le": "{0} <= {1}",
    "gt": "{0} > {1}", "ge": "{0} >= {1}",
}  # fmt: skip
_UNARY = {
    "neg": "-{0}", "exp": "tl.exp({0})", "log": "tl.log({0})", "sqrt": "tl.sqrt({0})",
    "rsqrt": "1.0 / tl.sqrt({0})", "reciprocal": "1.0 / {0}", "abs": "tl.abs({0})",
    "sin": "tl.sin({0})", "cos": "tl.cos({0})", "erf": "tl.erf({0})", "tanh": "tanh({0})",
    "sigmoid": "sigmoid({0})", "silu": "{0} * sigmoid({0})",
    "relu": "tl.where({0} < 0.0, 0.0, {0})", "isinf": "tl.abs({0}) == float('inf')",
}  # fmt: skip

# targets to expressions; a condition is made boolean by where it stands
EXPRESSIONS: dict[Any, str] = {
    **{getattr(getattr(aten, k), v): e for k, e in _BINARY.items() for v in ("Tensor", "Scalar")},
    **{getattr(aten, k).default: e for k, e in _UNARY.items()},
    aten.rsub.Scalar: "{1} - {0}",
    aten.maximum.default: "tl.maximum({0}, {1})",
    aten.minimum.default: "tl.minimum({0}, {1})",
    aten.where.self: "tl.where({0}, {1}, {2})",
    aten.where.ScalarOther: "tl.where({0}, {1}, {2})",
    aten.where.ScalarSelf: "tl.where({0}, {1}, {2})",
    aten.masked_fill.Scalar: "tl.where({1}, {2}, {0})",
    aten.logical_and.default: "{0} & {1}",
    aten.logical_or.default: "{0} | {1}",
    aten.logical_not.default: "{0} == 0",
    aten.bitwise_not.default: "{0} == 0",
    aten.tanh_backward.default: "{0} * (1.0 - {1} * {1})",
    aten.sigmoid_backward.default: "{0} * {1} * (1.0 - {1})",
    aten.silu_backward.default: "{0} * slope({1}, 'silu')",
    aten.threshold_backward.default: "tl.where({1} > {2}, {0}, 0.0)",
    aten.gelu.default: "activate({0}, '{act}')",
    aten.gelu_backward.default: "{0} * slope({1}, '{act}')",
    aten.pow.Tensor_Scalar: "{power}",
    aten._to_copy.default: "{0}",
    aten.clone.default: "{0}",
}
CONDITIONS = {
    aten.where.self: 0,
    aten.where.ScalarOther: 0,
    aten.where.ScalarSelf: 0,
    aten.masked_fill.Scalar: 1,
}
COMPARISONS = frozenset(
    getattr(getattr(aten, k), v) for k in ("eq", "ne", "lt", "le", "gt", "ge")
    for v in ("Tensor", "Scalar")
)  # fmt: skip
# of booleans alone; of integers they mean bits
LOGICAL = frozenset(
    {
        aten.bitwise_not.default, aten.logical_and.default, aten.logical_or.default,
        aten.logical_not.default,
    }
)  # fmt: skip
IDENTITIES = frozenset({aten.alias.default, aten.detach.default, aten.expand.default})
REDUCTIONS: dict[Any, str] = {
    aten.sum.dim_IntList: "tl.sum(tl.where(inside, {0}, 0.0), 1, keep_dims=True)",
    aten.mean.dim: "tl.sum(tl.where(inside, {0}, 0.0), 1, keep_dims=True) / {size}",
    aten.amax.default: "tl.max(tl.where(inside, {0}, -float('inf')), 1, keep_dims=True)",
}
ROW_OPS: dict[Any, str] = {
    aten._softmax.default: "row_softmax({0}, inside)",
    aten._softmax_backward_data.default: "row_softmax_backward({0}, {1}, inside)",
}
_POWERS: dict[float, str] = {
    0.5: "tl.sqrt({0})", 1.0: "{0}", 2.0: "{0} * {0}", 3.0: "{0} * {0} * {0}",
    -0.5: "1.0 / tl.sqrt({0})", -1.0: "1.0 / {0}", -2.0: "1.0 / ({0} * {0})",
}  # fmt: skip
_TYPES = {
    torch.float64: "float64", torch.float32: "float32", torch.bfloat16: "bfloat16",
    torch.float16: "float16", torch.int64: "int64", torch.int32: "int32", torch.bool: "int1",
}  # fmt: skip


def triton_type(dtype: torch.dtype, *, held: bool = False) -> str | None:
    """Triton's name of a dtype, or of the type that its values are held in; None for no such."""
    if held and dtype.is_floating_point and dtype != torch.float64:
        return "tl.float32" if dtype in _TYPES else None
    name = _TYPES.get(dtype)
    return None if name is None else f"tl.{name}"


def power(exponent: Any) -> str | None:
    """Expression of a power, or None for one that is not spelled out."""
    return _POWERS.get(float(exponent)) if isinstance(exponent, (int, float)) else None


def literal(value: Any) -> str:
    """A number as source text."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"float('{value}')"
    return f"({value!r})" if isinstance(value, (int, float)) and value < 0 else repr(value)
