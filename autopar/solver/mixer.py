"""Mixtures of two plans of a step, priced: the first so many blocks are as in the stronger one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autopar.core.block_kinds import Checkpoint, as_checkpoint, kinds_of, labels_of
from autopar.core.blocks import Block, Blocks
from autopar.errors import ConstraintError
from autopar.solver.discrete.problem import Assignment
from autopar.solver.found import Fit, Met
from autopar.solver.placed import Labels, Placed
from autopar.solver.variant import Variant

__all__ = ["Mixer", "Point"]

_PRICED = 8  # mixtures that are priced to find how many blocks must be recomputed


class Point(NamedTuple):
    """A plan that the search of a kind has met."""

    kind: str
    variant: Variant
    met: Met

    @classmethod
    def of(cls, variant: Variant, block: Block) -> Point:
        """The best plan of a search, and how it recomputes a block."""
        fit = variant.search.memory.best
        assert fit is not None
        met = Met(fit.solution.chosen, fit.solution.objective, fit.peak)
        return cls(kinds_of(variant.checkpoint, [block])[block], variant, met)


@dataclass(frozen=True, slots=True)
class _Mixture:
    """The step with so many blocks as in the stronger plan, and a plan of it."""

    number: int
    variant: Variant
    chosen: Assignment
    fit: Fit


class Mixer:
    """Mixes two plans, with the first so many blocks as in the stronger one.

    Args:
        cheap, strong: the plans.
        free: blocks that may be recomputed or placed apart, in the order in which they run.
        make: the variant of a checkpoint.
    """

    def __init__(
        self,
        cheap: Point,
        strong: Point,
        free: Sequence[Block],
        make: Callable[[Checkpoint], Variant],
    ) -> None:
        self.cheap = cheap
        self.strong = strong
        self.free = free
        self.blocks = Blocks(strong.variant.traced).every()
        known = labels_of(strong.variant.checkpoint, self.blocks)
        self.kinds = {block: kind for block, (kind, _) in known.items()}
        self.sections = {block: section for block, (_, section) in known.items()}
        self.make = make
        self.limit = strong.variant.search.memory.limit

    def _labels(self, number: int) -> Labels:
        """Whose placements each block has, with so many as in the stronger plan."""
        cheap = dict.fromkeys(self.blocks, "cheap")
        return cheap | dict.fromkeys(self.free[:number], "strong")

    def both(self) -> Placed:
        """How the two plans place the nodes of each block."""
        placed = Placed()
        placed.add(self.cheap.variant, self.cheap.met.chosen, self._labels(0))
        placed.add(self.strong.variant, self.strong.met.chosen, self._labels(len(self.free)))
        return placed

    def fewest(self) -> _Mixture | None:
        """Of the mixtures that fit, placed as the two are, that with fewest of the stronger."""
        ends = (0, self.cheap.met.peak), (len(self.free), self.strong.met.peak)
        return self._between(*ends, self.both())

    def fewest_as_strong(self) -> _Mixture | None:
        """The same with all blocks placed as in the plan of the stronger kind."""
        placed = Placed()
        placed.add(self.strong.variant, self.strong.met.chosen, self._labels(len(self.free)))
        chosen = placed.carried_to(self.cheap.variant, self._labels(0))
        fit = self.cheap.variant.search.of(chosen) if chosen is not None else None
        if fit is None or fit.peak <= self.strong.met.peak:
            return None
        ends = (0, float(fit.peak)), (len(self.free), self.strong.met.peak)
        return self._between(*ends, placed)

    def fewer(self, known: _Mixture) -> _Mixture | None:
        """One with fewer blocks than a mixture that was solved, placed as that is."""
        best = known.variant.search.memory.best
        if best is None:
            return None
        placed = Placed()
        placed.add(known.variant, best.solution.chosen, self._labels(known.number))
        each = (self.cheap.met.peak - self.strong.met.peak) / len(self.free)
        if best.peak + each > self.limit:
            return None
        ends = (0, best.peak + known.number * each), (known.number, float(best.peak))
        return self._between(*ends, placed)

    def _between(
        self, below: tuple[int, float], above: tuple[int, float], placed: Placed
    ) -> _Mixture | None:
        """The fewest blocks between two numbers, of which one has too large a peak.

        The peak falls by about the same for each block.
        """
        (low, most), (high, least) = below, above
        found: _Mixture | None = None
        for _ in range(_PRICED):
            if high - low < 2:
                break
            each = max((most - least) / (high - low), 1.0)
            guess = low + math.ceil((most - self.limit) / each)
            mixture = self.priced(min(max(guess, low + 1), high - 1), placed)
            if mixture is None:
                break
            if mixture.fit.peak <= self.limit:
                found, high, least = mixture, mixture.number, mixture.fit.peak
            else:
                low, most = mixture.number, mixture.fit.peak
        return found

    def priced(self, number: int, placed: Placed) -> _Mixture | None:
        """The mixture with so many blocks as in the stronger plan; None if it cannot be so."""
        kinds = dict(self.kinds)
        kinds |= dict.fromkeys(self.free[:number], self.strong.kind)
        kinds |= dict.fromkeys(self.free[number:], self.cheap.kind)
        labels = self._labels(number)
        alike = self.cheap.kind == self.strong.kind  # then nothing but placements tells them apart
        apart = {b: (alike and labels[b], self.sections[b]) for b in self.blocks}
        try:
            # by run, as the name of one kind alone stands for the search of the plans themselves
            variant = self.make(as_checkpoint(kinds, apart, by_run=True))
        except ConstraintError:
            return None  # blocks of a folded graph that cannot be told apart
        chosen = placed.carried_to(variant, labels)
        if chosen is None:
            return None
        fit = variant.search.of(chosen)
        return None if fit is None else _Mixture(number, variant, chosen, fit)
