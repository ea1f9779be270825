"""Counts the steps of all ranks that communicate, to see whether another rank has run the same.

Ranks that run different ones may not notice: where shapes agree, gradients of different batches are
added up. Each rank tells the others its counts now and then (`lost.py`), and compares them with
what its own were at that step.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import torch.distributed as dist

__all__ = [
    "Counts",
    "begin_backward",
    "begin_step",
    "compare",
    "is_shared",
    "now",
    "unlike",
]

_KEPT = 1 << 12  # steps whose counts are known

unlike: list[str] = []
"""What another rank was seen to do."""


class Counts(NamedTuple):
    """How many steps and backwards this process has begun.

    The checksum is of the plans of these steps.
    """

    begun: int = 0
    checksum: int = 0
    backwards: int = 0


_now = [Counts()]
_trail = [Counts()] * _KEPT  # as the latest steps were begun, by their number modulo _KEPT


def is_shared(devices: int) -> bool:
    """True if a step on so many devices is one of all ranks; else others have modules of theirs."""
    return dist.is_initialized() and devices == dist.get_world_size()


def now() -> Counts:
    """The counts of this process."""
    return _now[0]


def begin_step(fingerprint: str) -> None:
    """Count a step, by the fingerprint of its plan."""
    before = _now[0]
    checksum = zlib.crc32(fingerprint.encode(), before.checksum)
    begun = before._replace(begun=before.begun + 1, checksum=checksum)
    _trail[begun.begun % _KEPT] = _now[0] = begun


def begin_backward() -> None:
    """Count a backward."""
    _now[0] = _now[0]._replace(backwards=_now[0].backwards + 1)


def compare(rank: int, other: int, theirs: Counts) -> None:
    """Note in `unlike` if another rank has come to where it is by other steps than this one.

    Args:
        rank: of this process.
        other: rank.
        theirs: its counts.
    """
    mine, behind = (_trail[(theirs.begun + i) % _KEPT] for i in range(2))
    if unlike or mine.begun != theirs.begun:
        return
    if theirs.backwards < mine.backwards:
        unlike.append(_left_out(other, rank, theirs.begun))
    elif behind.begun == theirs.begun + 1 and behind.backwards < theirs.backwards:
        unlike.append(_left_out(rank, other, behind.begun))
    elif mine.checksum != theirs.checksum:
        unlike.append(
            f"ranks {rank} and {other} have called their model with batches of different shapes "
            f"(or in another mode) in one of their first {theirs.begun} steps, whose gradients "
            "were added up as if they were of one batch. Pass every rank the same global batch; "
            "model.shard_dataloader(loader) loads each rank's rows of one"
        )


def _left_out(rank: int, other: int, step: int) -> str:
    return (
        f"rank {rank} has begun step {step} without a backward of the steps before it that rank "
        f"{other} has run, as if it had caught an error of its own: gradients of different steps "
        "may have been added up. Start all ranks again, and load the last checkpoint"
    )
