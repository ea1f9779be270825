"""What an op does on a device: its class in the cost model, its flops, and the bytes it moves.

A class groups ops whose seconds follow one curve over their work. Classes of contractions count
flops, all others bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from autopar.core import einsum, extensions
from autopar.core import ops as _ops  # noqa: F401  (registers the autopar ops)
from autopar.core.host import AWAY
from autopar.core.strategy import OpCall

__all__ = [
    "LOOKUPS",
    "global_flops",
    "is_away",
    "is_fresh_call",
    "is_view",
    "lays_out_contiguously",
    "op_class",
    "op_work",
]

aten = torch.ops.aten
autopar_ops = torch.ops.autopar

_VIEWS = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.transpose.int,
    aten.permute.default,
    aten.t.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze.default,
    aten.expand.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unbind.int,
    aten.alias.default,
    aten.detach.default,
    aten.as_strided.default,
}
# never a view of an operand
_FRESH = {
    aten._softmax_backward_data.default,
    aten._to_copy.default,
    aten.add.Tensor,
    aten.cat.default,
    aten.clone.default,
    aten.convolution.default,
    aten.convolution_backward.default,
    aten.div.Tensor,
    aten.embedding.default,
    aten.embedding_dense_backward.default,
    aten.gelu.default,
    aten.gelu_backward.default,
    aten.mul.Tensor,
    aten.native_layer_norm_backward.default,
    aten.neg.default,
    aten.silu.default,
    aten.silu_backward.default,
    aten.slice_backward.default,
    aten.sub.Tensor,
    aten.sum.dim_IntList,
}
# whatever the strides of their operands
_CONTIGUOUS = {
    aten.cat.default,
    aten.contiguous.default,
    aten.embedding_dense_backward.default,
    aten.slice_backward.default,
}
_PASSING = {
    aten.alias.default,
    aten.detach.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.view.default,
}
_EINSUMS = (autopar_ops.einsum.default, einsum.contract)  # as planned, and as a part runs it
_MATMULS = (
    *_EINSUMS,
    aten.mm.default,
    aten.bmm.default,
    aten.addmm.default,
    aten.baddbmm.default,
)
_ATTENTION = {
    autopar_ops.attention.default: "attention",
    autopar_ops.attention_backward.default: "attention_backward",
}
LOOKUPS = (aten.embedding.default, aten.index.Tensor, aten.gather.default)
_CLASSES: dict[str, str] = {
    "autopar::dropout": "random",
    "autopar::uniform": "random",
    "aten::convolution": "conv",
    "aten::convolution_backward": "conv_backward",
    "autopar::token_nll": "loss",
    "autopar::token_nll_backward": "loss",
    "aten::tanh": "tanh",
    "aten::clone": "memory",
    "aten::_to_copy": "memory",
    "aten::copy": "memory",
    "autopar::to_host": "host",
    "autopar::from_host": "host",
    **dict.fromkeys(
        [
            "aten::_softmax",
            "aten::_softmax_backward_data",
            "aten::_log_softmax",
            "aten::_log_softmax_backward_data",
            "aten::logsumexp",
        ],
        "softmax",
    ),
    **dict.fromkeys(
        [
            "aten::embedding",
            "aten::embedding_dense_backward",
            "aten::index",
            "aten::index_put",
            "aten::gather",
            "aten::scatter",
            "aten::scatter_add",
            "aten::index_select",
        ],
        "lookup",
    ),
}
_NORMS = ("native_layer_norm", "native_batch_norm", "native_group_norm", "_fused_rms_norm")
_REDUCTIONS = ("sum", "mean", "amax", "amin", "var", "var_mean", "argmax", "max", "min", "prod")
_SPECIAL = (
    "exp", "expm1", "log", "log1p", "log2", "sigmoid", "gelu", "gelu_backward", "silu",
    "silu_backward", "erf", "sin", "cos", "softplus", "softplus_backward", "mish", "elu", "atan2",
    "sinh", "cosh", "tan", "logaddexp",
)  # fmt: skip


Work = Callable[[OpCall], float]
_WORK: dict[Any, tuple[str, Work]] = {}


def op_work(*targets: Any, op_class: str = "matmul") -> Callable[[Work], Work]:
    """Register the flops of op overloads, or names, from a function of the whole op.

    An op without it counts as one that is bound by the bytes that it reads and writes.

    Args:
        targets: ops that autopar does not know.
        op_class: whose efficiency on a device holds for them.

    Raises:
        ValueError: an op has one already.
    """

    def register(function: Work) -> Work:
        for target in targets:
            known = extensions.taken(_WORK, target)
            if known is not None and not extensions.is_same(known[1], function):
                raise ValueError(f"{target} already has its flops from {known[1].__name__}")
            _WORK[target] = op_class, function
        extensions.note("work", map(str, targets), function)
        return function

    return register


def _registered(target: Any) -> tuple[str, Work] | None:
    return _WORK.get(target) or _WORK.get(str(target)) if _WORK else None


# fused ops and generated kernels read operands once and write results once
_FUSED = ("autopar_kernels::", "fused_")
_CLASSES.update(
    {
        f"autopar_kernels::{name}": kind
        for kind, names in (
            ("norm", "layer_norm rms_norm add_layer_norm add_rms_norm layer_norm_backward "
             "rms_norm_backward"),
            ("softmax", "masked_softmax softmax_backward"),
            ("loss", "token_nll nll_stats nll_backward"),
        )
        for name in names.split()
    }
)  # fmt: skip
# matmuls of the logits in each
_LINEAR_LOSS = {"autopar_kernels::linear_nll": 1, "autopar_kernels::linear_nll_backward": 3}
_CLASSES.update(dict.fromkeys(_LINEAR_LOSS, "matmul"))


def is_view(target: Any) -> bool:
    """True for ops whose result shares the input's storage."""
    return target in _VIEWS


def is_away(target: Any) -> bool:
    """True for ops whose result takes host memory, and none of the device's."""
    return target in AWAY


def is_fresh_call(target: Any) -> bool:
    """True for ops that are known to make tensors of their own."""
    return target in _FRESH or target in _EINSUMS


def lays_out_contiguously(target: Any, args: Sequence[Any]) -> bool | None:
    """True where a call's results are contiguous, whatever its operands; None where theirs are.

    False where it is not known. Fake values do not tell: they say of all products that they are
    contiguous, and ops of others need not keep what theirs promise.
    """
    if target in _EINSUMS:
        return einsum.is_dense(str(args[0]))
    if target in _CONTIGUOUS:
        return True
    return None if target in _FRESH or target in _PASSING else False


def op_class(call: OpCall) -> str:
    """Class of an op in the cost model's tables.

    A device without a curve for a class prices it by a plainer one (`compute.PLAINER`).
    """
    target = call.target
    extended = _registered(target)
    if extended is not None:
        return extended[0]
    if target in _ATTENTION:
        # half the flops, which not every kernel skips
        return _ATTENTION[target] + ("_causal" if _is_causal(call) else "")
    if target in _MATMULS or _is_grouped(call):
        return "matmul"
    if is_view(target):
        return "view"
    schema = getattr(target, "_schema", None)
    name = str(schema.name) if schema is not None else str(target)
    if name in _CLASSES:
        return _CLASSES[name]
    if name.startswith(_FUSED):
        return "pointwise"
    short = name.rpartition("::")[2]
    if short.startswith(_NORMS) or "batch_norm" in short:
        return "norm"
    if short in _REDUCTIONS:
        return "reduction" if _shrinks(call) else "pointwise"
    if short in _SPECIAL:
        return "special"
    return "pointwise" if torch.Tag.pointwise in getattr(target, "tags", ()) else "memory"


def _shrinks(call: OpCall) -> bool:
    """True where the result has fewer elements: `max` of two tensors is no reduction."""
    sizes = [math.prod(spec.shape) for spec in call.operands]
    return len(sizes) == 1 and bool(call.outputs) and math.prod(call.outputs[0].shape) < sizes[0]


def _is_grouped(call: OpCall) -> bool:
    """A matmul of rows with the weight of their group: rows (T, K), weights (E, K, N)."""
    return "grouped_mm" in str(call.target)


def global_flops(call: OpCall) -> float:
    """Floating-point operations of an op; 0 for classes that count bytes."""
    extended = _registered(call.target)
    if extended is not None:
        return float(extended[1](call))
    shapes = [spec.shape for spec in call.operands]
    if call.target in _EINSUMS:
        return float(einsum.flops(call.args[0], shapes[0], shapes[1]))
    if call.target in _ATTENTION:
        return _attention_flops(call)
    if call.target in (aten.convolution.default, aten.convolution_backward.default):
        backward = call.target is aten.convolution_backward.default
        weight = shapes[2] if backward else shapes[1]
        out = shapes[0] if backward else call.outputs[0].shape
        macs = math.prod(out) * math.prod(weight[1:])
        return 2.0 * macs * (2.0 if backward else 1.0)
    if _is_grouped(call):
        # each row meets one group: (S, K) with (G, K, N), or (K, S) with (S, N)
        if len(shapes[1]) == 2:
            return 2.0 * math.prod(shapes[0]) * shapes[1][1]
        return 2.0 * shapes[0][0] * math.prod(shapes[1][1:]) * len(call.outputs)
    schema = getattr(call.target, "_schema", None)
    times = _LINEAR_LOSS.get(schema.name, 0) if schema is not None else 0
    if times:
        x, weight = shapes[times // 3 : times // 3 + 2]  # behind the gradient in the backward
        return 2.0 * times * math.prod(x) * weight[0]
    if op_class(call) == "matmul":
        a, b = shapes[-2:]
        return 2.0 * math.prod(a) * b[-1]
    return 0.0


def _attention_flops(call: OpCall) -> float:
    backward = call.target is autopar_ops.attention_backward.default
    shapes = [spec.shape for spec in call.operands]
    q, k, v = shapes[1:4] if backward else shapes[:3]
    pairs = 2.0 * q[0] * q[1] * q[2] * k[2]
    forward = pairs * (q[3] + v[3])
    return forward * (2.5 if backward else 1.0) * (0.5 if _is_causal(call) else 1.0)


def _is_causal(call: OpCall) -> bool:
    return len(call.args) > 2 and call.args[-2] is True
