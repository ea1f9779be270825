"""Names and numbers of tensor dims, shared by the rules of shape, reduction and indexing ops."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from autopar.core.strategy import TensorSpec

__all__ = ["dim_names", "one_dim", "several_dims", "without"]

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
