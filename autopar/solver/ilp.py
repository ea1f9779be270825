"""The reduced problem as an integer program in PuLP, solved by HiGHS (CBC as the fallback).

x[i, s] ∈ {0, 1}         node i is in state s
e[i, j, s, t] ≥ 0        tensor between them: i in s and j in t
min   Σ cost · x + Σ C · e
Σ_s x[i, s] = 1          `_nodes`
Σ_t e[i, j, s, t] = x[i, s],  Σ_s e[i, j, s, t] = x[j, t]    `_edges` (LP-tight marginals)
Σ memory · x ≤ limit     `_memory`
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pulp

from autopar.errors import AutoparError
from autopar.solver.messages import Bounds, bound_with_memory, improve_bounds
from autopar.solver.problem import Assignment, ChoiceProblem, Indices, Row, evaluate
from autopar.solver.reduce import Reduced, reduce_problem

__all__ = ["Infeasible", "Solution", "solve_among", "solve_problem"]

_SCALE = 1e3  # the solver's tolerances suit milliseconds better than seconds


class Infeasible(AutoparError):
    """No assignment satisfies the problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """An assignment with its proof.

    Attributes:
        chosen: state of every node.
        objective: seconds, recomputed from the assignment.
        bound: no assignment costs less.
        status: "optimal", or "time limit" for an incumbent.
        seconds, variables, constraints: of the solver run.
    """

    chosen: dict[Hashable, int]
    objective: float
    bound: float
    status: str
    seconds: float
    variables: int
    constraints: int

    @property
    def gap(self) -> float:
        """(objective − bound) / objective."""
        return max(0.0, (self.objective - self.bound) / self.objective) if self.objective else 0.0


class _Model:
    """Variables and rows of one problem."""

    def __init__(self, problem: ChoiceProblem, limit: float | None) -> None:
        self.problem = problem
        self.prob = pulp.LpProblem("plan", pulp.LpMinimize)
        self.objective: dict[pulp.LpVariable, float] = {}
        self.index = {node: k for k, node in enumerate(problem.costs)}
        self.x: dict[Hashable, list[pulp.LpVariable]] = {}
        self.e: dict[tuple[Hashable, Hashable], dict[tuple[int, int], pulp.LpVariable]] = {}
        self._nodes()
        self._edges()
        if limit is not None and problem.memory:
            self._memory(limit)
        self.prob.setObjective(pulp.LpAffineExpression(self.objective))

    def _nodes(self) -> None:
        for node, costs in self.problem.costs.items():
            row = []
            for state, cost in enumerate(costs):
                variable = self.prob.add_variable(f"x_{self.index[node]}_{state}", cat="Binary")
                row.append(variable)
                if not math.isfinite(cost):
                    self.prob += variable == 0
                elif cost:
                    self.objective[variable] = float(cost) * _SCALE
            self.x[node] = row
            self.prob += pulp.LpAffineExpression(dict.fromkeys(row, 1.0)) == 1

    def _edges(self) -> None:
        for (i, j), matrix in self.problem.edges.items():
            rows: list[dict[pulp.LpVariable, float]] = [{} for _ in range(matrix.shape[0])]
            columns: list[dict[pulp.LpVariable, float]] = [{} for _ in range(matrix.shape[1])]
            name = f"e_{self.index[i]}_{self.index[j]}"
            known = self.e[i, j] = {}
            for s, t in np.argwhere(np.isfinite(matrix)):
                variable = self.prob.add_variable(f"{name}_{s}_{t}", lowBound=0)
                known[int(s), int(t)] = variable
                cost = float(matrix[s, t])
                if cost:
                    self.objective[variable] = cost * _SCALE
                rows[s][variable] = 1.0
                columns[t][variable] = 1.0
            for side, node in ((rows, i), (columns, j)):
                for state, terms in enumerate(side):
                    terms[self.x[node][state]] = -1.0
                    self.prob += pulp.LpAffineExpression(terms) == 0

    def _memory(self, limit: float) -> None:
        scale = max(limit, 1.0)
        terms = {
            self.x[node][state]: float(size) / scale
            for node, sizes in self.problem.memory.items()
            for state, size in enumerate(sizes)
            if size
        }
        self.prob += pulp.LpAffineExpression(terms) <= limit / scale

    def limit_row(self, row: Row, limit: float) -> None:
        """Add row ≤ limit; entries of pairs that cannot be have no variable."""
        scale = max(limit, 1.0)
        terms = {
            self.x[node][state]: float(size) / scale
            for node, sizes in row.nodes.items()
            for state, size in enumerate(sizes)
            if size
        }
        for (i, j), matrix in row.edges.items():
            known = self.e.get((i, j))
            table = matrix if known is not None else matrix.T
            known = known if known is not None else self.e[j, i]
            for (s, t), variable in known.items():
                if table[s, t]:
                    terms[variable] = float(table[s, t]) / scale
        self.prob += pulp.LpAffineExpression(terms) <= (limit - row.constant) / scale

    def states(self) -> dict[Hashable, int]:
        """The state of each node in the solution."""
        return {
            node: int(np.argmax([v.value() or 0.0 for v in row])) for node, row in self.x.items()
        }


def _run(model: _Model, time_limit_s: float, gap: float = 1e-6) -> tuple[str, float]:
    """Solve; returns the status and the proved bound in seconds."""
    solver: pulp.LpSolver = pulp.HiGHS(
        msg=False, gapRel=gap, timeLimit=time_limit_s, threads=1, random_seed=0
    )
    if not solver.available():
        solver = pulp.PULP_CBC_CMD(msg=False, gapRel=gap, timeLimit=time_limit_s)
    model.prob.solve(solver)
    status = model.prob.sol_status
    if status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        raise Infeasible(f"the solver says {pulp.LpStatus[model.prob.status]}")
    info = getattr(model.prob.solverModel, "getInfo", None)
    bound = pulp.value(model.prob.objective) or 0.0
    if info is not None:
        bound = float(info().mip_dual_bound)
    done = status == pulp.LpSolutionOptimal
    return ("optimal" if done else "time limit"), bound / _SCALE


def solve_problem(
    problem: ChoiceProblem,
    *,
    memory_limit: float | None = None,
    time_limit_s: float = 60.0,
    exact: bool = True,
    reduced: Reduced | None = None,
    known: Sequence[Assignment] = (),
) -> Solution:
    """Minimise a problem: exact reductions, then bounds, then the ILP on what they leave open.

    The ILP is not run where the bounds already meet, or where so many states are open that it
    would not end in time, or not `exact`; the gap then says how far the assignment can be from
    the optimum.

    Args:
        problem: to solve.
        memory_limit: of the sum of the nodes' memory, in bytes.
        time_limit_s: of the ILP.
        exact: run the ILP, and message passing to its end.
        reduced: the problem, without memory where there is no limit, if it is reduced already.
        known: possible assignments; where message passing finds none, its labels are joined with
            theirs, which is a far smaller ILP than that of all states.

    Raises:
        Infeasible: no assignment is possible, or none within the memory limit.
    """
    started = time.perf_counter()
    source = problem
    if memory_limit is None:
        source = ChoiceProblem(problem.costs, {}, problem.edges)
    reduced = reduced or reduce_problem(source)
    left = reduced.problem
    if any(not np.isfinite(cost).any() for cost in left.costs.values()):
        raise Infeasible("some node has no possible state")
    bounds = (
        improve_bounds(left, sweeps=200 if exact else 40, tolerance=1e-6 if exact else 1e-3)
        if memory_limit is None or not left.memory
        else bound_with_memory(left, memory_limit)
    )
    status, lower, local = "optimal", bounds.lower, bounds.chosen
    variables = constraints = 0
    if not _closed(bounds.lower, bounds.upper):
        model = None
        if exact or not (bounds.chosen or known):
            model = _model_of_open(left, bounds, memory_limit)
        if model is None:
            status = "bounded"
        else:
            status, proved = _run(model, time_limit_s)
            lower = max(lower, proved)
            variables, constraints = model.prob.numVariables(), model.prob.numConstraints()
            local = {n: int(bounds.keep[n][state]) for n, state in model.states().items()}
    if local:
        chosen = reduced.expand(local)
    else:
        chosen = _joined(source, [*known, reduced.expand(bounds.latest)], time_limit_s)
    objective, memory = evaluate(problem, chosen)
    if not math.isfinite(objective):
        raise Infeasible("every assignment is impossible")
    if memory_limit is not None and memory > memory_limit * (1 + 1e-6) + 1:
        raise Infeasible(f"needs {memory:.0f} bytes, the limit is {memory_limit:.0f}")
    return Solution(
        chosen=chosen,
        objective=objective,
        bound=min(lower + reduced.offset, objective),
        status=status,
        seconds=time.perf_counter() - started,
        variables=variables,
        constraints=constraints,
    )


def _joined(
    problem: ChoiceProblem, tried: Sequence[Assignment], time_limit_s: float
) -> dict[Hashable, int]:
    """The best assignment of the states of some assignments, of which one at least is possible."""
    keep = {node: np.unique([states[node] for states in tried]) for node in problem.costs}
    found = solve_among(problem, keep, (), math.inf, time_limit_s)
    if found is None:
        raise Infeasible("no known assignment is possible")
    return found


def solve_among(
    problem: ChoiceProblem,
    keep: Mapping[Hashable, Indices],
    rows: Iterable[Row],
    limit: float,
    time_limit_s: float,
) -> dict[Hashable, int] | None:
    """A good assignment of the given states under memory rows; None if none was found."""
    costs = {n: c[keep[n]] for n, c in problem.costs.items()}
    edges = {(i, j): m[np.ix_(keep[i], keep[j])] for (i, j), m in problem.edges.items()}
    model = _Model(ChoiceProblem(costs, {}, edges), None)
    for row in rows:
        model.limit_row(row.among(keep), limit)
    try:
        _run(model, time_limit_s, _AMONG_GAP)
    except Infeasible:
        return None
    return {n: int(keep[n][state]) for n, state in model.states().items()}


_ILP_VARIABLES = 60_000
_AMONG_GAP = 1e-3


def _closed(lower: float, upper: float) -> bool:
    return math.isfinite(upper) and upper - lower <= 1e-6 * max(abs(upper), 1e-9)


def _model_of_open(left: ChoiceProblem, bounds: Bounds, limit: float | None) -> _Model | None:
    """The ILP over the states that the bounds leave open; None if it is too large to be worth it.

    Without any assignment at hand it is built whatever its size.
    """
    keep = bounds.keep
    costs = {n: c[keep[n]] for n, c in left.costs.items()}
    memory = {n: m[keep[n]] for n, m in left.memory.items()}
    edges = {(i, j): m[np.ix_(keep[i], keep[j])] for (i, j), m in left.edges.items()}
    size = sum(m.size for m in edges.values())
    if size > _ILP_VARIABLES and math.isfinite(bounds.upper):
        return None
    return _Model(ChoiceProblem(costs, memory, edges), limit)
