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
from collections.abc import Callable, Mapping
from dataclasses import replace

from autopar.solver.branch import Part, Split, branch, split_states
from autopar.solver.discrete.ilp import Infeasible, Solution
from autopar.solver.found import Fit
from autopar.solver.met_plans import CLOSE, UNLIMITED, MetPlans
from autopar.solver.multipliers import Proposal, best_prices, heaviest_weights
from autopar.solver.relaxed import Allowed, Column
from autopar.solver.row_at import HOST_ROW, RowAt

__all__ = ["UNLIMITED", "Fit", "MemorySearch"]

_LEAST_ROUNDS = 16
_TIES = 1e-8  # of the peak, what the seconds of the free plan count at least
_LIGHTER = 1e-3  # of the least peak: what it may be from the bound of all
_HEAVIER = 1.1  # times what plans take, rows hardly ever count
_SLOW = 1e3  # times as long as the unlimited plan: lighter plans are of no use
_FIRST_ROUNDS = 4
_ROUNDS = 20
_PATIENCE = 3  # rounds that close the gap by less than _PROGRESS
_PROGRESS = 0.02
_RECOMBINATIONS = 2
_SPREAD = (0.3, 3.0, 10.0, 100.0)  # times the best prices, for plans that differ
_PEAKS = 8  # rows that are added to the ILP of a small problem
_PARTS = 24  # that branching bounds
_PART_ROUNDS = 3
_FAR = 0.05  # gap beyond which branching on single nodes is not begun, nor prices tried on
_WORTH = 0.1  # of the gap: where a few parts close less, branching ends
_SEEDS = 4  # plans met under other limits
_SAME = 0.1  # prices that differ by less, relatively, tell the same
_ABSURD = 1e6  # times as long as the unlimited plan: nothing fits
_PROVED = 1e-2  # and branching


class MemorySearch(MetPlans):
    """Looks for the fastest plan within the limit, and for what no plan within it is below.

    Arguments and attributes as of `MetPlans`.
    """

    _is_spent = False  # nothing lighter is found by looking on
    _met_at: tuple[float, ...] = ()  # prices
    _has_spread = False
    _root: Part | None = None
    _is_far = False  # the least priced cost is not found

    def renew(self, limit: int, decide: Callable[[Solution], Fit], host_scale: float) -> None:
        """Search within another limit, with the rows, plans and bounds that are known."""
        super().renew(limit, decide, host_scale)
        self._root, self._has_spread, self._is_far, self._met_at = None, False, False, ()

    def _seed_known(self) -> None:
        """Consider the fastest of the plans met under other limits that keeps to this one."""
        within = (c for c in self.relaxed.columns if c.num_bytes and c.peak <= self.limit)
        for column in sorted(within, key=lambda c: c.seconds)[:_SEEDS]:
            if self._keep(self._plan(column.chosen)).peak <= self.limit:
                return

    # --- least memory --------------------------------------------------------------------------
    def least(self, rival: float = math.inf) -> Fit:
        """The plan of least peak found, or the first whose peak is at most the limit.

        Weights on the rows follow the plans met: those under which the lightest is heaviest. With
        a limit of 0 it is looked for to the end.

        Args:
            rival: bytes that it must stay below to be of use.
        """
        free = self.rough()
        if self._least is not None:
            return self._least
        self.relaxed.column(free.solution.chosen)
        weights: dict[RowAt, float] = {}
        lightest = min(filter(None, (free, self._lightest, self.best)), key=lambda f: f.peak)
        doubted = False  # the second round tells if anything is lighter than the limit, or a rival
        for turn in range(0 if self._is_spent else _LEAST_ROUNDS):
            if lightest.peak <= self.limit or self.bound >= self.target:
                break
            if self.limit and self._is_hopeless():
                break
            met = min(c.peak for c in self.relaxed.columns)
            if self.least_bytes >= min(rival * _HEAVIER, met * (1 - _LIGHTER)):
                break
            weights = self._weights(weights)
            # a little of the seconds, so that ties in memory go to the faster plan; less each turn,
            # as what sharding costs may be any multiple of what the free plan does
            part = _TIES if doubted else 0.1 ** (turn + 2)
            scale = max(part, _TIES) * lightest.peak / max(free.solution.objective, 1e-12)
            column, value = self.relaxed.solve(weights, scale)
            self.bound = max(self.bound, (value - self.limit) / scale)
            if not weights.get(HOST_ROW):  # its bytes are no device's
                slow_s = _SLOW * free.solution.objective
                self.least_bytes = max(self.least_bytes, value - scale * slow_s)
            wanted = _HEAVIER * (self.limit or rival)
            doubted = not turn and value - scale * column.seconds > wanted
            fit = self._keep(self._plan(column.chosen))
            lightest = min(lightest, fit, key=lambda f: f.peak)
        else:
            self._is_spent = True  # no limit has been looked at
        self._least = self._lightest = lightest
        return lightest

    def _weights(self, before: Mapping[RowAt, float]) -> dict[RowAt, float]:
        """Weights of the rows for the lightest plan, of sum 1, smoothed towards those before."""
        wanted = heaviest_weights(self.relaxed.columns, list(self.relaxed.rows))
        mixed = {p: w + before.get(p, w) for p, w in wanted.items()}
        whole = sum(mixed.values())
        return {p: w / whole for p, w in mixed.items()}

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
        if self.bound >= beat * (1 - CLOSE):
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
        if not self.done and not self._is_hopeless() and not self._whole():
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

    def _whole(self) -> bool:
        """Solve a small problem as one ILP, with rows as plans peak; False if it is large."""
        for _ in range(_PEAKS):
            if not self.relaxed.is_small:
                return False
            known = len(self.relaxed.rows)
            column, bound = self.relaxed.whole(self.limit, self.target)
            self.bound = max(self.bound, bound)
            if column is None:
                return True
            if self._keep(self._plan(column.chosen)).peak <= self.limit:
                return True
            if len(self.relaxed.rows) == known:
                break
        return self.done

    def _proved(self, bound: float) -> bool:
        return bound >= self.target * (1 - _PROVED)

    @property
    def price(self) -> float:
        """Seconds per byte of the limit at the best bound."""
        return sum(self._prices.values())

    def meet(self, price: float) -> float | None:
        """Look for a plan that is fast where bytes have a price, if that was not done before.

        Args:
            price: seconds per byte of the rows that tell most of the limit, as far as is known.

        Returns:
            What no plan is below, in seconds and what its peak has beyond the limit at that price.
        """
        if not price or any(math.isclose(price, known, rel_tol=_SAME) for known in self._met_at):
            return None
        self._met_at += (price,)
        shares = self._prices if any(self._prices.values()) else {self.rough().row: 1.0}
        whole = sum(shares.values())
        _, value = self.relaxed.solve({p: price * share / whole for p, share in shares.items()})
        return value - price * self.limit

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
            if best.bound >= self.target * (1 - CLOSE):
                break
            if turn or not prices:
                _, proposal = self._proposal(allowed)
                if proposal.reachable - best.bound <= CLOSE / 5 * self._cap():
                    break
                known = best.prices or proposal.prices
                prices = {p: 0.5 * (v + known.get(p, 0.0)) for p, v in proposal.prices.items()}
            try:
                column, value = self.relaxed.solve(prices, 1.0, allowed)
            except Infeasible:
                return None
            priced_s = column.seconds + sum(v * column.num_bytes[p] for p, v in prices.items())
            is_far = value < priced_s * (1 - _FAR)
            value -= sum(prices.values()) * self.limit
            gained = value - best.bound
            stalled = 0 if gained >= _PROGRESS * (self._cap() - best.bound) else stalled + 1
            if gained > 0:
                best = Part(allowed, prices, value, column)
            elif not turn:
                best = replace(best, latest=column)
            if not allowed:
                self._prices, self._is_far = dict(best.prices), is_far
            self.consider(column)
            if stalled >= _PATIENCE or is_far:  # as with other prices
                break
        return best

    def _split(self, part: Part) -> Split | None:
        columns, proposal = self._proposal(part.allowed)
        return split_states(self.relaxed, part, columns, proposal.shares)

    def _recombine(self) -> None:
        """The ILP, with the memory rows, over the states that the nearest plans are made of."""
        if self._prices and not (self._has_spread or self._is_far or self.done):
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
        return self.target * (1 - (0.0 if own else CLOSE))
