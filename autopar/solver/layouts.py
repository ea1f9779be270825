"""Layouts that a parameter may be stored in beside those that ops ask for."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.core.placement import Layout, Shard

__all__ = ["split_inside"]


def split_inside(layout: Layout, mesh: Sequence[int]) -> list[Layout]:
    """`layout` with a free earlier axis splitting a dim inside the later axes' blocks."""
    out = []
    for axis, placement in enumerate(layout):
        if not placement.is_replicate or mesh[axis] == 1:
            continue
        for dim in {p.dim for p in layout[axis + 1 :] if p.is_shard and p.split == 1}:
            if any(p.is_shard and p.dim == dim for p in layout[:axis]):
                continue
            later = 1
            for other in range(axis + 1, len(layout)):
                if layout[other].is_shard and layout[other].dim == dim:
                    later *= mesh[other]
            out.append((*layout[:axis], Shard(dim, later), *layout[axis + 1 :]))
    return out
