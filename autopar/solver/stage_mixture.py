"""The LP of column generation for pipelines: the stages' plans that make a step short together.

It is that of `step_lp.py`, with the seconds of the parts of a stage those of a mixture of its
plans: what `core/soonest.py` says, where stages may be mixtures and memory has room. Dual values
tell what a second of each part of a stage adds to the step: plans that are made for these are the
ones to add (Dantzig and Wolfe 1960).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pulp

from autopar.core.flights import Waits
from autopar.solver.ilp import Infeasible
from autopar.solver.step_lp import Line, StepLP

__all__ = ["Mixture", "best_mixture"]


@dataclass(frozen=True, slots=True)
class Mixture:
    """A step whose stages are mixtures of plans.

    Attributes:
        step_s: its seconds.
        waits: what the seconds of each part of a stage count.
        most: which plan each stage has the largest share of.
    """

    step_s: float
    waits: tuple[Waits, ...]
    most: tuple[int, ...]


def best_mixture(options: Sequence[Sequence[Sequence[float]]], line: Line) -> Mixture:
    """The mixtures with which a step takes least.

    Args:
        options: of each stage, the seconds of a step of the parts of its plans, in the order of
            `Waits`.
        line: of the ranks.

    Raises:
        Infeasible: the solver finds no solution.
    """
    master = StepLP(line, max(sum(plans[0]) for plans in options) or 1.0)
    mixed = [_mix(master, stage, plans) for stage, plans in enumerate(options)]
    if not master.solve():
        raise Infeasible("the LP of a pipeline's stages has no solution")
    return Mixture(
        step_s=master.step_s,
        waits=tuple(Waits(*(abs(float(row.pi or 0.0)) for row in rows)) for _, rows in mixed),
        most=tuple(_largest(shares) for shares, _ in mixed),
    )


def _largest(shares: Sequence[pulp.LpVariable]) -> int:
    return max(range(len(shares)), key=lambda i: float(shares[i].value() or 0.0))


def _mix(
    master: StepLP, stage: int, plans: Sequence[Sequence[float]]
) -> tuple[list[pulp.LpVariable], list[pulp.LpConstraint]]:
    """The shares of a stage's plans, and rows: its parts take no less than in the mixture."""
    shares = [master.variable(f"share_{stage}_{k}") for k in range(len(plans))]
    master.lp += pulp.LpAffineExpression(dict.fromkeys(shares, 1.0)) == 1
    rows = []
    for k, part in enumerate(master.parts[stage]):
        theirs = {share: -plan[k] / master.unit for share, plan in zip(shares, plans, strict=True)}
        rows.append(master.require({part: 1.0, **theirs}))
    return shares, rows
