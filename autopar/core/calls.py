"""What a plan says of its collectives as the program issues them: bytes, buckets and pieces."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BucketBytes", "CommBytes", "Pieces"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommBytes:
    """Bytes of one collective kind on one mesh axis in one step, on one device.

    `num_bytes` adds up full buffers: the gathered output, the unreduced input, or the local input
    of an all-to-all or a ring step.
    """

    axis: int
    kind: str
    num_bytes: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketBytes:
    """Bytes at which a bucket of small collectives of one kind on one mesh axis is closed."""

    axis: int
    kind: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """How a collective runs next to its matmul: in pieces, or in one call with it.

    Attributes:
        node: op that the collective is emitted for.
        axis, kind: of the collective.
        count: number of pieces; 1 where it stays whole unless it becomes one call.
        call: True where one call with the matmul is predicted to be faster; the pass
            `symmetric_memory` makes it, where that runs.
    """

    node: str
    axis: int
    kind: str
    count: int
    call: bool = False
