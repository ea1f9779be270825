"""Says where each rank is, when one of them has been in communication for long.

A rank that leaves out a call which all have to make, as of `model.clip_grad_norm_` below
`if rank == 0`, or that leaves the loop early, keeps the others waiting until the process group
gives up, with an error that says nothing of it. That the others are only slow cannot be ruled out,
so they are told and not ended.
"""

from __future__ import annotations

import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

__all__ = ["Stall", "communicating", "waiting"]

_STALL_S = 60.0
_NAMED = 8  # ranks that are listed for one place

_inside: list[tuple[str, float]] = []  # what the main thread communicates for, and since when


@contextmanager
def communicating(doing: str) -> Iterator[None]:
    """Around calls that may wait for other ranks; `doing` is part of a sentence."""
    _inside.append((doing, time.monotonic()))
    try:
        yield
    finally:
        _inside.pop()


def waiting() -> str | None:
    """What this process communicates for, if it has for long."""
    inside = tuple(_inside)
    if not inside or time.monotonic() - inside[0][1] < _STALL_S:
        return None
    return inside[-1][0]


class Stall:
    """What is said of one wait, once in the life of a process group."""

    def __init__(self) -> None:
        self.seen = False
        self.told = False

    def is_due(self) -> bool:
        """True at the second call alone, by when all ranks that wait have said where."""
        due = self.seen and not self.told
        self.seen = True
        return due

    def tell(self, rank: int, doing: str, places: Mapping[int, str]) -> None:
        """Print where the ranks are.

        Args:
            rank: of this process, which waits.
            doing: what it communicates for.
            places: of the other ranks.
        """
        self.told = True
        found: dict[str, list[int]] = defaultdict(list)
        for other, place in sorted(places.items()):
            found[place].append(other)
        others = "; ".join(
            f"{_named(ranks)} {place if len(ranks) == 1 else _of_several(place)}"
            for place, ranks in found.items()
        )
        print(
            f"autopar: rank {rank} has been {_STALL_S:g} s {doing}. {others}. If a rank has left "
            "out a call that all have to make, or has left the loop, the others wait for it until "
            "the process group times out.",
            file=sys.stderr,
            flush=True,
        )


def _of_several(place: str) -> str:
    """Where a rank is, said of several."""
    return re.sub(r"\b(has|is)\b", lambda verb: {"has": "have", "is": "are"}[verb[0]], place)


def _named(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_NAMED])) + (", …" if len(ranks) > _NAMED else "")
    return f"Rank{'s' if len(ranks) > 1 else ''} {shown}"
