"""Additions at indices: ranks that add some of them to what all have begin with a share of it."""

from __future__ import annotations

import math

import torch
from torch import fx

from autopar.codegen.builder import Builder
from autopar.codegen.lowering import LocalCall, lowering

aten = torch.ops.aten


@lowering(
    aten.index_add.default,
    aten.scatter_add.default,
    aten.scatter_reduce.two,
    aten.index_put.default,
    aten._unsafe_index_put.default,
)
def lower_added(b: Builder, local: LocalCall) -> fx.Node:
    """On an axis with the variant "share", the first operand is divided by the number of ranks.

    Whole numbers, which may not divide, are left to the first of them.
    """
    base, *args = local.args
    dtype, axes = local.call.operands[0].dtype, local.axes_of("share")
    if axes and (dtype.is_floating_point or dtype.is_complex):
        base = b.call(aten.div.Tensor, base, math.prod(local.mesh_shape[axis] for axis in axes))
    elif axes:
        base = b.call(aten.mul.Tensor, base, not any(b.coords[axis] for axis in axes))
    return b.call(local.call.target, base, *args, **local.kwargs)
