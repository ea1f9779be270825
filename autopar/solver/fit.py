"""The fastest plan under a memory limit, and the least memory that a plan can do with.

Peak memory is the largest of one linear row per op (`liveness`). Prices on the rows turn

    min seconds(x)  subject to  row_p(x) ≤ limit for every op p

into the unconstrained problem that reductions and message passing solve well,

    min seconds(x) + Σ_p λ_p (row_p(x) − limit),

a lower bound for every λ ≥ 0. The best λ is found by column generation (Dantzig and Wolfe 1960):
a small LP over the plans met so far proposes λ, smoothed towards the best λ known (Wentges 1997),
and the plan that λ yields brings its own peak as a new row. Rows are made only where a plan peaks.
Plans beyond the limit are repaired by local search, and those met are recombined by an ILP. What
gap is left is closed by branching on the states of the nodes that weigh most (`branch`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

from autopar.solver.branch import Part, Split, branch, split_states
from autopar.solver.found import Fit, Met
from autopar.solver.ilp import Infeasible, Prepared, Solution, solve_problem
from autopar.solver.liveness import Liveness
from autopar.solver.multipliers import Proposal, best_prices, heaviest_weights
from autopar.solver.problem import Assignment, ChoiceProblem, evaluate
from autopar.solver.reduce import reduce_problem
from autopar.solver.relaxed import Allowed, Column, Relaxation

__all__ = ["UNLIMITED", "Fit", "MemorySearch"]

UNLIMITED = 1 << 62
"""A limit that no plan reaches: none is priced for its memory to know that it fits."""

_LEAST_ROUNDS = 16
_FIRST_ROUNDS = 4
_ROUNDS = 20
_PATIENCE = 3  # rounds that close the gap by less than _PROGRESS
_PROGRESS = 0.02
_RECOMBINATIONS = 2
_SPREAD = (0.3, 3.0, 10.0, 100.0)  # times the best prices, for plans that differ
_PARTS = 24  # that branching bounds
_PART_ROUNDS = 3
_FAR = 0.05  # gap beyond which branching on single nodes is not begun
_WORTH = 0.1  # of the gap: where a few parts close less, branching ends
_SEEDS = 4  # plans met under other limits
_ABSURD = 1e6  # times as long as the unlimited plan: nothing fits
_CLOSE = 5e-3  # relative gap at which prices and local search stop
_PROVED = 1e-2  # and branching
_NEAR = 1.01  # rows may exceed the bytes that a plan is priced at


class MemorySearch:
    """Plans of one problem under one memory limit.

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
    """

    def __init__(
        self,
        problem: ChoiceProblem,
        liveness: Liveness,
        decide: Callable[[Solution], Fit],
        limit: int,
        known: MemorySearch | None = None,
    ) -> None:
        self.problem = problem
        self.relaxed: Relaxation = Relaxation(problem, liveness, known.relaxed if known else None)
        self.decide = decide
        self.limit = limit
        self.bound = 0.0
        self.best: Fit | None = None
        self.free: Fit | None = None
        self.beat = math.inf
        self._solution: Solution | None = None
        self._rough: Fit | None = None
        self._least: Fit | None = None
        self._lightest: Fit | None = None  # under any limit
        self._is_spent = False  # nothing lighter is found by looking on
        self._has_spread = False
        self._root: Part | None = None
        self._prices: dict[int, float] = {}

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
        self.best, self._least, self._root = None, None, None
        self.beat, self._has_spread, self._prices = math.inf, False, {}
        if self._solution is not None:
            self.bound = max(self._solution.bound, self.relaxed.bound(limit), kept)

    def rest(self) -> None:
        """Let go of tables that are soon made again."""
        self.__dict__.pop("_prepared", None)
        self.relaxed.rest()

    def _seed_known(self) -> None:
        """Consider the fastest of the plans met under other limits that keeps to this one."""
        within = (c for c in self.relaxed.columns if c.num_bytes and c.peak <= self.limit)
        for column in sorted(within, key=lambda c: c.seconds)[:_SEEDS]:
            if self._keep(self._plan(column.chosen, "bounded")).peak <= self.limit:
                return

    @property
    def target(self) -> float:
        """Seconds of the best plan known, of this problem or of another one."""
        return min(self.beat, self.best.solution.objective if self.best else math.inf)

    @property
    def done(self) -> bool:
        """True if no plan can be better than the best known by more than `_CLOSE`."""
        return self.bound >= self.target * (1 - _CLOSE)

    # --- plans ---------------------------------------------------------------------------------
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
        return self.approximate().bound >= beat * (1 - _CLOSE)

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

    def _plan(self, chosen: Assignment, status: str) -> Solution:
        seconds = evaluate(self.problem, chosen)
        known = self.approximate()  # a bound comes with it
        bound = min(self.bound, seconds)
        return replace(known, chosen=dict(chosen), objective=seconds, bound=bound, status=status)

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
        return self._keep(self._plan(chosen, "bounded"))

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
                fit = self._keep(self._plan(found.chosen, "bounded"))
                if fit.peak <= self.limit:
                    return
                if len(self.relaxed.rows) == known and found.peak <= self.limit:
                    return
            found = self.relaxed.repair(found, self._prices, self.limit)

    # --- least memory --------------------------------------------------------------------------
    def least(self) -> Fit:
        """The plan of least peak found, or the first whose peak is at most the limit.

        Weights on the rows follow the plans met: those under which the lightest is heaviest.
        """
        free = self.rough()
        if self._least is not None:
            return self._least
        self.relaxed.column(free.solution.chosen)
        weights: dict[int, float] = {}
        lightest = min(filter(None, (free, self._lightest, self.best)), key=lambda f: f.peak)
        for turn in range(0 if self._is_spent else _LEAST_ROUNDS):
            # where nothing fits, the least memory is what the user is told
            if lightest.peak <= self.limit or self.bound >= self.target:
                break
            wanted = heaviest_weights(self.relaxed.columns, list(self.relaxed.rows))
            weights = {p: 0.5 * (w + weights.get(p, w)) for p, w in wanted.items()}
            # a little of the seconds, so that ties in memory go to the faster plan; less each turn,
            # as what sharding costs may be any multiple of what the free plan does
            scale = 0.1 ** min(turn + 2, 8) * lightest.peak / max(free.solution.objective, 1e-12)
            column, value = self.relaxed.solve(weights, scale)
            self.bound = max(self.bound, (value - sum(weights.values()) * self.limit) / scale)
            fit = self._keep(self._plan(column.chosen, "least memory"))
            lightest = min(lightest, fit, key=lambda f: f.peak)
        else:
            self._is_spent = True  # no limit has been looked at
        self._least = self._lightest = lightest
        return lightest

    def _is_hopeless(self) -> bool:
        """True where every plan within the limit is slower than the best known, or absurdly so."""
        return self.bound >= min(self.target, _ABSURD * self.approximate().objective)

    # --- under the limit -----------------------------------------------------------------------
    def start(self, beat: float, price: float = 0.0, proved_within: int = UNLIMITED) -> Fit | None:
        """A fast plan within the limit that costs less than `beat` seconds; None if none is found.

        Args:
            beat: seconds of the best plan of another problem.
            price: seconds per byte that gave a good bound there.
            proved_within: bytes up to which a plan that no limit binds is proved as closely as can
                be.
        """
        self.beat = beat
        self.approximate()
        if self.bound >= beat * (1 - _CLOSE):
            self.rest()
            return None
        free = None if self.limit >= UNLIMITED else self.rough()
        if free is None or (
            free.peak <= self.limit and self.fastest(proved_within).peak <= self.limit
        ):
            self.best = self.fastest(proved_within)
            self.bound = max(self.bound, self.best.solution.bound)
            return self.best
        self._seed_known()
        if math.isinf(beat):
            self.least()
        elif price:
            self._prices = {free.row: price}
        if not self._is_hopeless():
            # the ILP waits until the bounds of all problems say which one to spend it on
            self._round(free, _FIRST_ROUNDS, recombine=False)
        return self.best

    def finish(self, beat: float, least: float = math.inf) -> Fit | None:
        """Raise the bound until it is near the best plan known, and find better ones on the way.

        Args:
            beat: seconds of the best plan of another problem.
            least: seconds from which on its bound tells nothing.
        """
        self.beat = beat
        if self.limit >= UNLIMITED:
            return self.best  # there is nothing to put a price on
        if math.isinf(self.target):
            return None  # there is nothing to be near to
        if not self.done and not self._is_hopeless():
            self._round(self.rough(), _ROUNDS)
        near = self.target * (1 - _FAR) <= self.bound < least
        if self._root is not None and near and not self._proved(self.bound):
            bound = branch(
                self._root,
                lambda part, allowed: self._bounded(part, allowed, _PART_ROUNDS),
                self._split,
                self._proved,
                lambda before, now: now - before >= _WORTH * (self.target - before),
                _PARTS,
            )
            self.bound = max(self.bound, bound)
            self._recombine()
        return self.best

    def _round(self, free: Fit, rounds: int, recombine: bool = True) -> None:
        """Prices on the rows, for the whole problem."""
        if all(column.chosen != free.solution.chosen for column in self.relaxed.columns):
            self.relaxed.column(free.solution.chosen)
        if self._root is None:
            self._root = Part({}, self._prices, self.bound, self.relaxed.columns[0])
        self._root = self._bounded(self._root, {}, rounds)
        self.bound = max(self.bound, self._root.bound if self._root else math.inf)
        if recombine or math.isinf(self.target):
            self._recombine()

    def _proved(self, bound: float) -> bool:
        return bound >= self.target * (1 - _PROVED)

    @property
    def price(self) -> float:
        """Seconds per byte of the limit at the best bound."""
        return sum(self._prices.values())

    def _cap(self) -> float:
        if math.isfinite(self.target):
            return self.target
        return 1e3 * max(column.seconds for column in self.relaxed.columns)

    def _proposal(self, allowed: Allowed) -> tuple[list[Column], Proposal]:
        columns = [c for c in self.relaxed.columns if c.within(allowed)]
        return columns, best_prices(columns, list(self.relaxed.rows), self.limit, self._cap())

    def _bounded(self, above: Part, allowed: Allowed, rounds: int) -> Part | None:
        """The plans of some states, with the best bound that a few rounds of prices find.

        Every round's plan is considered. None where nothing is possible.
        """
        best = replace(above, allowed=allowed)
        prices, stalled = dict(above.prices), 0
        for turn in range(rounds):
            if best.bound >= self.target * (1 - _CLOSE):
                break
            if turn or not prices:
                _, proposal = self._proposal(allowed)
                if proposal.reachable - best.bound <= _CLOSE / 5 * self._cap():
                    break
                known = best.prices or proposal.prices
                prices = {p: 0.5 * (v + known.get(p, 0.0)) for p, v in proposal.prices.items()}
            try:
                column, value = self.relaxed.solve(prices, 1.0, allowed)
            except Infeasible:
                return None
            value -= sum(prices.values()) * self.limit
            gained = value - best.bound
            stalled = 0 if gained >= _PROGRESS * (self._cap() - best.bound) else stalled + 1
            if gained > 0:
                best = Part(allowed, prices, value, column)
            elif not turn:
                best = replace(best, latest=column)
            if not allowed:
                self._prices = dict(best.prices)
            self.consider(column)
            if stalled >= _PATIENCE:
                break
        return best

    def _split(self, part: Part) -> Split | None:
        columns, proposal = self._proposal(part.allowed)
        return split_states(self.relaxed, part, columns, proposal.shares)

    def _recombine(self) -> None:
        """The ILP, with the memory rows, over the states that the nearest plans are made of."""
        if self._prices and not self._has_spread and not self.done:
            self._has_spread = True
            for factor in _SPREAD:
                self.consider(
                    self.relaxed.solve({p: factor * v for p, v in self._prices.items()})[0]
                )
        for _ in range(_RECOMBINATIONS):
            if self.done:
                return
            near = self.relaxed.near(self._prices, self.limit)
            column = self.relaxed.recombine(near, self.limit, self._worthwhile())
            before = len(self.relaxed.rows)
            if column is None:
                return
            self.consider(column)
            if len(self.relaxed.rows) == before:
                return

    def _worthwhile(self) -> float:
        """Seconds that a plan must stay below: by more where another problem has the best one."""
        own = self.best is not None and self.best.solution.objective <= self.beat
        return self.target * (1 - (0.0 if own else _CLOSE))
