"""Registry of lowerings: how an op runs on local tensors under a chosen strategy.

`@lowering(op, …)` on a function `(Builder, LocalCall) -> fx.Node`. An op without one is called
with its local tensors and its other arguments as they are, which is right for every op whose
arguments hold no size of a sharded dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar.codegen.builder import Builder
from autopar.core import extensions
from autopar.core.placement import Layout, local_shape
from autopar.core.strategy import OpCall

__all__ = ["DENSE", "LocalCall", "lower", "lowering"]

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class LocalCall:
    """One op to run locally.

    Attributes:
        call: the global op (global shapes, original arguments).
        args, kwargs: the arguments with tensors replaced by local nodes.
        inputs: layout of each tensor operand, over all mesh axes.
        outputs: layout of each output.
        variants: the strategy's variant on each mesh axis.
        mesh_shape: sizes of the mesh axes.
    """

    call: OpCall
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    variants: tuple[str, ...]
    mesh_shape: tuple[int, ...]

    def output_shape(self, index: int = 0) -> list[int]:
        """Local shape of an output."""
        spec = self.call.outputs[index]
        return list(local_shape(spec.shape, self.outputs[index], self.mesh_shape))

    def axes_of(self, variant: str) -> list[int]:
        """Mesh axes on which this variant was chosen."""
        return [axis for axis, name in enumerate(self.variants) if name == variant]

    def offset(self, b: Builder, layout: Layout, shape: tuple[int, ...]) -> list[int]:
        """Global index at which this rank's block of a tensor begins, per dim."""
        starts, sizes = [0] * len(shape), list(shape)
        for axis, placement in enumerate(layout):
            if placement.is_shard:
                sizes[placement.dim] //= self.mesh_shape[axis]
                starts[placement.dim] += b.coords[axis] * sizes[placement.dim]
        return starts


Lowering = Callable[[Builder, LocalCall], fx.Node]
_LOWERINGS: dict[Any, Lowering] = {}


def lowering(*targets: Any) -> Callable[[Lowering], Lowering]:
    """Register a lowering for op overloads, or names; a second one for an op is a ValueError."""

    def register(function: Lowering) -> Lowering:
        for target in targets:
            known = extensions.taken(_LOWERINGS, target)
            if known is not None and not extensions.is_same(known, function):
                raise ValueError(f"{target} already has the lowering {known.__name__}")
            _LOWERINGS[target] = function
        extensions.note("lowering", map(str, targets), function)
        return function

    return register


def _find_lowering(target: Any) -> Lowering | None:
    """The lowering of an op, or None where the plain call is right."""
    extensions.load("autopar.lowerings")
    return _LOWERINGS.get(target) or _LOWERINGS.get(str(target))


# kernels that read operands as if they were dense, without a check or with one that fails; a
# local tensor may be a slice or a turned product, where the traced one was dense
DENSE = frozenset(
    {
        aten.native_layer_norm_backward.default,
        aten.native_group_norm.default,
        aten.native_group_norm_backward.default,
        aten.adaptive_max_pool3d_backward.default,
        aten._pdist_forward.default,
        aten._pdist_backward.default,
        aten._embedding_bag.default,
        aten._embedding_bag_forward_only.default,
        aten._embedding_bag_dense_backward.default,
        aten._embedding_bag_per_sample_weights_backward.default,
        aten.view_as_complex.default,
    }
)


# kernels that clone the whole storage of which their first operand shows a part
_SCATTERS = frozenset(
    {
        aten.slice_scatter.default,
        aten.select_scatter.default,
        aten.diagonal_scatter.default,
        aten.as_strided_scatter.default,
    }
)


def lower(b: Builder, local: LocalCall) -> fx.Node:
    """Append the local form of an op; multi-output ops yield a node with a tuple value."""
    if local.call.target in _SCATTERS:
        return _lowered(b, replace(local, args=(b.alone(local.args[0]), *local.args[1:])))
    if local.call.target not in DENSE:
        return _lowered(b, local)
    args, kwargs = fx.map_arg((local.args, local.kwargs), b.dense)
    result = _lowered(b, replace(local, args=tuple(args), kwargs=dict(kwargs)))
    b.note_dense(result)
    return result


def _lowered(b: Builder, local: LocalCall) -> fx.Node:
    function = _find_lowering(local.call.target)
    if function is not None:
        return function(b, local)
    kwargs = dict(local.kwargs)
    if kwargs.get("device") is not None:
        kwargs["device"] = b.device
    return b.call(local.call.target, *local.args, **kwargs)
