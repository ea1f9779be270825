"""A lower bound of what the ranks of a pipeline take together.

Rank by rank, a bound leaves out that one plan of a stage has to serve for all that others wait for
and for what its own rank does: a rank that gathers nothing in front of the turns, for the last one
to begin soon, has more to do behind them. Here the step is the linear program of `step_lp.py` in
the seconds x of the parts of each stage, of which the sums that ranks are bounded by alone are
known: for each of their weights w,

    w · x >= what the blocks of the stage take at least when their parts count so.

Cuts are variables: a path through the runs of blocks that a rank may hold. Runs that alone take as
long as is of interest are left out, which mostly leaves few.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import pulp

from autopar.solver.discrete.highs import BOUND_ALONE
from autopar.solver.discrete.problem import Array
from autopar.solver.pipelines.functionals import Weights
from autopar.solver.pipelines.step_lp import Line, StepLP

__all__ = ["Plane", "Run", "least_together"]

Run: TypeAlias = tuple[int, int]  # first block, and the one behind the last

_GAP = 1e-3  # of the limit, at which cuts are as good as any
_NODES = 2000  # of the ILP that looks for them
_ROUNDING = 1e-6  # relative, of the solver


class Plane(NamedTuple):
    """What runs of blocks take at least, (n + 1, n + 1) as `cuts.runs_of` lays them out."""

    weights: Weights
    runs: Array


def least_together(
    line: Line, runs: Sequence[Sequence[Run]], planes: Sequence[Plane], limit_s: float
) -> float:
    """Seconds that no pipeline takes less than, as far as they are below a limit.

    Args:
        line: of the ranks.
        runs: of each stage, those that it may hold in a step that takes less than the limit.
        planes: what is known of them.
        limit_s: bounds above it are of no use.
    """
    if not limit_s or not all(runs):
        return limit_s  # no cuts take less
    program = StepLP(line, limit_s)
    chosen = [_held(program, stage, open_) for stage, open_ in enumerate(runs)]
    _follow_each_other(program, chosen)
    for weights, seconds in planes:
        for stage, each in enumerate(chosen):
            takes = {v: -float(seconds[run]) / program.unit for run, v in each.items()}
            parts = dict(zip(program.parts[stage], weights, strict=True))
            program.require({**parts, **takes})
    program.solve(gap_abs=_GAP, mip_max_nodes=_NODES, **BOUND_ALONE)
    return min(program.bound_s, limit_s) * (1 - _ROUNDING)


def _held(program: StepLP, stage: int, runs: Sequence[Run]) -> dict[Run, pulp.LpVariable]:
    """Which run a stage holds, as numbers of 0 or 1."""
    found: dict[Run, pulp.LpVariable] = {}
    for start, end in runs:
        found[start, end] = program.variable(f"run_{stage}_{start}_{end}")
        if len(runs) > 1:
            found[start, end].cat = pulp.LpInteger
    return found


def _follow_each_other(program: StepLP, chosen: Sequence[dict[Run, pulp.LpVariable]]) -> None:
    """Each stage holds one run, which follows that of the stage before."""
    program.lp += pulp.LpAffineExpression(dict.fromkeys(chosen[0].values(), 1.0)) == 1
    for before, after in itertools.pairwise(chosen):
        for block in sorted({end for _, end in before} | {start for start, _ in after}):
            ends = {v: 1.0 for (_, end), v in before.items() if end == block}
            begins = {v: -1.0 for (start, _), v in after.items() if start == block}
            program.lp += pulp.LpAffineExpression({**ends, **begins}) == 0
