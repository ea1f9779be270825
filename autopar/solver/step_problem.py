"""The problem of a step with what its states mean."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from autopar.core.placement import Layout
from autopar.solver.candidates import Candidate
from autopar.solver.discrete.problem import ChoiceProblem
from autopar.solver.moves import MoveCosts
from autopar.solver.overlap import Weights
from autopar.solver.step import Value
from autopar.solver.terms import Terms

__all__ = ["StepProblem"]


@dataclass(slots=True)
class StepProblem:
    """The problem with what its states mean.

    Attributes:
        problem: costs and edges over class representatives.
        candidates: states of each op class.
        storages: states of each parameter class.
        classes: representative of every op and parameter.
        moves: seconds of redistributions.
        terms: what the costs are sums of.
    """

    problem: ChoiceProblem
    candidates: dict[str, list[Candidate]]
    storages: dict[str, list[Layout]]
    classes: dict[str, str]
    moves: MoveCosts
    terms: Terms

    def weighted(self, weights: Weights) -> StepProblem:
        """The same states, where seconds count otherwise."""
        return replace(self, problem=self.terms.problem(weights))

    def states(self, owner: str) -> list[Any]:
        """What the states of a class are, whatever the graph: layouts and ways to compute."""
        if owner in self.candidates:
            return [(c.inputs, c.outputs, c.variants) for c in self.candidates[owner]]
        return list(self.storages[owner])

    def produced(self, value: Value) -> list[Layout] | None:
        """Layout of a value in each state of its producer; None for inputs of the step."""
        name, index = value
        owner = self.classes.get(name, name)
        if owner in self.candidates:
            return [c.outputs[index] for c in self.candidates[owner]]
        return self.storages.get(owner)
