"""The fastest plan under a memory limit, and the least memory that a plan can do with.

Peak memory is the largest of one linear row per op (`liveness`). Prices on the rows turn

    min seconds(x)  subject to  row_p(x) ≤ limit for every op p

into the unconstrained problem that reductions and message passing solve well,

    min seconds(x) + Σ_p λ_p (row_p(x) − limit),

a lower bound for every λ ≥ 0. The best λ is found by column generation (Dantzig and Wolfe 1960):
a small LP over the plans met so far proposes λ, smoothed towards the best λ known (Wentges 1997),
and the plan that λ yields brings its own peak as a new row. Rows are made only where a plan peaks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pulp

from autopar.solver.descent import descend
from autopar.solver.ilp import Infeasible, Solution, solve_among, solve_problem
from autopar.solver.liveness import Liveness, priced
from autopar.solver.price import Decision, Price
from autopar.solver.problem import Assignment, ChoiceProblem, Row, evaluate

__all__ = ["Fit", "MemorySearch"]

_LEAST_ROUNDS = 12
_ROUNDS = 20
_PATIENCE = 3  # rounds that close the gap by less than _PROGRESS
_PROGRESS = 0.02
_POLISH_ROUNDS = 4
_RECOMBINED = 8  # plans
_ILP_SECONDS = 10.0
_HOPELESS_AFTER = 3
_HOPELESS = 1.2
_CLOSE = 5e-3  # relative gap at which the search stops


@dataclass(frozen=True, slots=True)
class Fit:
    """A plan with its price and its proof."""

    solution: Solution
    decision: Decision
    price: Price

    @property
    def peak(self) -> int:
        return self.price.peak.peak_bytes


class MemorySearch:
    """Plans of one problem under memory limits.

    Args:
        problem: without memory; its costs are seconds.
        liveness: makes the rows.
        decide: prices an assignment.
    """

    def __init__(
        self,
        problem: ChoiceProblem,
        liveness: Liveness,
        decide: Callable[[Solution], Fit],
    ) -> None:
        self.problem = ChoiceProblem(problem.costs, {}, problem.edges)
        self.liveness = liveness
        self.decide = decide
        self.rows: dict[int, Row] = {}
        self.fits: list[Fit] = []
        self.free: Fit | None = None
        self._rough: Fit | None = None

    def fastest(self) -> Fit:
        """The plan without any limit."""
        if self.free is None:
            self.free = self._keep(solve_problem(self.problem))
        return self.free

    def rough(self) -> Fit:
        """A plan without any limit, near the fastest, with a looser bound."""
        if self._rough is None:
            self._rough = self.free or self._keep(solve_problem(self.problem, exact=False))
        return self._rough

    def _keep(self, solution: Solution) -> Fit:
        """Price a solution, remember it, and make the row of the op where it peaks."""
        fit = self.decide(solution)
        self.fits.append(fit)
        position = fit.price.peak.index
        if position not in self.rows:
            self.rows[position] = self.liveness.row(position)
        return fit

    def _solve(self, prices: dict[int, float], scale: float) -> Solution:
        """The best assignment of the problem with priced rows; a bound, without the ILP."""
        return solve_problem(priced(self.problem, prices, self.rows, scale), exact=False)

    def _as_plan(self, chosen: Assignment, like: Solution, bound: float, status: str) -> Solution:
        seconds = evaluate(self.problem, chosen)[0]
        return Solution(
            chosen=dict(chosen),
            objective=seconds,
            bound=min(bound, seconds),
            status=status,
            seconds=like.seconds,
            variables=like.variables,
            constraints=like.constraints,
        )

    def least(self, enough: int = 0) -> Fit:
        """The plan of least peak found, or the first whose peak is at most `enough` bytes.

        With `enough`, it gives up early where the first rounds come nowhere near.

        Prices grow on the rows where the plans peak (multiplicative weights).
        """
        free = self.rough()
        best = min(self.fits, key=lambda fit: fit.peak)
        prices = {free.price.peak.index: 1.0}
        for turn in range(_LEAST_ROUNDS):
            hopeless = enough and turn >= _HOPELESS_AFTER and best.peak > _HOPELESS * enough
            if best.peak <= enough or hopeless:
                break
            total = sum(prices.values())
            # a little of the seconds, so that ties in memory go to the faster plan; less each turn,
            # as what sharding costs may be any multiple of what the free plan does
            scale = 0.1 ** (turn + 2) * best.peak / max(free.solution.objective, 1e-12)
            found = self._solve({p: w / total for p, w in prices.items()}, scale)
            fit = self._keep(self._as_plan(found.chosen, found, 0.0, "least memory"))
            if fit.peak < best.peak:
                best = fit
            index = fit.price.peak.index
            prices[index] = 2.0 * prices.get(index, total / len(prices) / 2.0)
        return best

    def within(self, limit: int, beat: float = math.inf) -> Fit | None:
        """The fastest plan whose peak is at most `limit` bytes; None if none was found.

        None too where no plan costs less than `beat` seconds.
        """
        free = self.rough()
        if free.solution.bound >= beat:
            return None
        if free.peak <= limit and self.fastest().peak <= limit:
            return self.fastest()
        best = self.least(enough=limit)
        if best.peak > limit:
            return None
        best = self._polish(best, limit)
        bound, center = free.solution.bound, dict[int, float]()
        gap, stalled = math.inf, 0
        for _ in range(_ROUNDS):
            best = min(
                (f for f in self.fits if f.peak <= limit), key=lambda f: f.solution.objective
            )
            if best.solution.objective - bound <= _CLOSE * best.solution.objective:
                break
            left = best.solution.objective - bound
            stalled = 0 if left < gap * (1 - _PROGRESS) else stalled + 1
            gap = min(gap, left)
            if stalled >= _PATIENCE:
                break
            proposal, reachable = self._master(limit)
            if reachable - bound <= _CLOSE * best.solution.objective:
                break
            prices = {p: 0.5 * (proposal[p] + center.get(p, 0.0)) for p in proposal}
            if not center:
                prices = proposal
            found = self._solve(prices, 1.0)
            value = found.bound - sum(prices.values()) * limit
            if value > bound:
                bound, center = value, prices
            if bound >= beat:
                return None
            self._keep(self._as_plan(found.chosen, found, 0.0, "candidate"))
        best = self._recombine(best, limit, bound)
        solution = self._as_plan(best.solution.chosen, best.solution, bound, "bounded")
        return self.decide(solution)

    def _polish(self, best: Fit, limit: int) -> Fit:
        """Local search from a plan that fits; a new peak beyond the limit becomes a row."""
        for _ in range(_POLISH_ROUNDS):
            chosen = descend(self.problem, self.rows.values(), limit, best.solution.chosen)
            fit = self._keep(self._as_plan(chosen, best.solution, 0.0, "candidate"))
            if fit.peak <= limit:
                return fit
        return best

    def _recombine(self, best: Fit, limit: int, bound: float) -> Fit:
        """The ILP, with the memory rows, over the states that the last plans met are made of."""
        near = sorted(self.fits, key=lambda f: abs(f.peak - limit))[:_RECOMBINED]
        keep = {
            node: np.unique([f.solution.chosen[node] for f in (best, *near)])
            for node in self.problem.costs
        }
        for _ in range(_POLISH_ROUNDS):
            if best.solution.objective - bound <= _CLOSE * best.solution.objective:
                break
            chosen = solve_among(self.problem, keep, self.rows.values(), limit, _ILP_SECONDS)
            if chosen is None:
                break
            fit = self._keep(self._as_plan(chosen, best.solution, 0.0, "candidate"))
            if fit.peak <= limit:
                best = min(best, fit, key=lambda f: f.solution.objective)
                break
        return self._polish(best, limit)

    def _master(self, limit: int) -> tuple[dict[int, float], float]:
        """Prices that maximise the least priced cost of the plans met, and that cost."""
        unit = max(f.solution.objective for f in self.fits)
        cap = 1e3 * unit
        master = pulp.LpProblem("prices", pulp.LpMaximize)
        reach = master.add_variable("reach", upBound=cap)
        price = {
            p: master.add_variable(f"price_{k}", lowBound=0, upBound=cap)
            for k, p in enumerate(self.rows)
        }
        master.setObjective(pulp.LpAffineExpression({reach: 1.0}))
        for fit in self.fits:
            terms = {reach: 1.0}
            for p, row in self.rows.items():
                terms[price[p]] = -(row.value(fit.solution.chosen) - limit) / limit
            master += pulp.LpAffineExpression(terms) <= fit.solution.objective
        master.solve(pulp.HiGHS(msg=False, threads=1, random_seed=0))
        if master.sol_status != pulp.LpSolutionOptimal:
            raise Infeasible("the LP of memory prices has no solution")
        found = {p: (v.value() or 0.0) / limit for p, v in price.items()}
        return found, float(reach.value() or 0.0)
