"""Elementwise ops whose local form differs: additions to a sum over ranks, and views.

A view that only marks a tensor as conjugated is computed, as collectives send the memory as it is.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from autopar.codegen.builder import Builder
from autopar.codegen.lowering import LocalCall, lowering

aten = torch.ops.aten


@lowering(aten._conj.default)
def lower_conj(b: Builder, local: LocalCall) -> fx.Node:
    return b.call(aten._conj_physical.default, local.args[0])


@lowering(aten.add.Tensor, aten.sub.Tensor, aten.add.Scalar, aten.sub.Scalar, aten.rsub.Scalar)
def lower_sum(b: Builder, local: LocalCall) -> fx.Node:
    """On an axis with the variant "share", what all ranks have is divided by their number."""
    axes = local.axes_of("share")
    args = list(local.args)
    layouts = iter(local.inputs)
    for i, arg in enumerate(args[:2]):
        layout = next(layouts) if isinstance(arg, fx.Node) else None
        ranks = math.prod(
            local.mesh_shape[axis] for axis in axes if layout is None or layout[axis].is_replicate
        )
        if ranks > 1:
            args[i] = arg / ranks if layout is None else b.call(aten.div.Tensor, arg, ranks)
    return b.call(local.call.target, *args, **local.kwargs)
