"""How much of what a search counts on a plan's program hides, and where that is too little."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autopar.core.plan import Plan

__all__ = ["DOUBTED", "Doubts", "hoped_s", "unseen_s"]

DOUBTED = 2 / 3
"""Of what was counted on: where less is hidden, what counts least tells little of what is fast."""


@dataclass(slots=True)
class Doubts:
    """Whether programs hide so little that the rule is in doubt; once it is, on all meshes.

    Args:
        hidden: what a plan's program hides, of what was counted on; it takes a simulation.
    """

    hidden: Callable[[Plan], float]
    founded: bool = False

    def __call__(self, plan: Plan, below_s: float) -> bool:
        """Asked of a plan that must be below some seconds to be of use."""
        if not self.founded and plan.solver.objective < below_s:
            self.founded = self.hidden(plan) < DOUBTED
        return self.founded


def hoped_s(plan: Plan) -> float:
    """Seconds that the search counted on to hide."""
    return plan.predicted.serial_time_s - plan.solver.objective


def unseen_s(plan: Plan, program: Plan) -> float:
    """Seconds of a plan's program that the search does not count: of compute, and latency."""
    p, counted_s = program.predicted, plan.predicted.comm_time_s
    more = 1 - counted_s / p.comm_time_s if p.comm_time_s else 0.0
    return max(0.0, p.unseen_compute_s) + max(0.0, more) * p.exposed_time_s
