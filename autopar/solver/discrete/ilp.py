"""Solves the problem: exact reductions, elimination or bounds, then the integer program.

Bounds rule out states, and what they leave open may be narrow enough to eliminate where the whole
problem was not; so are the states that look best, among which the optimum nearly always is. The
program (`program`) is built in PuLP and solved by HiGHS.
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import highspy
import numpy as np
import pulp

from autopar.errors import AutoparError
from autopar.solver.discrete.eliminate import MAX_ENTRIES, MOST_ENTRIES, is_narrow, minimise
from autopar.solver.discrete.highs import HiGHS
from autopar.solver.discrete.messages import Bounds, MessagePassing
from autopar.solver.discrete.problem import Assignment, ChoiceProblem, Indices, Row, evaluate
from autopar.solver.discrete.program import SECONDS, Program
from autopar.solver.discrete.reduce import Reduced, reduce_problem

__all__ = ["Infeasible", "Prepared", "Solution", "solve_among", "solve_problem", "solve_whole"]

_ILP_VARIABLES = 60_000
_AMONG_GAP = 1e-3
_OPTIMAL = 1e-6
_EFFORT = 40_000  # rows × nodes of the ILP
_LEAST_NODES = 20
# sweeps of message passing, and the gap at which they end
_CLOSE = 200, 1e-6
_SWEEPS = (10, 20, 40)  # behind which what looks best is tried
_MORE_SWEEPS = (100, 200)  # where the bound is far, and has risen still
_FAR = 0.05  # gap that says little of an assignment
_RISING = 0.01  # of the bound
_LIKELY = 1200  # states of that
_ROUGH = 1e-3  # gap at which it ends
_WIDE = 0.02  # gap: more, and as many states as are soon eliminated are tried
_PROVED = 0.01  # gap: more, and an exact search takes some seconds
_SOON = 1 << 26  # entries of tables
_FEWER = 0.8  # of the states, in turns, until so few are eliminated


class Infeasible(AutoparError):
    """No assignment satisfies the problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """An assignment with its proof.

    Attributes:
        chosen: state of every node.
        objective: seconds, recomputed from the assignment.
        bound: no assignment costs less.
        seconds, variables, constraints: of the solver run.
    """

    chosen: dict[Hashable, int]
    objective: float
    bound: float
    seconds: float
    variables: int
    constraints: int

    @property
    def gap(self) -> float:
        """(objective − bound) / objective."""
        return max(0.0, (self.objective - self.bound) / self.objective) if self.objective else 0.0


class Prepared:
    """A reduced problem with what has been found out about it: solving it again goes on from there.

    Args:
        reduced: the problem.
    """

    def __init__(self, reduced: Reduced) -> None:
        self.reduced = reduced

    @cached_property
    def least(self) -> Bounds | None:
        """The optimum, where the graph is narrow enough to eliminate its nodes."""
        return _minimum(self.reduced.problem)

    @cached_property
    def passing(self) -> MessagePassing:
        """Bounds of what is too wide for that."""
        return MessagePassing(self.reduced.problem)

    def bounds(self, exact: bool, proved: bool) -> Bounds:
        """The optimum or bounds of it; the closest that can be had without the ILP if `exact`."""
        if self.least is not None:
            return self.least
        found = self._rough(proved)
        if exact and not _closed(found):
            lower = found.lower
            most = MOST_ENTRIES if found.gap > _PROVED else MAX_ENTRIES
            found = self._of_open(found, most) or self.passing.run(*_CLOSE)
            if not _closed(found):
                found = self._of_open(found) or found
            found = replace(found, lower=max(lower, found.lower))
        return found

    def _rough(self, proved: bool) -> Bounds:
        """Bounds by a few sweeps, with the optimum among the states that look best then."""
        lower, before, is_far = -math.inf, math.inf, True
        for sweeps in (*_SWEEPS, *_MORE_SWEEPS):
            if sweeps in _MORE_SWEEPS and not is_far:
                break
            found = self.passing.run(sweeps, _ROUGH)
            if found.gap > _ROUGH:
                found = self._with_likeliest(found)
            is_far = found.gap > _FAR and found.lower - lower > _RISING * abs(found.lower)
            lower = max(lower, found.lower)
            if found.gap <= _ROUGH:
                break
            if not proved and not is_far and found.upper >= before * (1 - _ROUGH):
                break  # more sweeps would raise the bound alone
            before = found.upper
        if found.gap > _WIDE:
            found = self._with_likeliest(found, self._most(), _SOON)
            lower = max(lower, found.lower)
        return replace(found, lower=lower)

    def _most(self) -> int:
        """How many of the states that look best are soon eliminated."""
        count = self.passing.num_states
        while count > _LIKELY:
            keep, _ = self.passing.likeliest(count)
            states = {node: len(numbers) for node, numbers in keep.items()}
            if is_narrow(states, self.reduced.problem.edges, _SOON):
                break
            count = int(_FEWER * count)
        return count

    def _with_likeliest(
        self, found: Bounds, count: int = _LIKELY, max_entries: int = MAX_ENTRIES
    ) -> Bounds:
        """The bounds with the optimum among the states that look best, and what others cost."""
        keep, rest = self.passing.likeliest(count)
        likely = self._among(keep, max_entries)
        if likely is None:
            return found
        if likely.upper < found.upper:
            self.passing.know(likely.upper, likely.chosen)
            found = replace(found, upper=likely.upper, chosen=likely.chosen)
        return replace(found, lower=max(found.lower, min(likely.lower, rest, found.upper)))

    def _of_open(self, bounds: Bounds, max_entries: int = MAX_ENTRIES) -> Bounds | None:
        """The optimum among the states that the bounds leave open, if these are narrow enough."""
        return self._among(bounds.keep, max_entries) if math.isfinite(bounds.upper) else None

    def _among(
        self, keep: Mapping[Hashable, Indices], max_entries: int = MAX_ENTRIES
    ) -> Bounds | None:
        """The optimum among some states, if they are narrow enough and go together."""
        if not all(map(len, keep.values())):
            return None
        reduced = reduce_problem(_among(self.reduced.problem, keep))
        try:
            found = _minimum(reduced.problem, max_entries)
        except Infeasible:
            return None
        if found is None:
            return None
        states = reduced.expand(found.chosen)
        chosen = {node: int(keep[node][state]) for node, state in states.items()}
        least = found.lower + reduced.offset
        return Bounds(least, least, chosen, {}, chosen)


def _minimum(problem: ChoiceProblem, max_entries: int = MAX_ENTRIES) -> Bounds | None:
    """The least cost by elimination; None if that takes too large tables.

    Raises:
        Infeasible: no assignment is possible.
    """
    found = minimise(problem, max_entries)
    if found is None:
        return None
    least, chosen = found
    if not math.isfinite(least):
        raise Infeasible("every assignment is impossible")
    return Bounds(least, least, chosen, {}, chosen)


def _among(problem: ChoiceProblem, keep: Mapping[Hashable, Indices]) -> ChoiceProblem:
    """The problem with some of the states of each node."""
    return ChoiceProblem(
        {n: c[keep[n]] for n, c in problem.costs.items()},
        {(i, j): m[np.ix_(keep[i], keep[j])] for (i, j), m in problem.edges.items()},
    )


def _run(program: Program, gap: float, below: float = math.inf) -> float:
    """Solve to a gap in seconds; returns the proved bound.

    Only solutions that cost less than `below` are looked for; the bound is then of no use.

    Effort is limited by nodes, fewer of them where each has more rows, as a clock would make plans
    depend on the machine.
    """
    nodes = max(_LEAST_NODES, _EFFORT // max(program.prob.numConstraints(), 1))
    ceiling = below * SECONDS - program.constants[0]
    solver = HiGHS(
        gap_abs=gap * SECONDS,
        mip_max_nodes=nodes,
        **({"objective_bound": ceiling} if math.isfinite(ceiling) else {}),
    )
    program.prob.solve(solver)
    if program.prob.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        raise Infeasible(f"the solver says {pulp.LpStatus[program.prob.status]}")
    bound = float(program.prob.solverModel.getInfo().mip_dual_bound) + program.constants[0]
    return bound / SECONDS


def solve_problem(
    problem: ChoiceProblem,
    *,
    exact: bool = True,
    proved: bool = True,
    prepared: Prepared | None = None,
    known: Sequence[Assignment] = (),
) -> Solution:
    """Minimise a problem: exact reductions, then bounds, then the ILP on what they leave open.

    The ILP is not run where the bounds already meet, where so many states are open that it would
    not end in time, or not `exact`; the gap then says how far the assignment can be from the
    optimum.

    Args:
        problem: to solve.
        exact: run the ILP, and message passing to its end; else a few sweeps, with what looks best
            between them solved exactly: mostly within a part in a thousand.
        proved: the bound is of use; else a few sweeps end where the assignment gets no better.
        prepared: what is known of the problem, if it has been reduced or solved before.
        known: possible assignments; where message passing finds none, its labels are joined with
            theirs, which is a far smaller ILP than that of all states.

    Raises:
        Infeasible: no assignment is possible.
    """
    started = time.perf_counter()
    prepared = prepared or Prepared(reduce_problem(problem))
    reduced, left = prepared.reduced, prepared.reduced.problem
    if any(not np.isfinite(cost).any() for cost in left.costs.values()):
        raise Infeasible("some node has no possible state")
    bounds = prepared.bounds(exact, proved)
    lower, local = bounds.lower, bounds.chosen
    variables = constraints = 0
    if not _closed(bounds):
        model = None
        if exact or not (bounds.chosen or known):
            model = _model_of_open(left, bounds)
        if model is not None:
            lower = max(lower, _run(model, _OPTIMAL * _size(bounds)))
            variables, constraints = model.prob.numVariables(), model.prob.numConstraints()
            local = {n: int(bounds.keep[n][state]) for n, state in model.states().items()}
    found = reduced.expand(local or bounds.latest)
    chosen = found if local else _joined(problem, [*known, found])
    objective = evaluate(problem, chosen)
    if not math.isfinite(objective):
        raise Infeasible("every assignment is impossible")
    return Solution(
        chosen=chosen,
        objective=objective,
        bound=min(lower + reduced.offset, objective),
        seconds=time.perf_counter() - started,
        variables=variables,
        constraints=constraints,
    )


def _joined(problem: ChoiceProblem, tried: Sequence[Assignment]) -> dict[Hashable, int]:
    """The best assignment of the states of some assignments, of which one at least is possible."""
    keep = {node: np.unique([states[node] for states in tried]) for node in problem.costs}
    costs = [cost for cost in (evaluate(problem, t) for t in tried) if math.isfinite(cost)]
    found = solve_among(problem, keep, (), math.inf, _AMONG_GAP * abs(min(costs, default=0.0)))
    if found is None:
        raise Infeasible("no known assignment is possible")
    return found


def solve_among(
    problem: ChoiceProblem,
    keep: Mapping[Hashable, Indices],
    rows: Iterable[Row],
    limit: float,
    gap: float,
    below: float = math.inf,
) -> dict[Hashable, int] | None:
    """An assignment of the given states under memory rows, within a gap of the best in seconds.

    None if none was found that costs less than `below` seconds.
    """
    among = _among(problem, keep)
    program = Program(among, [row.among(keep) for row in rows], limit)
    try:
        _run(program, gap, below)
    except Infeasible:
        return None
    states = program.states()
    if evaluate(program.problem, states) >= below:
        return None
    return {n: int(keep[n][state]) for n, state in states.items()}


def solve_whole(
    problem: ChoiceProblem, rows: Iterable[Row], limit: float, gap: float, below: float
) -> tuple[dict[Hashable, int] | None, float]:
    """The best assignment under memory rows that costs less than some seconds, and a bound.

    Args:
        problem: small.
        rows: of bytes.
        limit: on each of them.
        gap: in seconds, at which the ILP ends.
        below: seconds.

    Returns:
        None where none is below, or none was found; and seconds that none is below.
    """
    program = Program(problem, list(rows), limit)
    try:
        bound = _run(program, gap, below)
    except Infeasible:
        model = program.prob.solverModel
        ended = model.getModelStatus() == highspy.HighsModelStatus.kSolutionLimit
        lower = float(model.getInfo().mip_dual_bound) + program.constants[0]
        return None, min(below, lower / SECONDS) if ended else below
    states = program.states()
    return (states if evaluate(problem, states) < below else None), min(bound, below)


def _closed(bounds: Bounds) -> bool:
    return bounds.gap <= _OPTIMAL


def _size(bounds: Bounds) -> float:
    """Seconds that the optimum is near to."""
    known = [abs(x) for x in (bounds.lower, bounds.upper) if math.isfinite(x)]
    return max(known, default=0.0)


def _model_of_open(left: ChoiceProblem, bounds: Bounds) -> Program | None:
    """The ILP over the states that the bounds leave open; None if it is too large to be worth it.

    Without any assignment at hand it is built whatever its size.
    """
    among = _among(left, bounds.keep)
    size = sum(m.size for m in among.edges.values())
    if size > _ILP_VARIABLES and math.isfinite(bounds.upper):
        return None
    return Program(among)
