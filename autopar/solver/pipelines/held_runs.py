"""What runs of blocks take at least on ranks that memory binds, each run alone or several together.

A bound with bytes at a price takes off what the whole limit costs (`held_floors`). Of two runs on a
rank it is taken off once, so that their bound is more than the sum of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from autopar.solver.discrete.problem import Array
from autopar.solver.pipelines.cuts import runs_of

__all__ = ["HeldRuns", "Priced"]


class Priced(NamedTuple):
    """Bounds at a price of a byte.

    Attributes:
        places: seconds of each block with its bytes, (n,), with the optimizer in each place; None
            where they are not known at this price.
        limit_s: what the bytes of the limit cost.
    """

    places: tuple[Array | None, ...]
    limit_s: float

    def alone(self) -> list[Array]:
        """Seconds of a rank with one run, by place."""
        found = [None if x is None else runs_of(x) - self.limit_s for x in self.places]
        nothing = np.full_like(next(x for x in found if x is not None), -np.inf)
        return [nothing if x is None else x for x in found]

    def together(self, firsts: Sequence[int], ends: Sequence[int], ranks: int) -> Array:
        """As of `HeldRuns`: each run may have the optimizer in another place."""
        known = [x for x in self.places if x is not None]
        if len(known) < len(self.places):
            return np.full(ranks, -np.inf)
        totals = (np.concatenate([[0.0], np.cumsum(x)]) for x in known)
        runs = np.min([x[list(ends)] - x[list(firsts)] for x in totals], axis=0)
        return np.asarray(runs.reshape(-1, ranks).sum(axis=0) - self.limit_s)


@dataclass(frozen=True)
class HeldRuns:
    """Bounds of ranks at some prices, which all hold."""

    prices: tuple[Priced, ...]

    @cached_property
    def alone(self) -> Array:
        """Seconds of a rank with one run, as `cuts.runs_of` lays them out."""
        # each place has a price that tells most
        each = np.maximum.reduce([priced.alone() for priced in self.prices])
        return np.asarray(each.min(axis=0))

    def together(self, firsts: Sequence[int], ends: Sequence[int], ranks: int) -> Array:
        """Seconds of each rank with every so many-th of some runs, (ranks,).

        Args:
            firsts, ends: of each run its first block, and the one behind its last.
            ranks: of which each has a run in turn.
        """
        return np.maximum.reduce([p.together(firsts, ends, ranks) for p in self.prices])
