"""The memory-limited problem with its rows priced into the costs: bounds, and plans near them.

For prices λ ≥ 0 on the rows of `liveness`,

    min_x  scale · seconds(x) + Σ_p λ_p row_p(x)

has neither rows nor a limit, so that reductions and message passing solve it. Rows are made where
plans peak. What no row touches is folded away once (`reduce`), and the prices act on what is left.
Less the prices times a limit, that is a bound under the limit, whichever it is: rows know of none.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.solver.discrete.descent import descend
from autopar.solver.discrete.ilp import Prepared, solve_among, solve_problem, solve_whole
from autopar.solver.discrete.problem import Assignment, ChoiceProblem, Row, evaluate
from autopar.solver.discrete.reduce import Reduced, reduce_problem
from autopar.solver.liveness import Liveness
from autopar.solver.row_at import HOST_ROW, RowAt

__all__ = ["Allowed", "Column", "Relaxation"]

_AMONG_GAP = 1e-3  # relative to the seconds of the fastest plan that fits
_SMALL = 1000  # pairs of states
_JOINED = 3  # plans
_RECOMBINED = 16  # plans
_ALIKE = 5e-3  # plans whose seconds and bytes differ by less are alike
_REPAIRS = (1.0, 3.0, 10.0, 30.0, 100.0)

# of each state of a node whether it may be taken; a node that is missing may take all
Allowed = Mapping[Hashable, NDArray[np.bool_]]


class _Asked(NamedTuple):
    """Prices that the problem was solved with, by row, and the scale of its seconds."""

    scale: float
    prices: frozenset[tuple[RowAt, float]]

    @property
    def on_host(self) -> bool:
        """True if host memory has a price: its scale is another for each limit."""
        return any(row == HOST_ROW for row, _ in self.prices)


@dataclass(slots=True, eq=False)
class Column:
    """A plan with its seconds and the bytes of each row; both are linear in the plan."""

    chosen: Assignment
    seconds: float
    num_bytes: dict[RowAt, float]

    @property
    def peak(self) -> float:
        """Of the rows known so far, as `liveness` counts them."""
        return max(self.num_bytes.values())

    def within(self, allowed: Allowed) -> bool:
        """True if every state is allowed."""
        return all(mask[self.chosen[node]] for node, mask in allowed.items())


@dataclass(frozen=True, slots=True)
class _Core:
    """What is left of the problem and of its rows when nodes without bytes are folded."""

    reduced: Reduced
    rows: dict[RowAt, Row]
    touched: tuple[Hashable, ...]

    def inward(self, chosen: Assignment) -> dict[Hashable, int] | None:
        """States of the core's nodes, by its own numbers; None if one of them is gone."""
        found: dict[Hashable, int] = {}
        for node in self.reduced.problem.costs:
            kept, state = self.reduced.kept[node], chosen[node]
            at = int(np.searchsorted(kept, state))
            if at == len(kept) or kept[at] != state:
                return None
            found[node] = at
        return found


class Relaxation:
    """Plans and bounds of one problem under prices on its rows.

    Args:
        problem: its costs are seconds.
        liveness: makes the rows.
        known: of the same states at other costs; its rows and plans are taken over.
    """

    def __init__(
        self, problem: ChoiceProblem, liveness: Liveness, known: Relaxation | None = None
    ) -> None:
        self.problem = problem
        self.liveness = liveness
        self.rows: dict[RowAt, Row] = {}
        self.columns: list[Column] = []
        if known is not None:
            self._take_over(known)
        self._core: _Core | None = None
        self._recombined: set[tuple[tuple[object, ...], ...]] = set()
        self._solved: dict[_Asked, tuple[Column, float]] = {}  # plans and bounds of priced costs

    def _take_over(self, known: Relaxation) -> None:
        """Rows but that of host memory, whose scale may be another, and plans that are possible."""
        self.rows = {p: row for p, row in known.rows.items() if p != HOST_ROW}
        for column in known.columns:
            seconds = evaluate(self.problem, column.chosen)
            sizes = {p: column.num_bytes[p] for p in self.rows}
            if sizes and math.isfinite(seconds):
                self.columns.append(Column(column.chosen, seconds, sizes))

    def renew(self, host_scale: float) -> None:
        """Forget what holds for one limit only."""
        self._recombined.clear()
        self._solved = {asked: told for asked, told in self._solved.items() if not asked.on_host}
        self.liveness.host_scale = host_scale
        if self.rows.pop(HOST_ROW, None) is not None:
            self._core = None
            for column in self.columns:
                column.num_bytes.pop(HOST_ROW, None)

    def rest(self) -> None:
        """Let go of tables that are soon made again."""
        self._core = None

    def bound(self, limit: float) -> float:
        """Seconds that no plan within a limit can beat, by all prices tried so far."""
        told = (
            (value - math.fsum(price for _, price in asked.prices) * limit) / asked.scale
            for asked, (_, value) in self._solved.items()
        )
        return max(told, default=0.0)

    def add_row(self, at: RowAt) -> bool:
        """The row of a moment; False if it is known."""
        if at in self.rows:
            return False
        row = self.rows[at] = self.liveness.row(at)
        for column in self.columns:
            column.num_bytes[at] = row.value(column.chosen)
        self._core = None
        return True

    def column(self, chosen: Assignment) -> Column:
        """Remember a plan."""
        seconds = evaluate(self.problem, chosen)
        sizes = {position: row.value(chosen) for position, row in self.rows.items()}
        column = Column(dict(chosen), seconds, sizes)
        self.columns.append(column)
        return column

    @property
    def core(self) -> _Core:
        if self._core is None:
            touched = {node for row in self.rows.values() for node in row.nodes}
            touched |= {n for row in self.rows.values() for pair in row.edges for n in pair}
            reduced = reduce_problem(self.problem, touched)
            rows = {p: row.among(reduced.kept) for p, row in self.rows.items()}
            left = tuple(n for n in reduced.problem.costs if n in touched)
            self._core = _Core(reduced, rows, left)
        return self._core

    def solve(
        self, prices: Mapping[RowAt, float], scale: float = 1.0, allowed: Allowed | None = None
    ) -> tuple[Column, float]:
        """A plan near the least priced cost, and a bound of that cost.

        Raises:
            Infeasible: nothing is possible among the allowed states.
        """
        asked = _Asked(scale, frozenset((p, price) for p, price in prices.items() if price))
        if not allowed and asked in self._solved:
            return self._solved[asked]
        core = self.core
        problem = _priced(core.reduced.problem, prices, core.rows, scale)
        for node, mask in (allowed or {}).items():
            kept = mask[core.reduced.kept[node]]
            problem.costs[node] = np.where(kept, problem.costs[node], np.inf)
        reduced = reduce_problem(problem, changed=core.touched)
        known = self._nearest(prices, scale, allowed or {})
        found = solve_problem(problem, exact=False, prepared=Prepared(reduced), known=known)
        column = self.column(core.reduced.expand(found.chosen))
        always = sum(price * core.rows[position].constant for position, price in prices.items())
        value = found.bound + scale * core.reduced.offset + always
        if not allowed:
            self._solved[asked] = column, value
        return column, value

    def _nearest(
        self, prices: Mapping[RowAt, float], scale: float, allowed: Allowed
    ) -> list[dict[Hashable, int]]:
        """Of the plans known, those of least priced cost, as states of the core."""

        def cost(column: Column) -> float:
            return scale * column.seconds + sum(prices[p] * column.num_bytes[p] for p in prices)

        within = sorted((c for c in self.columns if c.within(allowed)), key=cost)
        inward = (self.core.inward(column.chosen) for column in within)
        return list(islice((states for states in inward if states is not None), _JOINED))

    def repair(self, column: Column, prices: Mapping[RowAt, float], limit: float) -> Column | None:
        """A plan near another one whose rows keep to the limit; None if local search finds none.

        Local search first follows growing prices until the rows fit, then the seconds.
        """
        core = self.core
        chosen = core.inward(column.chosen)
        if chosen is None:
            return None
        rows = list(core.rows.values())
        if not any(prices.values()):
            largest = max(column.num_bytes, key=lambda p: column.num_bytes[p])
            prices = {largest: column.seconds / limit}
        factors = iter(_REPAIRS)
        while any(row.value(chosen) > limit for row in rows):
            factor = next(factors, None)
            if factor is None:
                return None
            dear = {position: factor * price for position, price in prices.items()}
            problem = _priced(core.reduced.problem, dear, core.rows)
            chosen = descend(problem, (), math.inf, chosen)
        chosen = descend(core.reduced.problem, rows, limit, chosen)
        return self.column(core.reduced.expand(chosen))

    @property
    def is_small(self) -> bool:
        """True if the ILP of all states takes no longer than a few rounds of prices."""
        return sum(m.size for m in self.core.reduced.problem.edges.values()) <= _SMALL

    def whole(self, limit: float, below: float) -> tuple[Column | None, float]:
        """The best plan by the rows known that costs less than some seconds, and a bound."""
        core = self.core
        reduced, offset = core.reduced, core.reduced.offset
        gap = _AMONG_GAP * below
        rows = core.rows.values()
        chosen, bound = solve_whole(reduced.problem, rows, limit, gap, below - offset)
        return (None if chosen is None else self.column(reduced.expand(chosen))), bound + offset

    def near(self, prices: Mapping[RowAt, float], limit: float) -> list[Column]:
        """Unlike plans: the lightest, the fastest, those near a limit, and the least priced."""
        columns = self.columns

        def priced(column: Column) -> float:
            over = sum(v * column.num_bytes.get(p, 0.0) for p, v in prices.items())
            return column.seconds + over

        ends = [min(columns, key=lambda c: c.peak), min(columns, key=lambda c: c.seconds)]
        fitting = [c for c in columns if c.peak <= limit]
        ends += sorted(fitting, key=lambda c: c.seconds)[:1]
        near = sorted(columns, key=lambda c: abs(c.peak - limit))
        known = _unlike((*ends, *near), 1e-9)[: _RECOMBINED // 2]
        others = _unlike(sorted(columns, key=priced), _ALIKE)
        return _unlike((*known, *others), 1e-9)[:_RECOMBINED]

    def recombine(self, columns: list[Column], limit: float, below: float) -> Column | None:
        """The best plan of the states that some plans are made of.

        None if the ILP finds none of less than `below` seconds, or has been run on these states.
        """
        core = self.core
        inward = [c for c in (core.inward(column.chosen) for column in columns) if c is not None]
        keep = {n: np.unique([c[n] for c in inward]) for n in core.reduced.problem.costs}
        key = (tuple(core.rows), *(tuple(states.tolist()) for states in keep.values()))
        if not inward or key in self._recombined:
            return None
        self._recombined.add(key)
        fitting = [c.seconds for c in self.columns if c.peak <= limit]
        gap = _AMONG_GAP * min(fitting or [c.seconds for c in columns])
        chosen = solve_among(core.reduced.problem, keep, core.rows.values(), limit, gap, below)
        return None if chosen is None else self.column(core.reduced.expand(chosen))


def _unlike(columns: Sequence[Column], step: float) -> list[Column]:
    """The first of each group of plans whose seconds and bytes differ by less than a step."""
    known: dict[tuple[int, ...], Column] = {}
    for column in columns:
        key = tuple(round(math.log(max(x, 1e-30)) / step) for x in (column.seconds, column.peak))
        known.setdefault(key, column)
    return list(known.values())


def _priced(problem: ChoiceProblem, prices: Mapping[RowAt, float], rows: Mapping[RowAt, Row],
           scale: float = 1.0) -> ChoiceProblem:  # fmt: skip
    """`scale` · problem plus the rows at their prices."""
    costs = {node: cost * scale for node, cost in problem.costs.items()}
    edges = problem.edges
    if scale != 1.0:
        edges = {pair: matrix * scale for pair, matrix in edges.items()}
    total = ChoiceProblem(costs, dict(edges))
    for position, price in prices.items():
        if price:
            rows[position].price_into(total, price)
    return total
