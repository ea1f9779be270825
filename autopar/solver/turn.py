"""Lower bounds of the seconds that each block of a model adds to a step in microbatches.

Each is of a sum of the parts of a step (`floor.functionals`), of all turns. What is the least of
such sums over plans bends down in what a part counts, so that between two known bounds nothing is
below the line that joins them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.core.graph import TracedModel
from autopar.solver.floor import Floors, functionals, left_out
from autopar.solver.ideal import BlockWork
from autopar.solver.problem import Array
from autopar.solver.windows import Window, between, runs_with, windows_of

__all__ = ["WIDE", "Turn", "floored", "windowed"]

WIDE = ("step", "end", "after", "first")
"""What may be bounded of whole runs of blocks, too."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Lower bounds of each block on one pipeline rank.

    Attributes:
        found: seconds of a step, (n,), by the names of `floor.functionals`, and "backward".
        microbatches: of the step.
        ahead: forwards that a rank may begin ahead of its first gradient (`floor.left_out`).
        windows: of blocks that follow each other.
    """

    found: Mapping[str, Array]
    microbatches: int
    ahead: int
    windows: tuple[Window, ...] = ()

    @classmethod
    def exact(cls, microbatches: int, ahead: int, parts: Sequence[Array]) -> Turn:
        """From the seconds of the parts of a step, (n,) each, in the order of `floor.Weights`."""
        found = {
            name: np.asarray(weights) @ np.stack(parts)
            for name, weights in functionals(microbatches, ahead).items()
        }
        found["backward"] = parts[2] + parts[3]
        return cls(found, microbatches, ahead)

    @classmethod
    def ideal(cls, work: BlockWork, microbatches: int, ahead: int, devices: int) -> Turn:
        """Without communication, on so many devices a rank."""
        m = microbatches
        forward, backward = work.at_turns(devices, m)
        none = 0 * forward
        exact = cls.exact(m, ahead, (none, m * forward, none, m * backward, none))
        found = {**exact.found, "weights": none}  # how a backward would be split is not known
        return replace(exact, found=found)

    @property
    def step(self) -> Array:
        """Of all that is done in a step."""
        return self.found["step"]

    @property
    def early(self) -> int:
        """Forwards that "after" and "first" leave out."""
        return left_out(self.microbatches, self.ahead)

    @property
    def late(self) -> float:
        """The share of all forwards that they count."""
        return 1 - self.early / self.microbatches

    def of_turn(self, name: str) -> Array:
        """The share of one turn in a part that runs at each."""
        return self.found[name] / self.microbatches

    def in_turns(self, microbatches: int) -> Turn:
        """The step as a lower bound of that in more turns, a multiple of these.

        None gets cheaper by that. What counts less in more turns is no lower than a line from none.
        """
        assert microbatches % self.microbatches == 0
        other = replace(self, microbatches=microbatches)
        share = self.microbatches / microbatches
        late = min(1.0, other.late / self.late) if self.late else 1.0
        less = {"one turn": share, "after": late, "first": late}
        found = {name: less.get(name, 1.0) * x for name, x in self.found.items()}
        windows = (
            replace(w, found={name: less.get(name, 1.0) * s for name, s in w.found.items()})
            for w in self.windows
        )
        return replace(other, found=found, windows=tuple(windows))

    def above(self, other: Turn) -> Turn:
        """The higher of two bounds, block by block."""
        assert (self.ahead, self.microbatches) == (other.ahead, other.microbatches)
        found = {name: np.maximum(x, other.found[name]) for name, x in self.found.items()}
        return replace(self, found=found, windows=self.windows + other.windows)

    def higher(self, name: str, share: float) -> Turn:
        """The bounds if one was higher by a share; in windows none is."""
        return replace(self, found={**self.found, name: (1 + share) * self.found[name]})

    def runs(self, name: str) -> Array:
        """What each run of blocks takes on one rank, as `cuts.runs_of` lays them out."""
        return runs_with(self.found[name], name, self.windows)

    def without(self, runs: Mapping[str, Array], turns: int, prepared: bool) -> Array:
        """Each run's seconds of a step without the forward of so many turns, at most `early`.

        Args:
            runs: of "step", "end", "first" and "after".
            turns: that are left out.
            prepared: leave out what comes before all of them, too.
        """
        whole, left = ("end", "after") if prepared else ("step", "first")
        share = turns / self.early
        return between(runs[whole], runs[left], share)


def windowed(
    turn: Turn, floors: Floors, traced: TracedModel, names: Sequence[str], wanted: str
) -> Turn:
    """With bounds of equal blocks that follow each other.

    Args:
        turn: bounds of the blocks.
        floors: of a graph with as many of them as a window has (`windows.widened`).
        traced: the folded model.
        names: FQN of every block of the model.
        wanted: out of `WIDE`.
    """
    found: list[Window] = []
    for repeat, length, starts in windows_of(traced, names):
        blocks = [f"{repeat.container}.{repeat.first + i}" for i in range(length)]
        found.append(Window(length, frozenset(starts), floors.of_run(blocks, [wanted])))
    return replace(turn, windows=turn.windows + tuple(found))


def floored(work: BlockWork, floors: Floors, microbatches: int, ahead: int, devices: int) -> Turn:
    """With communication of blocks and of what is around them."""
    ideal = Turn.ideal(work, microbatches, ahead, devices)
    if not work.names:
        return ideal
    rows = floors.of(work.held)
    found = {name: np.array([row[name] for row in rows])[work.like] for name in rows[0]}
    if "inputs" in found:
        found["backward"] = found["inputs"] + found["weights"]
    return replace(ideal, found={**ideal.found, **found}).above(ideal)
