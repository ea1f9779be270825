"""A lower bound of what the ranks of a pipeline take together, by cutting planes.

Rank by rank, a bound leaves out that one plan of a stage has to serve for all that others wait for
and for what its own rank does: a rank that gathers nothing in front of the turns, for the last one
to begin soon, has more to do behind them. Here the step is the linear program of `step_lp.py` in
the seconds x of the parts of each stage. Of these it is known that

    w · x >= f_w(blocks of the stage)

for any weights w, where f_w is what these blocks take at least when their parts count so
(`run_floors.py`). The sums that ranks are bounded by alone are the first such planes. The dual
values of the program are weights of a stage; where the blocks take more than its x for these, that
is another plane, for all stages (Kelley 1960; the dual of Dantzig and Wolfe 1960). No mixture of
plans is faster, so no plan is.

Cuts are variables: a path through the runs that a rank may hold. Runs that alone take as long as
is of interest are left out, which mostly leaves few.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import pulp

from autopar.solver.floor import Weights
from autopar.solver.run_floors import Plane, RunFloors
from autopar.solver.step_lp import Line, StepLP

__all__ = ["Run", "least_together"]

Run: TypeAlias = tuple[int, int]  # first block, and the one behind the last

_PLANES = 12  # that are looked for
_AT_ONCE = 3  # between two solutions
_MORE = 1e-4  # relative, by which blocks must take more for a plane to be of use
_ALIKE = 0.05  # of the largest weight: weights that need not both be tried
_COUNTS = 1e-6  # weights that do
_GAP = 1e-3  # of the limit, at which cuts are as good as any
_NODES = 2000  # of the ILP that looks for them
_ROUNDS = 6  # of cuts
_ROUNDING = 1e-6  # relative, of the LP


class _Point(NamedTuple):
    """A solution: what stages do, and what a second of each of their parts adds to the step."""

    step_s: float
    parts: Sequence[Sequence[float]]
    weights: Sequence[Weights]


@dataclass(slots=True)
class _Search:
    line: Line
    runs: Sequence[Sequence[Run]]
    limit_s: float
    planes: list[Plane]
    floors: RunFloors
    tried: list[tuple[int, Weights]] = field(default_factory=list)

    def bound(self) -> float:
        """Seconds that no cuts take less than, up to the limit."""
        least_s = 0.0
        for _ in range(_ROUNDS):
            step_s, held = self._best_cuts()
            least_s = max(least_s, step_s)
            if step_s >= self.limit_s or not self._raised(held):
                break
        return min(least_s, self.limit_s) * (1 - _ROUNDING)

    def _best_cuts(self) -> tuple[float, list[Run]]:
        """A bound of all cuts, and the run of each stage with which that is least."""
        if all(len(open_) == 1 for open_ in self.runs):
            held = [open_[0] for open_ in self.runs]
            return self._at(held).step_s, held
        program = StepLP(self.line, self.limit_s)
        chosen = [
            {run: program.variable(f"run_{stage}_{run[0]}_{run[1]}") for run in open_}
            for stage, open_ in enumerate(self.runs)
        ]
        for each in chosen:
            for variable in each.values():
                variable.cat = pulp.LpInteger
        _follow_each_other(program, chosen)
        for weights, seconds in self.planes:
            for stage, each in enumerate(chosen):
                takes = {v: -float(seconds[run]) / program.unit for run, v in each.items()}
                program.require({**_weighed(program, stage, weights), **takes})
        if not program.solve(gap_abs=_GAP, mip_max_nodes=_NODES):
            return program.bound_s, []
        return program.bound_s, [
            max(each, key=lambda run: each[run].value() or 0.0) for each in chosen
        ]

    def _at(self, held: Sequence[Run]) -> _Point:
        """The step with some cuts."""
        program = StepLP(self.line, self.limit_s)
        rows = defaultdict[int, list[tuple[Weights, pulp.LpConstraint]]](list)
        for weights, seconds in self.planes:
            for stage, run in enumerate(held):
                at_least = float(seconds[run]) / program.unit
                row = program.require(_weighed(program, stage, weights), at_least)
                rows[stage].append((weights, row))
        if not program.solve():
            return _Point(0.0, [], [])
        parts = [[float(v.value() or 0.0) * program.unit for v in each] for each in program.parts]
        counts = [
            np.sum([abs(float(row.pi or 0.0)) * np.array(w) for w, row in rows[stage]], axis=0)
            for stage in range(len(parts))
        ]
        return _Point(program.step_s, parts, [Weights(*map(float, c)) for c in counts])

    def _raised(self, held: Sequence[Run]) -> bool:
        """Find planes that raise the step with some cuts; False if there are none."""
        raised = False
        while held and len(self.tried) < _PLANES:
            point = self._at(held)
            if not point.parts or point.step_s >= self.limit_s:
                break
            found = False
            for stage, weights in self._wanted(point):
                self.tried.append((stage, weights))
                plane = self.floors.at(weights)
                self.planes.append(plane)
                least_s = float(np.dot(weights, point.parts[stage]))
                found |= float(plane.runs[held[stage]]) > least_s * (1 + _MORE)
            raised |= found
            if not found:
                break
        return raised

    def _wanted(self, point: _Point) -> list[tuple[int, Weights]]:
        """Weights to look for a plane at, those of the stages first that take most of the step."""
        takes = [float(np.dot(w, x)) for w, x in zip(point.weights, point.parts, strict=True)]
        found: list[tuple[int, Weights]] = []
        for stage in sorted(range(len(takes)), key=takes.__getitem__, reverse=True):
            most = max(point.weights[stage])
            if most < _COUNTS:
                continue
            weights = Weights(*(w / most for w in point.weights[stage]))
            known = [w for _, w in (*self.tried, *found)]
            if all(max(np.abs(np.subtract(weights, w))) > _ALIKE for w in known):
                found.append((stage, weights))
        return found[: min(_AT_ONCE, _PLANES - len(self.tried))]


def _weighed(program: StepLP, stage: int, weights: Weights) -> dict[pulp.LpVariable, float]:
    return dict(zip(program.parts[stage], weights, strict=True))


def _follow_each_other(program: StepLP, chosen: Sequence[dict[Run, pulp.LpVariable]]) -> None:
    """Each stage holds the run behind that of the stage before."""
    program.lp += pulp.LpAffineExpression(dict.fromkeys(chosen[0].values(), 1.0)) == 1
    for before, after in itertools.pairwise(chosen):
        for block in {end for _, end in before} | {start for start, _ in after}:
            ends = {v: 1.0 for (_, end), v in before.items() if end == block}
            begins = {v: -1.0 for (start, _), v in after.items() if start == block}
            program.lp += pulp.LpAffineExpression({**ends, **begins}) == 0


def least_together(
    line: Line,
    runs: Sequence[Sequence[Run]],
    known: Iterable[Plane],
    floors: RunFloors,
    limit_s: float,
) -> float:
    """Seconds that no pipeline takes less than, as far as they are below a limit.

    Args:
        line: of the ranks.
        runs: of each stage, those that it may hold in a step that takes less than the limit.
        known: planes.
        floors: finds more, and keeps them.
        limit_s: bounds above it are of no use.

    Raises:
        Infeasible: nothing is possible within the constraints.
    """
    if not all(runs):
        return limit_s
    return _Search(line, runs, limit_s, [*known, *floors.planes], floors).bound()
