"""Lower bounds of what runs of blocks take of a step, whatever its parts count.

As `turn.py` has them for the sums that ranks are bounded by one at a time, here for any weights of
the parts: with what several blocks hand on to each other (`windows.py`). Each is found once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autopar.core.graph import TracedModel
from autopar.solver.floor import Alone, Floors, Weights, least_of
from autopar.solver.problem import Array, Indices
from autopar.solver.windows import Window, kinds_for, runs_with, windows_of

__all__ = ["Plane", "RunFloors"]

_NAME = "any"


class Plane(NamedTuple):
    """What runs of blocks take at least, (n + 1, n + 1) as `cuts.runs_of` lays them out."""

    weights: Weights
    runs: Array


class _WindowProblem(NamedTuple):
    """The problem of equal runs of blocks; `apart`: blocks whose surroundings are not in it."""

    length: int
    starts: Sequence[int]
    apart: int
    alone: Alone


class RunFloors:
    """Bounds of the runs of one model's blocks on the ranks of one pipeline.

    Args:
        floors: of the microbatch.
        wide: of the same with as many equal blocks as a window may have (`windows.widened`).
        body: the microbatch, folded or not.
        names: FQN of every block of the model.
        held: FQN of the blocks of the graph.
        like: of each block of the model, which of these it is like.
        stages: of the pipeline.
    """

    def __init__(
        self,
        floors: Floors,
        wide: Floors,
        body: TracedModel,
        names: Sequence[str],
        held: Sequence[str],
        like: Indices,
        stages: int,
    ) -> None:
        self.like = like
        self.blocks = floors.whole(held)
        self.around = floors.beside(held)
        self.windows: list[_WindowProblem] = []
        self.planes: list[Plane] = []
        kinds = kinds_for(_NAME, len(names), stages)
        for kind in [kind for kind in kinds if not kind.last]:
            for repeat, length, starts in windows_of(body, names, kind.length):
                blocks = [f"{repeat.container}.{repeat.first + i}" for i in range(length)]
                problem = wide.run(blocks)
                self.windows.append(_WindowProblem(length, starts, length, problem))
        longest = max((kind.length for kind in kinds if kind.last), default=0)
        if longest:
            blocks = list(wide.cells.members)[-longest:]
            problem = wide.run(blocks, around_last=True)
            starts = [len(names) - longest]
            self.windows.append(_WindowProblem(longest, starts, longest - 1, problem))

    def at(self, weights: Weights) -> Plane:
        """The bounds of all runs for some weights.

        Raises:
            Infeasible: nothing is possible within the constraints.
        """
        beside = np.array([least_of(alone, weights) for alone in self.around])[self.like]
        found: list[Window] = []
        for length, starts, apart, alone in self.windows:
            inside_s = least_of(alone, weights)
            seconds = np.array([inside_s + beside[s : s + apart].sum() for s in starts])
            found.append(Window(length, tuple(starts), _NAME, seconds))
        blocks = np.array([least_of(alone, weights) for alone in self.blocks])[self.like]
        plane = Plane(weights, runs_with(blocks, _NAME, found))
        self.planes.append(plane)
        return plane
