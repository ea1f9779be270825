"""A choice taken out of a problem: solving again gives the best plan without it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.core.placement import Layout
from autopar.core.plan import NodePlan
from autopar.errors import ConstraintError
from autopar.solver.build import StepProblem
from autopar.solver.step import Step

__all__ = ["Excluded", "exclude"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Excluded:
    """The choice of one op or of one parameter's storage.

    Attributes:
        name: node of the op, or FQN of the parameter.
        choice: what it must not be.
    """

    name: str
    choice: NodePlan | Layout


def exclude(excluded: Excluded, step: Step, built: StepProblem) -> bool:
    """Forbid a choice, in place; nodes of equal blocks share theirs, so all of them lose it.

    Returns:
        False if the step has no such op, as for a copy that only one kind of recomputation makes.

    Raises:
        ConstraintError: nothing else is possible.
    """
    choice = excluded.choice
    if isinstance(choice, NodePlan):
        owner = built.classes.get(excluded.name)
        states = [
            (c.inputs, c.outputs, c.variants) == (choice.inputs, choice.outputs, choice.variants)
            for c in built.candidates.get(owner or "", [])
        ]
    else:
        targets = {spec.target: name for name, spec in step.parameters.items()}
        owner = built.classes.get(targets.get(excluded.name, ""))
        states = [layout == choice for layout in built.storages.get(owner or "", [])]
    if owner is None or not states:
        return False
    costs = np.where(np.array(states), np.inf, built.problem.costs[owner])
    if not np.isfinite(costs).any():
        raise ConstraintError(
            f"{excluded.name} has no other choice: shapes, mesh and pins leave this one alone"
        )
    built.problem.costs[owner] = costs
    return True
