"""Emits the moves of a redistribution (`core.redistribute.path`)."""

from __future__ import annotations

from torch import fx

from autopar.codegen.builder import Builder
from autopar.core.placement import Layout, Shard, format_layout
from autopar.core.redistribute import Move, path
from autopar.errors import ShardingError

__all__ = ["emit_redistribution"]


def _split(layout: Layout, axis: int) -> int:
    """Runs per rank of the placement on `axis`, seen from the block that the other axes leave.

    A strided shard of a dim that another axis shards too is ZeRO inside tensor parallelism: one
    run of the block.
    """
    held = layout[axis]
    shared = any(
        other != axis and p.is_shard and p.dim == held.dim for other, p in enumerate(layout)
    )
    return 1 if shared else held.split


def _emit_move(b: Builder, x: fx.Node, move: Move, before: Layout, after: Layout) -> fx.Node:
    if move.kind == "slice":
        return b.shard(x, move.axis, move.dst.dim, _split(after, move.axis))
    if move.kind == "all_gather":
        return b.all_gather(x, move.axis, move.src.dim, _split(before, move.axis))
    if move.kind == "all_reduce":
        return b.all_reduce(x, move.axis)
    if move.kind == "reduce_scatter":
        return b.reduce_scatter(x, move.axis, move.dst.dim, _split(after, move.axis))
    src = Shard(move.src.dim, _split(before, move.axis))
    dst = Shard(move.dst.dim, _split(after, move.axis))
    return b.all_to_all(x, move.axis, src, dst)


def emit_redistribution(b: Builder, x: fx.Node, src: Layout, dst: Layout) -> fx.Node:
    """Append the moves that take `x` from `src` to `dst`; returns the node in layout `dst`."""
    moves = path(src, dst, b.mesh_shape)
    if moves is None:
        raise ShardingError(f"no way from {format_layout(src)} to {format_layout(dst)}")
    layout = src
    with b.packing():
        for move in moves:
            after = (*layout[: move.axis], move.dst, *layout[move.axis + 1 :])
            x = _emit_move(b, x, move, layout, after)
            layout = after
    return x
