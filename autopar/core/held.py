"""What a pipeline stage holds in memory at the moments of its step, in bytes by kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Held"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Bytes that one stage holds.

    Attributes:
        batch: of `idle`, what all stages of a rank share: the batch of the step.
        idle: before the first microbatch and between them, without sums of gradients.
        waiting: of a microbatch between its forward and its backward.
        delayed: of one between its input gradients and its weight gradients.
        up, down: what one microbatch sends to the next stage and to the one before.
        sums: of gradients, those that the backward makes, and those of later weight gradients.
        tops: the highest moment with no other microbatch in flight, by the sums that are there when
            the microbatch begins (`core/flights.py`) and by the part that runs: -1 what is hoisted,
            0 the forward, 1 the backward, 2 later weight gradients, 3 the reduction of the sums.
        after: when the sums are reduced.
    """

    batch: int
    idle: Mapping[str, int]
    waiting: Mapping[str, int]
    delayed: Mapping[str, int]
    up: int
    down: int
    sums: tuple[int, int]
    tops: Mapping[tuple[int, int], Mapping[str, int]]
    after: Mapping[str, int]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "batch": self.batch,
            "idle": dict(self.idle),
            "waiting": dict(self.waiting),
            "delayed": dict(self.delayed),
            "up": self.up,
            "down": self.down,
            "sums": list(self.sums),
            "tops": [[sums, part, dict(kinds)] for (sums, part), kinds in self.tops.items()],
            "after": dict(self.after),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Held:
        """Inverse of `to_dict`."""
        tops = {(sums, part): dict(kinds) for sums, part, kinds in data["tops"]}
        first, second = data["sums"]
        return cls(**{**data, "tops": tops, "sums": (first, second)})
