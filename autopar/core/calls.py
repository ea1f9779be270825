"""What a plan says of its collectives as a program calls them: their bytes, buckets and pieces."""

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
    """How a collective runs beside the product that it belongs to: in pieces, or in one call.

    Attributes:
        node: that the collective is emitted for.
        axis, kind: of the collective.
        count: of pieces; 1 where it stays whole without that call.
        call: True where one call with the product is predicted to be faster; it is made by the pass
            `symmetric_memory`, where that runs.
    """

    node: str
    axis: int
    kind: str
    count: int
    call: bool = False
