"""Convolution, resampling: arguments that hold the size of a sharded dim, made local."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from autopar.codegen.builder import Builder
from autopar.codegen.lowering import LocalCall, lowering
from autopar.core.placement import local_shape

aten = torch.ops.aten


def _local_groups(local: LocalCall, groups: int) -> int:
    """Groups that this rank convolves, of the axes of variant "groups"."""
    for axis in local.axes_of("groups"):
        groups //= local.mesh_shape[axis]
    return groups


@lowering(aten.convolution.default)
def lower_convolution(b: Builder, local: LocalCall) -> fx.Node:
    x, weight, bias, *args, groups = local.args
    ranks = math.prod(local.mesh_shape[axis] for axis in local.axes_of("share"))
    if ranks > 1:
        bias = b.call(aten.div.Tensor, bias, ranks)
    return b.call(aten.convolution.default, x, weight, bias, *args, _local_groups(local, groups))


@lowering(aten.convolution_backward.default)
def lower_convolution_backward(b: Builder, local: LocalCall) -> fx.Node:
    """The bias has as many elements as `grad_output` has local channels."""
    grad, x, weight, bias_sizes, *rest, groups, mask = local.args
    if bias_sizes is not None and mask[2]:
        bias_sizes = [b.shape(grad)[1]]
    return b.call(
        aten.convolution_backward.default,
        grad, x, weight, bias_sizes, *rest, _local_groups(local, groups), mask,
    )  # fmt: skip


_SIZED = (
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d",
    "upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d _upsample_nearest_exact1d",
    "_upsample_nearest_exact2d _upsample_nearest_exact3d _upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa",
)


def _upsample_backwards() -> list[Any]:
    names = " ".join(_SIZED).split()
    packets = [getattr(aten, f"{name}_backward", None) for name in names]
    return [packet.default for packet in packets if packet is not None]


@lowering(*_upsample_backwards())
def lower_upsample_backward(b: Builder, local: LocalCall) -> fx.Node:
    """(grad, output_size, input_size, …): `input_size` counts batch and channels too."""
    grad, output_size, input_size, *rest = local.args
    size = local_shape(tuple(input_size), local.outputs[0], local.mesh_shape)
    return b.call(local.call.target, grad, output_size, list(size), *rest, **local.kwargs)
