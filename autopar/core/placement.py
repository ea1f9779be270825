"""Placements of a tensor on a device mesh, one per mesh axis, and the local shapes they imply.

The vocabulary is DTensor's: on each mesh axis a tensor is ``Shard(dim)``, ``Replicate()`` or
``Partial()`` (pending sum). ``Shard(dim, split=k)`` with ``k > 1`` is DTensor's ``_StridedShard``:
the dim is viewed as ``(k, size / k)`` and the second factor is sharded, so a rank holds ``k``
separate runs. It arises in two places: a fused weight such as QKV, sharded inside each of its
parts, and a parameter sharded by ZeRO *inside* the block that tensor parallelism gives a rank.

Where several axes shard one dim, the earlier mesh axis is the major one (DTensor's order).
Only even shards exist: a size that does not divide is never offered (`is_valid`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from autopar.errors import ShardingError

__all__ = [
    "Layout",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "format_layout",
    "is_valid",
    "local_index_runs",
    "local_shape",
    "parse_placement",
    "shard_factor",
]


class Placement(NamedTuple):
    """How one mesh axis holds a tensor. Build with `Shard`, `Replicate` or `Partial`.

    `own` marks a shard whose rows stand in an order of the rank's own, or which tells positions in
    one (`solver/rules/own_order.py`): nothing can move it.
    """

    kind: str
    dim: int = -1
    split: int = 1
    own: bool = False

    @property
    def is_shard(self) -> bool:
        return self.kind == "S"

    @property
    def is_replicate(self) -> bool:
        return self.kind == "R"

    @property
    def is_partial(self) -> bool:
        return self.kind == "P"

    def __str__(self) -> str:
        if self.kind == "R":
            return "Replicate()"
        if self.kind == "P":
            return "Partial()"
        if self.own:
            return f"Shard({self.dim}, own order)"
        return f"Shard({self.dim})" if self.split == 1 else f"Shard({self.dim}, split={self.split})"

    @property
    def short(self) -> str:
        """`R`, `P`, `S0`, `S1/3`, `S0~` (own order): the form used in tables."""
        if self.kind != "S":
            return self.kind
        if self.own:
            return f"S{self.dim}~"
        return f"S{self.dim}" if self.split == 1 else f"S{self.dim}/{self.split}"


Layout = tuple[Placement, ...]
"""One placement per mesh axis."""

_REPLICATE = Placement("R")
_PARTIAL = Placement("P")


def Shard(dim: int, split: int = 1) -> Placement:  # noqa: N802 (DTensor's name)
    """Sharded evenly along tensor dim `dim`; `split` > 1 shards inside each of `split` runs."""
    return Placement("S", dim, split)


def Replicate() -> Placement:  # noqa: N802 (DTensor's name)
    """Held whole by every rank of the axis."""
    return _REPLICATE


def Partial() -> Placement:  # noqa: N802 (DTensor's name)
    """Every rank of the axis holds a summand."""
    return _PARTIAL


_SHARD_RE = re.compile(
    r"(?:Shard\(\s*(?:dim=)?(-?\d+)\s*(?:,\s*split=(\d+)\s*)?\)|S(\d+)(?:/(\d+)|(~))?)$"
)


def parse_placement(text: str) -> Placement:
    """Parse `"Shard(0)"`, `"Replicate()"`, `"Partial()"` or the short forms `S0`, `R`, `P`.

    Raises:
        ShardingError: the text is none of these.
    """
    stripped = text.strip()
    if stripped in ("R", "Replicate()", "Replicate"):
        return _REPLICATE
    if stripped in ("P", "Partial()", "Partial"):
        return _PARTIAL
    match = _SHARD_RE.match(stripped)
    if match is None:
        raise ShardingError(
            f"{text!r} is not a placement. Write Shard(dim), Replicate() or Partial()."
        )
    dim = match.group(1) or match.group(3)
    split = match.group(2) or match.group(4) or "1"
    return Placement("S", int(dim), int(split), own=match.group(5) is not None)


def format_layout(layout: Layout) -> str:
    """`(S0, R)`: the short form of a layout."""
    return "(" + ", ".join(p.short for p in layout) + ")"


def shard_factor(layout: Layout, mesh_shape: Sequence[int]) -> int:
    """By how much a rank's share is smaller than the whole tensor."""
    factor = 1
    for placement, size in zip(layout, mesh_shape, strict=True):
        if placement.kind == "S":
            factor *= size
    return factor


@lru_cache(maxsize=1 << 18)
def is_valid(layout: Layout, shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> bool:
    """True if every shard is even and the axes that share a dim compose to a known order.

    Two axes may share a dim as plain shards (major axis first), or as one strided shard with
    `split` equal to the product of the later axes on that dim, which is ZeRO inside tensor
    parallelism. A strided shard alone on its dim may have any split that divides.
    """
    used: dict[int, list[tuple[int, Placement]]] = {}
    for axis, placement in enumerate(layout):
        if placement.kind == "S":
            if not 0 <= placement.dim < len(shape):
                return False
            used.setdefault(placement.dim, []).append((axis, placement))
    for dim, holders in used.items():
        factor = 1
        for axis, _ in holders:
            factor *= mesh_shape[axis]
        size = shape[dim]
        if size == 0 or size % factor:
            return False
        strided = [(axis, p) for axis, p in holders if p.split > 1]
        if not strided:
            continue
        if len(holders) == 1:
            if size % (strided[0][1].split * mesh_shape[strided[0][0]]):
                return False
            continue
        axis, placement = strided[0]
        later = 1
        for other, _ in holders:
            if other > axis:
                later *= mesh_shape[other]
        if len(strided) > 1 or holders[0][0] != axis or placement.split != later:
            return False
    return True


def local_shape(shape: Sequence[int], layout: Layout, mesh_shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of one rank's share.

    Raises:
        ShardingError: a dim does not divide by the axes that shard it.
    """
    out = list(shape)
    for placement, size in zip(layout, mesh_shape, strict=True):
        if placement.kind == "S":
            if out[placement.dim] % size:
                raise ShardingError(
                    f"dim {placement.dim} of shape {tuple(shape)} does not divide over mesh "
                    f"{tuple(mesh_shape)} as {format_layout(layout)}"
                )
            out[placement.dim] //= size
    return tuple(out)


def local_index_runs(
    size: int, dim: int, layout: Layout, mesh_shape: Sequence[int], coords: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """The `(start, length)` runs of global indices along `dim` that the rank at `coords` holds.

    One run for plain shards, `split` runs for a strided one.
    """
    start, length = 0, size
    strided: tuple[int, int, int] | None = None
    for placement, axis_size, coord in zip(layout, mesh_shape, coords, strict=True):
        if placement.kind != "S" or placement.dim != dim:
            continue
        if placement.split > 1:
            strided = (axis_size, coord, placement.split)
            continue
        length //= axis_size
        start += coord * length
    if strided is None:
        yield start, length
        return
    axis_size, coord, split = strided
    if length != size:  # ZeRO inside tensor parallelism: the strided axis is the minor one
        length //= axis_size
        yield start + coord * length, length
        return
    run = size // split
    for part in range(split):
        yield part * run + coord * (run // axis_size), run // axis_size
