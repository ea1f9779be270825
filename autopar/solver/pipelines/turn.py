"""Lower bounds of the seconds that each block of a model adds to a step in microbatches.

Each is of a sum of the parts of a step (`functionals`), of all turns. What is the least of
such sums over plans bends down in what a part counts, so that between two known bounds nothing is
below the line that joins them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.core.graph import TracedModel
from autopar.solver.discrete.problem import Array
from autopar.solver.pipelines.floor import Floors
from autopar.solver.pipelines.functionals import functionals, left_out
from autopar.solver.pipelines.held_runs import HeldRuns
from autopar.solver.pipelines.ideal import BlockWork
from autopar.solver.pipelines.windows import Window, WindowKind, between, runs_with, windows_of

__all__ = ["WIDE", "Turn", "floored", "hoped", "windowed"]

WIDE = ("step", "end", "after", "first", "turns", "onward")
"""What may be bounded of whole runs of blocks, too."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Lower bounds of each block on one pipeline rank.

    Attributes:
        found: seconds of a step, (n,), by the names of `functionals`, and "backward".
        microbatches: of the step.
        ahead: forwards that a rank may begin ahead of its first gradient (`floor.left_out`).
        windows: of blocks that follow each other.
        beside: of what is around each block, in `found`, where that is known apart.
        within: under a memory limit (`held_floors`), by the same names; all hold.
    """

    found: Mapping[str, Array]
    microbatches: int
    ahead: int
    windows: tuple[Window, ...] = ()
    beside: Mapping[str, Array] = field(default_factory=dict)
    within: Mapping[str, Sequence[HeldRuns]] = field(default_factory=dict)

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
        exact = cls.exact(m, ahead, (none, m * forward, none, m * backward, none, none))
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
        windows = (replace(w, found=less.get(w.name, 1.0) * w.found) for w in self.windows)
        return replace(other, found=found, windows=tuple(windows), beside={}, within={})

    def above(self, other: Turn) -> Turn:
        """The higher of two bounds, block by block."""
        assert (self.ahead, self.microbatches) == (other.ahead, other.microbatches)
        found = {name: np.maximum(x, other.found[name]) for name, x in self.found.items()}
        return replace(self, found=found, windows=self.windows + other.windows)

    def runs(self, name: str) -> Array:
        """What each run of blocks takes on one rank, as `cuts.runs_of` lays them out."""
        found = runs_with(self.found[name], name, self.windows)
        return np.maximum.reduce([found, *(w.alone for w in self.within.get(name, ()))])

    def on_ranks(self, name: str, firsts: Sequence[int], ends: Sequence[int], ranks: int) -> Array:
        """What each rank takes that has every so many-th of some runs (`HeldRuns.together`)."""
        runs = runs_with(self.found[name], name, self.windows)[firsts, ends]
        sums = runs.reshape(-1, ranks).sum(axis=0)
        held = (w.together(firsts, ends, ranks) for w in self.within.get(name, ()))
        return np.maximum.reduce([sums, *held])

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
    turn: Turn, floors: Floors, traced: TracedModel, names: Sequence[str], kind: WindowKind
) -> Turn:
    """With bounds of blocks that follow each other.

    Args:
        turn: bounds of the blocks.
        floors: of a graph with as many of them as a window may have (`windows.widened`).
        traced: the folded model.
        names: FQN of every block of the model.
        kind: which are bounded, with a name out of `WIDE`.
    """
    if kind.last:
        runs = [(list(floors.cells.members)[-kind.length :], _last(names, kind))]
    else:
        runs = [
            ([f"{repeat.container}.{repeat.first + i}" for i in range(length)], starts)
            for repeat, length, starts in windows_of(traced, names, kind.length)
        ]
    found: list[Window] = []
    for blocks, starts in runs:
        inside_s = floors.of_run(blocks, [kind.name], around_last=kind.last)[kind.name]
        apart = len(blocks) - 1 if kind.last else len(blocks)  # with what is around them
        beside = _sums(turn.beside[kind.name], starts, apart)
        found.append(Window(len(blocks), tuple(starts), kind.name, inside_s + beside))
    return replace(turn, windows=turn.windows + tuple(found))


def hoped(
    turn: Turn, traced: TracedModel, names: Sequence[str], kinds: Sequence[WindowKind], share: float
) -> Turn:
    """With windows as if these took more than their blocks, by a share; arguments as above."""
    found: list[Window] = []
    for kind in kinds:
        runs = [(kind.length, _last(names, kind))]
        if not kind.last:
            runs = [run[1:] for run in windows_of(traced, names, kind.length)]
        for length, starts in runs:
            seconds = (1 + share) * _sums(turn.found[kind.name], starts, length)
            found.append(Window(length, tuple(starts), kind.name, seconds))
    return replace(turn, windows=turn.windows + tuple(found))


def _last(names: Sequence[str], kind: WindowKind) -> list[int]:
    """Where the window of the last blocks begins."""
    return [len(names) - kind.length]


def _sums(seconds: Array, starts: Sequence[int], length: int) -> Array:
    return np.array([seconds[start : start + length].sum() for start in starts])


def floored(work: BlockWork, floors: Floors, turn: Turn, names: Collection[str]) -> Turn:
    """With communication of blocks and of what is around them.

    Args:
        work: of the blocks.
        floors: of the same step.
        turn: what is known of them.
        names: of the sums to be found, out of `floors.wanted`, that are not known yet.
    """
    if not work.names:
        return turn
    inside, beside = (
        {name: np.array([row[name] for row in rows])[work.like] for name in rows[0]}
        for rows in floors.of(work.held, names)
    )
    found = {name: seconds + beside[name] for name, seconds in inside.items()}
    if "inputs" in found:
        found["backward"] = found["inputs"] + found["weights"]
    known = replace(turn, found={**turn.found, **found}).above(turn)
    return replace(known, beside={**turn.beside, **beside})
