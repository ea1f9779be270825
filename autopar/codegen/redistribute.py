"""Emits the moves of a redistribution (`core.redistribute.path`)."""

from __future__ import annotations

from torch import fx

from autopar.codegen.builder import Builder
from autopar.core.placement import Layout, Shard, format_layout
from autopar.core.redistribute import Move, path, runs_on
from autopar.errors import ShardingError

__all__ = ["emit_redistribution"]


def _emit_move(b: Builder, x: fx.Node, move: Move, before: Layout, after: Layout) -> fx.Node:
    if move.kind == "slice":
        return b.shard(x, move.axis, move.dst.dim, runs_on(after, move.axis))
    if move.kind == "all_gather":
        return b.all_gather(x, move.axis, move.src.dim, runs_on(before, move.axis))
    if move.kind == "all_reduce":
        return b.all_reduce(x, move.axis)
    if move.kind == "reduce_scatter":
        return b.reduce_scatter(x, move.axis, move.dst.dim, runs_on(after, move.axis))
    src = Shard(move.src.dim, runs_on(before, move.axis))
    dst = Shard(move.dst.dim, runs_on(after, move.axis))
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
