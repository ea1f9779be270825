"""One rank's share of a tensor, and the whole from all shares."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.core.placement import Layout, local_index_runs
from autopar.runtime.lockstep import mesh_coords

__all__ = ["assemble", "shard_index", "take_shard"]


def shard_index(
    shape: Sequence[int], layout: Layout, mesh_shape: Sequence[int], coords: Sequence[int]
) -> dict[int, Tensor]:
    """Global indices that a rank holds, for each sharded dim."""
    dims = {p.dim for p in layout if p.is_shard}
    return {
        dim: torch.cat(
            [
                torch.arange(start, start + length)
                for start, length in local_index_runs(shape[dim], dim, layout, mesh_shape, coords)
            ]
        )
        for dim in sorted(dims)
    }


def take_shard(
    full: Tensor, layout: Layout, mesh_shape: Sequence[int], coords: Sequence[int]
) -> Tensor:
    """The part of `full` that the rank at `coords` holds, as a tensor of its own."""
    part = full
    for dim, index in shard_index(full.shape, layout, mesh_shape, coords).items():
        part = part.index_select(dim, index.to(full.device))
    return part.clone() if part is full else part


def assemble(parts: Sequence[Tensor], layout: Layout, mesh_shape: Sequence[int]) -> Tensor:
    """The whole tensor from every rank's part; partial ones are summed."""
    first = parts[0]
    shape = list(first.shape)
    for placement, size in zip(layout, mesh_shape, strict=True):
        if placement.is_shard:
            shape[placement.dim] *= size
    full = torch.zeros(shape, dtype=first.dtype, device=first.device)
    for part, coords in zip(parts, mesh_coords(mesh_shape), strict=True):
        if any(p.is_replicate and c for p, c in zip(layout, coords, strict=True)):
            continue  # a copy of what coordinate 0 holds
        index = shard_index(shape, layout, mesh_shape, coords)
        where = tuple(
            index.get(dim, torch.arange(size)).reshape(
                [-1 if d == dim else 1 for d in range(len(shape))]
            )
            for dim, size in enumerate(shape)
        )
        if where:
            full[where] = full[where] + part
        else:
            full = full + part
    return full
