"""`center` with its last dim split: the mean is of the whole row, not of this rank's part."""

from __future__ import annotations

import torch
from torch import fx

from autopar.extend import Builder, LocalCall, lowering
from autopar_example import ops as _ops  # noqa: F401  (defines the ops)

aten = torch.ops.aten


@lowering(torch.ops.autopar_example.center.default)
def lower_center(b: Builder, local: LocalCall) -> fx.Node:
    (x,) = local.args
    axes = local.axes_of("split")
    if not axes:
        return b.call(local.call.target, x)
    total = b.call(aten.sum.dim_IntList, x, [-1], True)
    for axis in axes:
        total = b.all_reduce(total, axis)
    mean = b.call(aten.div.Scalar, total, local.call.operands[0].shape[-1])
    return b.pack(b.call(aten.sub.Tensor, x, mean), mean)
