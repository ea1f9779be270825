"""Names the op that no combination of placements connects with those before it, for messages."""

from __future__ import annotations

import numpy as np

from autopar.solver.discrete.ilp import Infeasible, solve_problem
from autopar.solver.discrete.problem import Array, ChoiceProblem
from autopar.solver.step import Step

__all__ = ["unconnected_op"]


def unconnected_op(step: Step, problem: ChoiceProblem) -> str:
    """The first op, in execution order, with which nothing is possible: what it is, and where.

    "Its parameters" where nothing is possible without ops.

    Args:
        step: whose ops are nodes of the problem; other nodes are parameters and the like.
        problem: of which no assignment is possible.
    """
    bare = ChoiceProblem(
        {node: _barred(cost) for node, cost in problem.costs.items()},
        {pair: _barred(matrix) for pair, matrix in problem.edges.items()},
    )
    order = [name for name in step.ops if name in bare.costs]
    if not order or not _is_possible(_without(bare, set(order))):
        return "its parameters"
    possible, impossible = 0, len(order)  # so many of the first ops
    while impossible - possible > 1:
        middle = (possible + impossible) // 2
        if _is_possible(_without(bare, set(order[middle:]))):
            possible = middle
        else:
            impossible = middle
    name = order[impossible - 1]
    shapes = ", ".join(str(list(s.shape)) for s in step.ops[name].call.operands)
    return f"{step.named(name)} on shapes {shapes}"


def _barred(costs: Array) -> Array:
    return np.where(np.isfinite(costs), 0.0, np.inf)


def _without(problem: ChoiceProblem, gone: set[str]) -> ChoiceProblem:
    return ChoiceProblem(
        {node: cost for node, cost in problem.costs.items() if node not in gone},
        {pair: m for pair, m in problem.edges.items() if gone.isdisjoint(pair)},
    )


def _is_possible(problem: ChoiceProblem) -> bool:
    try:
        solve_problem(problem, exact=False)
    except Infeasible:
        return False
    return True
