"""Plans of one problem that were met: each priced once, with the row of memory where it peaks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

from autopar.solver.discrete.ilp import Prepared, Solution, solve_problem
from autopar.solver.discrete.problem import Assignment, ChoiceProblem, evaluate
from autopar.solver.discrete.reduce import reduce_problem
from autopar.solver.found import Fit, Met
from autopar.solver.liveness import Liveness
from autopar.solver.relaxed import Column, Relaxation
from autopar.solver.row_at import RowAt

__all__ = ["CLOSE", "UNLIMITED", "MetPlans"]

UNLIMITED = 1 << 62
"""A limit that no plan reaches: none is priced for its memory to know that it fits."""

CLOSE = 5e-3
"""Relative gap at which prices and local search stop."""

_NEAR = 1.01  # rows may exceed the bytes that a plan is priced at


class MetPlans:
    """Plans of one problem that were met, priced under one memory limit.

    Args:
        problem: its costs are seconds.
        liveness: makes the rows.
        decide: prices an assignment.
        limit: bytes.
        known: a search of the same states at other costs, to go on with.

    Attributes:
        bound: no plan within the limit costs less seconds.
        best: the fastest plan found within the limit.
        free: the plan without any limit, if it was asked for.
        least_bytes: no plan peaks lower by its rows, but such as take absurdly long.
    """

    def __init__(
        self,
        problem: ChoiceProblem,
        liveness: Liveness,
        decide: Callable[[Solution], Fit],
        limit: int,
        known: MetPlans | None = None,
    ) -> None:
        self.problem = problem
        self.relaxed: Relaxation = Relaxation(problem, liveness, known.relaxed if known else None)
        self.decide = decide
        self.limit = limit
        self.bound = 0.0
        self.least_bytes = 0.0
        self.best: Fit | None = None
        self.free: Fit | None = None
        self.beat = math.inf
        self._solution: Solution | None = None
        self._rough: Fit | None = None
        self._least: Fit | None = None
        self._lightest: Fit | None = None  # under any limit
        self._prices: dict[RowAt, float] = {}

    def renew(self, limit: int, decide: Callable[[Solution], Fit], host_scale: float) -> None:
        """Search within another limit, with the rows, plans and bounds that are known."""
        kept = self.bound if limit <= self.limit else 0.0  # less memory never makes a step faster
        self.limit, self.decide = limit, decide
        self.relaxed.renew(host_scale)
        known = (self.free, self._rough, self._lightest)
        fits = [fit and replace(fit, host_scale=host_scale) for fit in known]
        self.free, self._rough, self._lightest = fits
        for fit in filter(None, fits):
            self.relaxed.add_row(fit.row)
        self.best, self._least, self.beat, self._prices = None, None, math.inf, {}
        if self._solution is not None:
            self.bound = max(self._solution.bound, self.relaxed.bound(limit), kept)

    def rest(self) -> None:
        """Let go of tables that are soon made again."""
        self.__dict__.pop("_prepared", None)
        self.relaxed.rest()

    @property
    def has_limit(self) -> bool:
        """True if some plans may be too large."""
        return self.limit < UNLIMITED

    @property
    def target(self) -> float:
        """Seconds of the best plan known, of this problem or of another one."""
        return min(self.beat, self.best.solution.objective if self.best else math.inf)

    @property
    def done(self) -> bool:
        """True if no plan can be better than the best known by more than `CLOSE`."""
        return self.bound >= self.target * (1 - CLOSE)

    @cached_property
    def _prepared(self) -> Prepared:
        return Prepared(reduce_problem(self.problem))

    def fastest(self, proved_within: int = UNLIMITED) -> Fit:
        """The plan without any limit, proved as closely as can be up to so many bytes."""
        if self.free is None and proved_within < UNLIMITED and self.rough().peak > proved_within:
            self.free = self.rough()
        if self.free is None:
            self.free = self._keep(solve_problem(self.problem, prepared=self._prepared))
        return self.free

    def approximate(self, proved: bool = True) -> Solution:
        """An assignment without any limit, near the fastest, with a looser bound."""
        if self._solution is None:
            self._solution = solve_problem(
                self.problem, exact=False, proved=proved, prepared=self._prepared
            )
            self.bound = self._solution.bound
        return self._solution

    def is_slow(self, beat: float) -> bool:
        """True if no plan, whatever the limit, costs less than some seconds to speak of."""
        return self.approximate().bound >= beat * (1 - CLOSE)

    def rough(self) -> Fit:
        """The plan of that assignment."""
        if self._rough is None:
            self._rough = self._keep(self.approximate())
        return self._rough

    def _keep(self, solution: Solution) -> Fit:
        """Price a plan, and make the row of the op where it peaks."""
        fit = self.decide(solution)
        if self.limit >= UNLIMITED:
            return fit
        self.relaxed.add_row(fit.row)
        if fit.peak <= self.limit and solution.objective < self.target:
            self.best = fit
        return fit

    def _plan(self, chosen: Assignment) -> Solution:
        seconds = evaluate(self.problem, chosen)
        known = self.approximate()  # a bound comes with it
        bound = min(self.bound, seconds)
        return replace(known, chosen=dict(chosen), objective=seconds, bound=bound)

    def met(self) -> list[Met]:
        """The plans met so far, the unlimited one among them."""
        self.rough()
        priced = filter(None, (self.best, self.free, self._rough, self._least))
        return [
            *(Met(f.solution.chosen, f.solution.objective, f.peak) for f in priced),
            *(Met(c.chosen, c.seconds, c.peak) for c in self.relaxed.columns if c.num_bytes),
        ]

    def seed(self, chosen: Assignment) -> Fit:
        """Consider a plan that is known from another problem."""
        self.approximate()
        return self._keep(self._plan(chosen))

    def consider(self, column: Column) -> None:
        """Price a plan that may fit and be the fastest; else repair it and try again.

        A peak beyond the limit becomes a row, with which the plan is repaired anew.
        """
        found: Column | None = column
        for _ in range(4):
            if found is None or found.seconds >= self.target * (1 - 1e-9):
                return
            if found.peak <= _NEAR * self.limit:
                known = len(self.relaxed.rows)
                fit = self._keep(self._plan(found.chosen))
                if fit.peak <= self.limit:
                    return
                if len(self.relaxed.rows) == known and found.peak <= self.limit:
                    return
            found = self.relaxed.repair(found, self._prices, self.limit)
