"""The LPs of column generation: prices on memory rows from the plans met so far.

With plans k of seconds c_k and bytes r_pk, the prices that promise the best bound under a limit m:

    max ρ   subject to   ρ − Σ_p λ_p (r_pk − m) ≤ c_k  for every k,   λ ≥ 0,  ρ ≤ cap,

and the weights for which the lightest plan met is heaviest (a game of plans against rows):

    max ρ   subject to   ρ ≤ Σ_p w_p r_pk  for every k,   Σ_p w_p = 1,  w ≥ 0.

The dual values of the first are the mixture of plans that its bound stands for (Dantzig and Wolfe
1960).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pulp

from autopar.solver.discrete.highs import HiGHS
from autopar.solver.discrete.ilp import Infeasible
from autopar.solver.relaxed import Column
from autopar.solver.row_at import RowAt

__all__ = ["Proposal", "best_prices", "heaviest_weights"]


@dataclass(frozen=True, slots=True)
class Proposal:
    """Prices in seconds per byte, the bound they could reach, and the share of each plan in it."""

    prices: dict[RowAt, float]
    reachable: float
    shares: list[float]


def best_prices(
    columns: Sequence[Column], positions: Sequence[RowAt], limit: float, cap: float
) -> Proposal:
    """Prices that maximise the least priced cost of the plans met.

    Args:
        columns: the plans.
        positions: the rows.
        limit: bytes.
        cap: seconds that the answer need not exceed.
    """
    master = pulp.LpProblem("prices", pulp.LpMaximize)
    reach = master.add_variable("reach", upBound=cap)
    price = {
        p: master.add_variable(f"price_{k}", lowBound=0, upBound=1e4 * cap)
        for k, p in enumerate(positions)
    }
    master.setObjective(pulp.LpAffineExpression({reach: 1.0}))
    rows = []
    for column in columns:
        terms = {price[p]: -(column.num_bytes[p] - limit) / limit for p in positions}
        row = pulp.LpAffineExpression({reach: 1.0, **terms}) <= column.seconds
        master += row
        rows.append(row)
    _solve(master)
    prices = {p: (v.value() or 0.0) / limit for p, v in price.items()}
    return Proposal(prices, float(reach.value() or 0.0), [abs(float(r.pi or 0.0)) for r in rows])


def heaviest_weights(columns: Sequence[Column], positions: Sequence[RowAt]) -> dict[RowAt, float]:
    """Weights of the rows, of sum 1, for which the lightest of the plans is heaviest."""
    unit = max(column.peak for column in columns)
    master = pulp.LpProblem("weights", pulp.LpMaximize)
    reach = master.add_variable("reach")
    weight = {p: master.add_variable(f"weight_{k}", lowBound=0) for k, p in enumerate(positions)}
    master.setObjective(pulp.LpAffineExpression({reach: 1.0}))
    master += pulp.LpAffineExpression(dict.fromkeys(weight.values(), 1.0)) == 1
    for column in columns:
        terms = {weight[p]: -column.num_bytes[p] / unit for p in positions}
        master += pulp.LpAffineExpression({reach: 1.0, **terms}) <= 0
    _solve(master)
    return {p: v.value() or 0.0 for p, v in weight.items()}


def _solve(master: pulp.LpProblem) -> None:
    master.solve(HiGHS())
    if master.sol_status != pulp.LpSolutionOptimal:
        raise Infeasible(f"the LP of memory {master.name} has no solution")
