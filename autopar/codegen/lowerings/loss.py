"""Cross-entropy on vocabulary-sharded logits: three numbers a token travel, not the logits.

lse = m + log Σ_ranks Σ exp(logits − m) with m the maximum over all ranks; the target's logit comes
from the rank that has it (Shoeybi et al. 2019, arXiv 1909.08053).
"""

from __future__ import annotations

import torch
from torch import fx

from autopar.codegen.builder import Builder
from autopar.codegen.lowering import LocalCall, lowering

aten = torch.ops.aten
autopar = torch.ops.autopar


def _local_target(
    b: Builder, local: LocalCall, target: fx.Node, logits: int, ignore_index: int
) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Index of the target among this rank's logits, whether it is there, whether it is ignored."""
    spec, layout = local.call.operands[logits], local.inputs[logits]
    start = local.offset(b, layout, spec.shape)[-1]
    factor = 1
    for axis in local.axes_of("vocab"):
        factor *= local.mesh_shape[axis]
    count = spec.shape[-1] // factor
    ignored = b.call(aten.eq.Scalar, target, ignore_index)
    index = b.call(aten.sub.Tensor, target, start)
    inside = b.call(
        aten.logical_and.default,
        b.call(aten.ge.Scalar, index, 0),
        b.call(aten.lt.Scalar, index, count),
    )
    inside = b.call(aten.logical_and.default, inside, b.call(aten.logical_not.default, ignored))
    index = b.call(aten.where.ScalarOther, inside, index, 0)
    return b.call(aten.unsqueeze.default, index, -1), inside, ignored


@lowering(autopar.token_nll.default)
def lower_token_nll(b: Builder, local: LocalCall) -> fx.Node:
    axes = local.axes_of("vocab")
    logits, target, ignore_index = local.args
    if not axes:
        return b.call(autopar.token_nll.default, logits, target, ignore_index)
    index, inside, ignored = _local_target(b, local, target, 0, ignore_index)
    logits = b.widen(logits)
    top = b.call(aten.amax.default, logits, [-1], True)
    for axis in axes:
        top = b.all_reduce(top, axis, "max")
    infinite = b.call(aten.isinf.default, top)
    top = b.call(aten.masked_fill.Scalar, top, infinite, 0.0)  # all logits −inf: log 0, not NaN
    shifted = b.call(aten.exp.default, b.call(aten.sub.Tensor, logits, top))
    total = b.call(aten.sum.dim_IntList, shifted, [-1])
    picked = b.call(aten.squeeze.dim, b.call(aten.gather.default, logits, -1, index), -1)
    picked = b.call(aten.where.ScalarOther, inside, picked, 0.0)
    sums = b.call(aten.stack.default, [total, picked])
    for axis in axes:
        sums = b.all_reduce(sums, axis)
    total, picked = b.call(aten.select.int, sums, 0, 0), b.call(aten.select.int, sums, 0, 1)
    log_total = b.call(aten.log.default, total)
    lse = b.call(aten.add.Tensor, log_total, b.call(aten.squeeze.dim, top, -1))
    nll = b.call(aten.masked_fill.Scalar, b.call(aten.sub.Tensor, lse, picked), ignored, 0.0)
    nll_spec, lse_spec = local.call.outputs
    return b.pack(b.cast(nll, nll_spec.dtype), b.cast(lse, lse_spec.dtype))


@lowering(autopar.token_nll_backward.default)
def lower_token_nll_backward(b: Builder, local: LocalCall) -> fx.Node:
    """dlogits = (softmax(logits) − onehot(target)) · grad, of this rank's logits."""
    grad, logits, target, lse, ignore_index = local.args
    if not local.axes_of("vocab"):
        return b.call(local.call.target, grad, logits, target, lse, ignore_index)
    index, inside, ignored = _local_target(b, local, target, 1, ignore_index)
    scale = b.call(aten.masked_fill.Scalar, b.widen(grad), ignored, 0.0)
    shifted = b.call(
        aten.sub.Tensor, b.widen(logits), b.call(aten.unsqueeze.default, b.widen(lse), -1)
    )
    probs = b.call(aten.exp.default, shifted)
    out = b.call(aten.mul.Tensor, probs, b.call(aten.unsqueeze.default, scale, -1))
    drop = b.call(aten.where.ScalarOther, inside, b.call(aten.neg.default, scale), 0.0)
    drop = b.cast(b.call(aten.unsqueeze.default, drop, -1), b.value(out).dtype)
    out = b.call(aten.scatter_add.default, out, -1, index, drop)
    return b.cast(out, local.call.outputs[0].dtype)
