"""Normalisation over a sharded dim, with all-reduced statistics, and group norm on a block.

With H features over the ranks of the axes of variant "hidden":
layer norm (Ba et al. 2016, arXiv 1607.06450): μ = Σx / H and then σ² = Σ(x − μ)² / H, never
E[x²] − E[x]², which cancels. Backward with g = dy · w and x̂ = (x − μ) / σ:
dx = (g − Σg / H − x̂ · Σ(g x̂) / H) / σ. RMS norm (Zhang and Sennrich 2019, arXiv 1910.07467) is
the same without μ and Σg.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.codegen.builder import Builder
from autopar.codegen.lowering import LocalCall, lowering

aten = torch.ops.aten


class _Hidden:
    """Arithmetic over the last dim, sharded over the axes of variant "hidden"."""

    def __init__(self, b: Builder, local: LocalCall, size: int) -> None:
        self.b, self.size = b, size
        self.axes = local.axes_of("hidden")

    def sum(self, x: fx.Node) -> fx.Node:
        return self.b.call(aten.sum.dim_IntList, x, [-1], True)

    def reduce(self, x: fx.Node) -> fx.Node:
        for axis in self.axes:
            x = self.b.all_reduce(x, axis)
        return x

    def mean(self, x: fx.Node) -> fx.Node:
        return self.over_size(self.reduce(self.sum(x)))

    def over_size(self, x: fx.Node) -> fx.Node:
        return self.b.call(aten.div.Tensor, x, self.size)

    def rstd(self, centered: fx.Node, eps: float) -> fx.Node:
        variance = self.mean(self.mul(centered, centered))
        return self.b.call(aten.rsqrt.default, self.b.call(aten.add.Tensor, variance, eps))

    def mul(self, x: fx.Node, y: fx.Node) -> fx.Node:
        return self.b.call(aten.mul.Tensor, x, y)

    def sub(self, x: fx.Node, y: fx.Node) -> fx.Node:
        return self.b.call(aten.sub.Tensor, x, y)

    def scaled(self, x: fx.Node, weight: fx.Node | None) -> fx.Node:
        return x if weight is None else self.mul(x, self.b.widen(weight))

    def over_rows(self, x: fx.Node) -> fx.Node:
        """Sum over all dims but the last."""
        lead = list(range(len(self.b.shape(x)) - 1))
        return self.b.call(aten.sum.dim_IntList, x, lead) if lead else x


def _outputs(b: Builder, local: LocalCall, *values: fx.Node | None) -> fx.Node:
    """The results in the dtypes of the op's own."""
    specs = local.call.outputs
    return b.pack(
        *(
            None if v is None else b.cast(v, spec.dtype)
            for v, spec in zip(values, specs, strict=True)
        )
    )


def _plain(b: Builder, local: LocalCall) -> fx.Node:
    return b.call(local.call.target, *local.args, **local.kwargs)


@lowering(aten.native_layer_norm.default)
def lower_layer_norm(b: Builder, local: LocalCall) -> fx.Node:
    if not local.axes_of("hidden"):
        return _plain(b, local)
    x, (size,), weight, bias, eps = local.args
    hidden = _Hidden(b, local, size)
    x = b.widen(x)
    mean = hidden.mean(x)
    centered = hidden.sub(x, mean)
    rstd = hidden.rstd(centered, eps)
    out = hidden.scaled(hidden.mul(centered, rstd), weight)
    if bias is not None:
        out = b.call(aten.add.Tensor, out, b.widen(bias))
    return _outputs(b, local, out, mean, rstd)


@lowering(aten.native_layer_norm_backward.default)
def lower_layer_norm_backward(b: Builder, local: LocalCall) -> fx.Node:
    if not local.axes_of("hidden"):
        return _plain(b, local)
    grad, x, (size,), mean, rstd, weight, _, mask = local.args
    hidden = _Hidden(b, local, size)
    grad, rstd = b.widen(grad), b.widen(rstd)
    normal = hidden.mul(hidden.sub(b.widen(x), b.widen(mean)), rstd)
    grad_x = None
    if mask[0]:
        g = hidden.scaled(grad, weight)
        sums = [hidden.sum(g), hidden.sum(hidden.mul(g, normal))]
        means = hidden.over_size(hidden.reduce(b.call(aten.cat.default, sums, -1)))
        mean_g = b.call(aten.slice.Tensor, means, -1, 0, 1)
        mean_gx = b.call(aten.slice.Tensor, means, -1, 1, 2)
        inner = hidden.sub(hidden.sub(g, mean_g), hidden.mul(normal, mean_gx))
        grad_x = hidden.mul(inner, rstd)
    grad_weight = hidden.over_rows(hidden.mul(grad, normal)) if mask[1] else None
    grad_bias = hidden.over_rows(grad) if mask[2] else None
    return _outputs(b, local, grad_x, grad_weight, grad_bias)


@lowering(aten._fused_rms_norm.default)
def lower_rms_norm(b: Builder, local: LocalCall) -> fx.Node:
    if not local.axes_of("hidden"):
        return _plain(b, local)
    x, (size,), weight, eps = local.args
    hidden = _Hidden(b, local, size)
    x = b.widen(x)
    if eps is None:
        eps = torch.finfo(b.value(x).dtype).eps
    rstd = hidden.rstd(x, eps)
    return _outputs(b, local, hidden.scaled(hidden.mul(x, rstd), weight), rstd)


@lowering(aten._fused_rms_norm_backward.default)
def lower_rms_norm_backward(b: Builder, local: LocalCall) -> fx.Node:
    if not local.axes_of("hidden"):
        return _plain(b, local)
    grad, x, (size,), rstd, weight, mask = local.args
    hidden = _Hidden(b, local, size)
    grad, rstd = b.widen(grad), b.widen(rstd)
    normal = hidden.mul(b.widen(x), rstd)
    grad_x = None
    if mask[0]:
        g = hidden.scaled(grad, weight)
        mean_gx = hidden.mean(hidden.mul(g, normal))
        grad_x = hidden.mul(hidden.sub(g, hidden.mul(normal, mean_gx)), rstd)
    grad_weight = hidden.over_rows(hidden.mul(grad, normal)) if mask[1] else None
    return _outputs(b, local, grad_x, grad_weight)


def _group_sizes(b: Builder, x: fx.Node, stats: Any) -> tuple[int, int, int]:
    """Samples, channels and groups that this rank holds."""
    batch, channels = b.shape(x)[:2]
    return batch, channels, int(stats[1])


@lowering(aten.native_group_norm.default)
def lower_group_norm(b: Builder, local: LocalCall) -> fx.Node:
    x, weight, bias, _, _, space, _, eps = local.args
    batch, channels, groups = _group_sizes(b, x, local.output_shape(1))
    return b.call(local.call.target, x, weight, bias, batch, channels, space, groups, eps)


@lowering(aten.native_group_norm_backward.default)
def lower_group_norm_backward(b: Builder, local: LocalCall) -> fx.Node:
    grad, x, mean, rstd, weight, _, _, space, _, mask = local.args
    batch, channels, groups = _group_sizes(b, x, b.shape(mean))
    return b.call(
        local.call.target, grad, x, mean, rstd, weight, batch, channels, space, groups, mask
    )
