"""Names and numbers of tensor dims, shared by the rules of shape, reduction and indexing ops."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from autopar.core.graph import tensor_meta
from autopar.core.strategy import OpCall, TensorSpec

__all__ = ["dim_names", "one_dim", "runs_of", "several_dims", "without"]

aten = torch.ops.aten

Names = list[str | None]


def dim_names(spec: TensorSpec, unsharded: Collection[int] = ()) -> Names:
    """`d0, d1, …`, and None for the dims that must stay whole."""
    return [None if i in unsharded else f"d{i}" for i in range(len(spec.shape))]


def one_dim(dim: int, rank: int) -> int:
    """The dim counted from the front; a scalar has dim 0 only."""
    return dim % rank if rank else 0


def several_dims(dims: Any, rank: int) -> tuple[int, ...]:
    """Dims counted from the front; None and an empty list mean all, as in ATen's reductions."""
    if dims is None:
        return tuple(range(rank))
    if isinstance(dims, int):
        return (one_dim(dims, rank),)
    return tuple(sorted(one_dim(d, rank) for d in dims)) or tuple(range(rank))


def without(names: Sequence[str | None], dims: Collection[int]) -> Names:
    """The names of the dims that are left after `dims` are dropped."""
    return [name for i, name in enumerate(names) if i not in dims]


def runs_below(call: OpCall) -> int:
    """`runs_of` what an op reads, where that is the view."""
    return runs_of(call.nodes[0]) if call.nodes[0].target is not aten.t.default else 1


def runs_of(node: fx.Node) -> int:
    """Sequence length of rows that a view, or its transpose, joins from (sequence, batch); else 1.

    A shard of the batch is then one of `Shard(dim, split=length)`.
    """
    if node.target is aten.t.default:
        (node,) = node.all_input_nodes
    if node.target not in (aten.view.default, aten._unsafe_view.default):
        return 1
    source, result = tensor_meta(node.all_input_nodes[0]), tensor_meta(node)
    if source is None or result is None or (source.dim(), result.dim()) != (3, 2):
        return 1
    length, batch, width = source.shape
    return int(length) if result.shape == (length * batch, width) else 1
