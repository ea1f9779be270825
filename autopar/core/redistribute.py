"""How a tensor gets from one layout to another: the cheapest chain of one-axis moves.

Each move changes the placement on one mesh axis: slice (R→S), all-gather (S→R), all-reduce (P→R),
reduce-scatter (P→S) or all-to-all (S→S). The chain is the shortest path by bytes received per
device, so it depends on the layouts and the mesh shape only: the solver prices the very chain
that codegen emits, on any machine.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from autopar.core.placement import Layout, Placement, Replicate

__all__ = [
    "Move",
    "canonical",
    "canonical_path",
    "copied_fractions",
    "packing_fraction",
    "path",
    "runs_on",
]

_STEP_COST = 1e-3  # of the whole tensor's bytes, so that fewer collectives win a tie
_SLICE_COST = 1e-6
_WHOLE = Replicate()


class Move(NamedTuple):
    """One step: on `axis`, from placement `src` to `dst`.

    `fraction` is the size of the full buffer of the collective (gathered, or unreduced, or the
    local input of an all-to-all) as a fraction of the whole tensor.
    """

    axis: int
    src: Placement
    dst: Placement
    fraction: float

    @property
    def kind(self) -> str:
        return _move_kind(self.src, self.dst)


def packing_fraction(moves: Iterable[Move]) -> float:
    """Largest buffer that a move copies into rank order, as a fraction of the whole tensor.

    Collectives stack the ranks' parts: only a plain shard of dim 0 is in that order already.
    """
    return max((m.fraction for m in moves if _is_packed(m)), default=0.0)


def runs_on(layout: Layout, axis: int) -> int:
    """Runs per rank of the placement on `axis`, seen from the block that the other axes leave.

    A strided shard of a dim that another axis shards too is ZeRO inside tensor parallelism: one
    run of the block.
    """
    held = layout[axis]
    shared = any(
        other != axis and p.is_shard and p.dim == held.dim for other, p in enumerate(layout)
    )
    return 1 if shared else held.split


class _Lying:
    """A rank's part of a tensor in memory while it is moved, and what has been copied of it."""

    def __init__(self, sizes: list[float]) -> None:
        self.sizes = sizes
        self.dense = True
        self.outermost = 0  # of a part that is not dense, the dim that is, or -1
        self.copied: list[float] = []

    def copy(self) -> None:
        self.copied.append(math.prod(self.sizes))
        self.dense = True

    def is_first(self, dim: int) -> bool:
        """True if no elements of other dims are between two of `dim` and those behind it."""
        return math.prod(self.sizes[:dim]) == 1

    def slice(self, dim: int, runs: int, ranks: int) -> None:
        self.sizes[dim] /= ranks
        if runs == 1:
            self.dense, self.outermost = self.dense and self.is_first(dim), -1
        elif self.sizes[dim] > runs:
            self.copy()
        else:  # single elements are a view with a stride
            self.dense, self.outermost = False, -1

    def send(self) -> None:
        """Collectives take what is dense."""
        if not self.dense:
            self.copy()

    def hand_out(self, dim: int, runs: int, ranks: int) -> None:
        """Parts of each rank in the order of ranks; one of them is left."""
        single = self.outermost == dim and self.sizes[dim] == ranks
        if runs > 1 or not (self.is_first(dim) if self.dense else single):
            self.copy()
        self.sizes[dim] /= ranks
        self.dense = True

    def join(self, dim: int, runs: int, ranks: int) -> None:
        """Parts that arrive in the order of ranks, put where they belong."""
        single = self.sizes[dim] == runs
        self.sizes[dim] *= ranks
        if runs > 1 or not (single or self.is_first(dim)):
            self.copy()
        else:
            self.dense, self.outermost = self.is_first(dim), dim


def copied_fractions(
    src: Layout, dst: Layout, shape: Sequence[float], mesh_shape: tuple[int, ...]
) -> tuple[float, ...]:
    """What a rank copies on the way to another layout, each copy as a fraction of the whole tensor.

    Collectives stack the ranks' parts: those of a dim with others in front of it are copied into
    that order, and out of it. A slice of such a dim is copied before it is sent.

    Args:
        src, dst: layouts; nothing is copied where there is no way.
        shape: global; the tensor lies in memory as its dims stand.
        mesh_shape: sizes of the mesh axes.
    """
    whole = math.prod(shape)
    if not whole:
        return ()
    part = _Lying([float(n) for n in shape])
    for placement, size in zip(src, mesh_shape, strict=True):
        if placement.is_shard:
            part.sizes[placement.dim] /= size
    layout = src
    for move in path(src, dst, mesh_shape) or ():
        before, ranks = layout, mesh_shape[move.axis]
        layout = (*layout[: move.axis], move.dst, *layout[move.axis + 1 :])
        if ranks == 1:
            continue
        leaving = move.src.dim, runs_on(before, move.axis), ranks
        entering = move.dst.dim, runs_on(layout, move.axis), ranks
        if move.kind == "slice":
            part.slice(*entering)
        elif move.kind in ("reduce_scatter", "all_to_all"):
            part.hand_out(*entering)
        else:
            part.send()
        if move.kind in ("all_gather", "all_to_all"):
            part.join(*leaving)
        elif move.kind != "slice":
            part.dense = True
    return tuple(num / whole for num in part.copied)


def _is_packed(move: Move) -> bool:
    kind = move.kind
    if kind == "all_to_all":
        return True
    placement = {"all_gather": move.src, "reduce_scatter": move.dst}.get(kind)
    return placement is not None and (placement.dim != 0 or placement.split > 1)


def _move_kind(src: Placement, dst: Placement) -> str:
    """Name of the collective of a move, `"slice"` where nothing is sent."""
    if src.kind == "R":
        return "slice"
    if src.kind == "P":
        return "all_reduce" if dst.kind == "R" else "reduce_scatter"
    return "all_gather" if dst.kind == "R" else "all_to_all"


def _is_minor(layout: Layout, axis: int, placement: Placement, mesh_shape: tuple[int, ...]) -> bool:
    """True if `placement` on `axis` is the innermost split of its dim in `layout`."""
    later = 1
    for other in range(len(layout)):
        held = layout[other]
        if other == axis or held.kind != "S" or held.dim != placement.dim:
            continue
        if held.split > 1:
            return False  # the other one is a strided, hence inner, split
        if other > axis:
            later *= mesh_shape[other]
    if placement.split == 1:
        return later == 1
    alone = not any(
        o != axis and p.kind == "S" and p.dim == placement.dim for o, p in enumerate(layout)
    )
    return alone or placement.split == later


def _volume(move: str, local: float, size: int) -> float:
    """Bytes received per device, for a rank that holds `local` before the move."""
    if move == "all_gather":
        return (size - 1) * local
    if move == "all_reduce":
        return 2 * (size - 1) / size * local
    return (size - 1) / size * local


def _local(layout: Layout, mesh_shape: tuple[int, ...]) -> float:
    out = 1.0
    for placement, size in zip(layout, mesh_shape, strict=True):
        if placement.kind == "S":
            out /= size
    return out


def _axes(layout: Layout, dim: int) -> int:
    """The axes that split a dim, as a bit mask."""
    found = 0
    for axis, p in enumerate(layout):
        if p.kind == "S" and p.dim == dim:
            found |= 1 << axis
    return found


def canonical(src: Layout, dst: Layout) -> tuple[Layout, Layout, tuple[int, ...]]:
    """The pair with its dims renumbered by first appearance, and the old number of each.

    A chain of moves depends on which dims are equal, not on their numbers, so that pairs such as
    (S0, R) → (S1, R) and (S2, R) → (S0, R) share one search.
    """
    numbers: dict[int, int] = {}

    def renumber(layout: Layout) -> Layout:
        return tuple(
            p if p.kind != "S" else p._replace(dim=numbers.setdefault(p.dim, len(numbers)))
            for p in layout
        )

    return renumber(src), renumber(dst), tuple(numbers)


@lru_cache(maxsize=1 << 18)
def path(src: Layout, dst: Layout, mesh_shape: tuple[int, ...]) -> tuple[Move, ...] | None:
    """Cheapest moves from `src` to `dst`; None if there is no way (nothing becomes Partial)."""
    plain_src, plain_dst, old = canonical(src, dst)
    moves = canonical_path(plain_src, plain_dst, mesh_shape)
    if moves is None:
        return None

    def restore(p: Placement) -> Placement:
        return p if p.kind != "S" else p._replace(dim=old[p.dim])

    return tuple(Move(m.axis, restore(m.src), restore(m.dst), m.fraction) for m in moves)


def canonical_path(
    src: Layout, dst: Layout, mesh_shape: tuple[int, ...]
) -> tuple[Move, ...] | None:
    """`path` of a pair whose dims are numbered by first appearance: shortest path (Dijkstra)."""
    if src == dst:
        return ()
    if any(d.kind == "P" and s.kind != "P" for s, d in zip(src, dst, strict=True)):
        return None
    ends = {p.dim: (_axes(src, p.dim), _axes(dst, p.dim)) for p in (*src, *dst) if p.kind == "S"}
    best: dict[Layout, float] = {src: 0.0}
    queue: list[tuple[float, int, Layout, tuple[Move, ...]]] = [(0.0, 0, src, ())]
    count = 0
    while queue:
        cost, _, layout, moves = heapq.heappop(queue)
        if layout == dst:
            return moves
        if cost > best[layout]:
            continue
        local = _local(layout, mesh_shape)
        for axis, wanted, after in _steps(layout, dst, ends, mesh_shape):
            kind = _move_kind(layout[axis], wanted)
            size = mesh_shape[axis]
            step = (
                _SLICE_COST
                if kind == "slice" or size == 1
                else _STEP_COST + _volume(kind, local, size)
            )
            total = cost + step
            if total < best.get(after, float("inf")) - 1e-15:
                best[after] = total
                count += 1
                fraction = local * size if kind == "all_gather" else local
                move = Move(axis, layout[axis], wanted, fraction)
                heapq.heappush(queue, (total, count, after, (*moves, move)))
    return None


def _steps(
    layout: Layout,
    dst: Layout,
    ends: Mapping[int, tuple[int, int]],
    mesh_shape: tuple[int, ...],
) -> Iterator[tuple[int, Placement, Layout]]:
    """Moves of one axis on the way to `dst`: the axis, its new placement and the layout then.

    `ends` are the axes that split each dim at either end: a passing layout splits it no further.
    """
    for axis, held in enumerate(layout):
        if held.own or (held.kind == "S" and not _is_minor(layout, axis, held, mesh_shape)):
            continue
        for wanted in (dst[axis], _WHOLE):
            if wanted == held or wanted.kind == "P" or wanted.own:
                continue
            after = (*layout[:axis], wanted, *layout[axis + 1 :])
            if wanted.kind == "S":
                if held.kind == "S" and held.dim == wanted.dim:
                    continue  # other runs of the same dim: no all-to-all of blocks says that
                axes = _axes(after, wanted.dim)
                if axes & ~ends[wanted.dim][0] and axes & ~ends[wanted.dim][1]:
                    continue  # a move to R splits less than before
                if not _is_minor(after, axis, wanted, mesh_shape):
                    continue
            yield axis, wanted, after
            if wanted.kind == "R":
                break
