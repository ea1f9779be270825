"""What an op does on a device: its class in the cost model, its flops, and the bytes it moves.

A class groups ops whose seconds follow one curve over their work. Classes of contractions count
flops, all others bytes. A variant of a class is an op of the same kind that libraries compute in
another way, at another rate (`VARIANTS`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from autopar.core import einsum, extensions
from autopar.core import ops as _ops  # noqa: F401  (registers the autopar ops)
from autopar.core.host import AWAY
from autopar.core.key_blocks import first_operand, is_causal
from autopar.core.loops import LOOPS, loop_flops, loop_variant
from autopar.core.reshapes import view_class
from autopar.core.strategy import OpCall

__all__ = [
    "LOOKUPS",
    "VARIANTS",
    "conv_variant",
    "family",
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
# class of a variant -> class that it is one of
VARIANTS = {
    # many small products: none of them alone reaches the rate of a large one
    "matmul_batched": "matmul",
    # a mask is read once per head, too, and rules out that blocks are skipped
    "attention_masked": "attention",
    "attention_backward_masked": "attention_backward",
    # a matrix product; bound by bytes; too few channels to fill a vector; else direct or Winograd
    **{f"conv{kind}": "conv" for kind in ("_1x1", "_depthwise", "_image")},
    **{f"conv_backward{kind}": "conv_backward" for kind in ("_1x1", "_depthwise", "_image")},
    # functions that cost up to six times as much as each other
    "special_exp": "special",
    "special_sigmoid": "special",
    "special_gelu": "special",
    "special_gelu_tanh": "special",
    "special_gelu_tanh_backward": "special",  # goes by arithmetic: a third operand costs nothing
    # a backward reads twice as much, and calls no transcendental function (or another one)
    "softmax_backward": "softmax",
    "norm_backward": "norm",
    "loss_backward": "loss",
    # sums of rows, added to each other, in place of sums along rows
    "reduction_leading": "reduction",
    # where there is a kernel of all steps, it is one of an LSTM's
    **dict.fromkeys(
        ["recurrent_lstm", "recurrent_backward", "recurrent_lstm_backward"], "recurrent"
    ),
    # an operand of another type: often not vectorised
    "select": "pointwise",
}
_FEW_CHANNELS = 8  # that a convolution reads per output: fewer do not fill a vector
_ATTENTION = {
    autopar_ops.attention.default: "attention",
    autopar_ops.attention_backward.default: "attention_backward",
}
LOOKUPS = (aten.embedding.default, aten.index.Tensor, aten.gather.default)
_CLASSES: dict[str, str] = {
    "autopar::dropout": "random",
    "autopar::uniform": "random",
    "autopar::token_nll": "loss",
    "autopar::token_nll_backward": "loss_backward",
    "aten::tanh": "tanh",
    "aten::where": "select",
    "aten::masked_fill": "select",
    **dict.fromkeys(["aten::exp", "aten::exp2", "aten::log", "aten::log2"], "special_exp"),
    "aten::sigmoid": "special_sigmoid",
    "aten::silu": "special_sigmoid",
    "aten::silu_backward": "special_sigmoid",
    "aten::_softmax_backward_data": "softmax_backward",
    "aten::_log_softmax_backward_data": "softmax_backward",
    "aten::clone": "memory",
    "aten::_to_copy": "memory",
    "aten::copy": "memory",
    "autopar::to_host": "host",
    "autopar::from_host": "host",
    **dict.fromkeys(["aten::_softmax", "aten::_log_softmax", "aten::logsumexp"], "softmax"),
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
    "expm1", "log1p", "erf", "sin", "cos", "softplus", "softplus_backward",
    "mish", "elu", "atan2", "sinh", "cosh", "tan", "logaddexp",
)  # fmt: skip
_GELUS = ("gelu", "gelu_backward")
_CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)


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
        masked = "_masked" if _is_masked(call) else ""
        # half the flops, which not every kernel skips
        return _ATTENTION[target] + ("_causal" if is_causal(call) else masked)
    if target in _MATMULS or _is_grouped(call):
        return "matmul_batched" if _is_batched(call) else "matmul"
    if target in _CONVOLUTIONS:
        return _conv_class(call)
    if target in LOOPS:
        return f"recurrent{loop_variant(call)}"
    if is_view(target):
        return view_class(call)
    schema = getattr(target, "_schema", None)
    name = str(schema.name) if schema is not None else str(target)
    if name in _CLASSES:
        return _CLASSES[name]
    if name.startswith(_FUSED):
        return "pointwise"
    short = name.rpartition("::")[2]
    if short.startswith(_NORMS) or "batch_norm" in short:
        return "norm_backward" if short.endswith("_backward") else "norm"
    if short in _REDUCTIONS:
        return _reduction_class(call) if _shrinks(call) else "pointwise"
    if short in _GELUS:
        if call.kwargs.get("approximate") != "tanh":
            return "special_gelu"
        return "special_gelu_tanh" + short.removeprefix("gelu")
    if short in _SPECIAL:
        return "special"
    return "pointwise" if torch.Tag.pointwise in getattr(target, "tags", ()) else "memory"


def family(op_class: str) -> str:
    """The class that a variant is one of; any other class itself."""
    return VARIANTS.get(op_class, op_class)


def _is_batched(call: OpCall) -> bool:
    """A product per index of a batch of more than one, where a linear layer is one product."""
    if call.target in _EINSUMS:
        eq = einsum.parse_equation(str(call.args[0]))
        sizes = zip(eq.a, call.operands[0].shape, strict=True)
        return any(size > 1 for letter, size in sizes if letter in eq.batch)
    return call.target in (aten.bmm.default, aten.baddbmm.default)


def _conv_class(call: OpCall) -> str:
    """The gradient of the weight alone is one pass like the forward, and of its class."""
    backward = call.target is aten.convolution_backward.default
    weight = call.operands[2 if backward else 1].shape
    base = "conv_backward" if backward and call.arg(10, "output_mask")[0] else "conv"
    return base + conv_variant(weight, call.arg(9 if backward else 8, "groups", 1))


def conv_variant(weight: Sequence[int], groups: int) -> str:
    """What a convolution's class ends with, by the shape of its weight; "" for an ordinary one."""
    if groups > 1:
        return "_depthwise" if weight[1] == 1 else ""
    if math.prod(weight[2:]) == 1:
        return "_1x1"
    return "_image" if weight[1] < _FEW_CHANNELS else ""


def _reduction_class(call: OpCall) -> str:
    """Along rows, or rows added to each other."""
    dims = call.arg(1, "dim")
    rank = len(call.operands[0].shape)
    listed = [dims] if isinstance(dims, int) else dims
    if not isinstance(listed, (list, tuple)) or not listed:
        return "reduction"
    return "reduction" if rank - 1 in {int(d) % rank for d in listed} else "reduction_leading"


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
    if call.target in LOOPS:
        return loop_flops(call)
    if call.target in _CONVOLUTIONS:
        backward = call.target is aten.convolution_backward.default
        weight = shapes[2] if backward else shapes[1]
        out = shapes[0] if backward else call.outputs[0].shape
        macs = math.prod(out) * math.prod(weight[1:])
        # one pass per gradient that is asked for; an image needs none
        return 2.0 * macs * (sum(call.arg(10, "output_mask")[:2]) if backward else 1.0)
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
    if family(op_class(call)) == "matmul":
        a, b = shapes[-2:]
        return 2.0 * math.prod(a) * b[-1]
    return 0.0


def _attention_flops(call: OpCall) -> float:
    first = first_operand(call)
    q, k, v = (spec.shape for spec in call.operands[first : first + 3])
    pairs = 2.0 * q[0] * q[1] * q[2] * k[2]
    forward = pairs * (q[3] + v[3])
    return forward * (2.5 if first else 1.0) * (0.5 if is_causal(call) else 1.0)


def _is_masked(call: OpCall) -> bool:
    """The mask is behind q, k, v, and in the backward behind the gradient, too."""
    return call.operand_index(first_operand(call) + 3) is not None
