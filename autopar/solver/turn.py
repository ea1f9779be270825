"""Lower bounds of the seconds that each block of a model adds to a step in microbatches.

Each is of a sum of the parts of a step (`floor.functionals`), of all turns. What is the least of
such sums over plans bends down in what a part counts, so that between two known bounds nothing is
below the line that joins them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.solver.floor import Floors, functionals
from autopar.solver.ideal import BlockWork
from autopar.solver.problem import Array

__all__ = ["Turn", "floored"]


@dataclass(frozen=True, slots=True)
class Turn:
    """Lower bounds of each block on one pipeline rank.

    Attributes:
        found: seconds of a step, (n,), by the names of `floor.functionals`, and "backward".
        microbatches: of the step.
        ranks: of the pipeline.
    """

    found: Mapping[str, Array]
    microbatches: int
    ranks: int

    @classmethod
    def exact(cls, microbatches: int, ranks: int, parts: Sequence[Array]) -> Turn:
        """From the seconds of the parts of a step, (n,) each, in the order of `floor.Weights`."""
        found = {
            name: np.asarray(weights) @ np.stack(parts)
            for name, weights in functionals(microbatches, ranks).items()
        }
        found["backward"] = parts[2] + parts[3]
        return cls(found, microbatches, ranks)

    @classmethod
    def ideal(cls, work: BlockWork, microbatches: int, ranks: int, devices: int) -> Turn:
        """Without communication, on so many devices a rank."""
        m = microbatches
        forward, backward = work.at_turns(devices, m)
        none = 0 * forward
        exact = cls.exact(m, ranks, (none, m * forward, none, m * backward, none))
        found = {**exact.found, "weights": none}  # how a backward would be split is not known
        return replace(exact, found=found)

    @property
    def step(self) -> Array:
        """Of all that is done in a step."""
        return self.found["step"]

    @property
    def early(self) -> int:
        """Forwards that "after" and "first" leave out."""
        return min(self.ranks, self.microbatches)

    def of_turn(self, name: str) -> Array:
        """The share of one turn in a part that runs at each."""
        return self.found[name] / self.microbatches

    def in_turns(self, microbatches: int) -> Turn:
        """The step as a lower bound of that in more turns, a multiple of these.

        None gets cheaper by that, and the early turns are no larger a share of more.
        """
        assert microbatches % self.microbatches == 0
        share = self.microbatches / microbatches
        # the least of sums that are straight in what a turn counts: no lower than a line from none
        found = {**self.found, "one turn": share * self.found["one turn"]}
        return replace(self, found=found, microbatches=microbatches)

    def above(self, other: Turn) -> Turn:
        """The higher of two bounds, block by block."""
        assert (self.ranks, self.microbatches) == (other.ranks, other.microbatches)
        found = {name: np.maximum(x, other.found[name]) for name, x in self.found.items()}
        return replace(self, found=found)

    def without(self, turns: int, prepared: bool) -> Array:
        """Seconds of a step without the forward of so many turns, no more than `early`.

        Args:
            turns: that are left out.
            prepared: leave out what comes before all of them, too.
        """
        whole, left = ("end", "after") if prepared else ("step", "first")
        share = turns / self.early
        return self.found[whole] + share * (self.found[left] - self.found[whole])


def floored(work: BlockWork, floors: Floors, microbatches: int, ranks: int, devices: int) -> Turn:
    """With communication of blocks and of what is around them."""
    ideal = Turn.ideal(work, microbatches, ranks, devices)
    if not work.names:
        return ideal
    rows = floors.of(work.held)
    found = {name: np.array([row[name] for row in rows])[work.like] for name in rows[0]}
    if "inputs" in found:
        found["backward"] = found["inputs"] + found["weights"]
    return replace(ideal, found={**ideal.found, **found}).above(ideal)
