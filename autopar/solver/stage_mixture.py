"""The LP of column generation for pipelines: the stages' plans that make a step short together.

With P, F, I, W and E the seconds of the parts of a stage, which are those of a mixture of its
plans, b when rank r begins, g when its first gradient is there, d when its last input gradient is
done, h a transfer, and of m forwards all but n ahead of the first gradient,

    b_r >= P_r                       b_r >= b_(r-1) + F_(r-1) + h
    g_r >= g_(r+1) + I_(r+1) + h     g_last >= b_last + F_last
    d_r >= b_r + m (F_r + I_r)       d_r >= g_r + n_r F_r + m I_r       d_r >= d_(r+1) + h + I_r
    T >= b_r + m (F_r + I_r + W_r) + E_r
    T >= g_r + n_r F_r + m (I_r + W_r) + E_r
    T >= d_r + W_r + E_r

T is minimised. It is what `core/soonest.py` says, where stages may be mixtures and memory has room.
Dual values tell what a second of each part of a stage adds to the step: plans that are made for
these are the ones to add (Dantzig and Wolfe 1960).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pulp

from autopar.core.flights import Waits
from autopar.solver.highs import HiGHS
from autopar.solver.ilp import Infeasible

__all__ = ["Mixture", "best_mixture"]

_Terms = Mapping[pulp.LpVariable, float]


@dataclass(frozen=True, slots=True)
class Mixture:
    """Seconds of a step whose stages are mixtures of plans, and what those of each part count."""

    step_s: float
    waits: tuple[Waits, ...]


def best_mixture(
    options: Sequence[Sequence[Sequence[float]]],
    microbatches: int,
    ahead: Sequence[int],
    transfer_s: Sequence[float],
) -> Mixture:
    """The mixtures with which a step takes least.

    Args:
        options: of each rank's stage, the seconds of the parts of its plans in the order of
            `Waits`, those of turns by microbatch.
        microbatches: of the step.
        ahead: forwards that each rank may begin ahead of its first gradient.
        transfer_s: over the boundary behind each rank but the last.

    Raises:
        Infeasible: the solver finds no solution.
    """
    return _Master(options, microbatches, ahead, transfer_s).solved()


class _Master:
    def __init__(
        self,
        options: Sequence[Sequence[Sequence[float]]],
        microbatches: int,
        ahead: Sequence[int],
        transfer_s: Sequence[float],
    ) -> None:
        self.unit = max(sum(plans[0]) for plans in options) * microbatches or 1.0
        self.turns = microbatches
        self.lp = pulp.LpProblem("stages", pulp.LpMinimize)
        self.step = self._variable("step")
        self.parts: list[list[pulp.LpVariable]] = []
        self.rows: list[list[pulp.LpConstraint]] = []
        for r, plans in enumerate(options):
            self._mix(r, plans)
        hops = [seconds / self.unit for seconds in transfer_s]
        begun = self._begin(hops)
        self._end(begun, ahead, hops)

    def _variable(self, name: str) -> pulp.LpVariable:
        return self.lp.add_variable(name, lowBound=0)

    def _mix(self, r: int, plans: Sequence[Sequence[float]]) -> None:
        """The seconds of a rank's parts are those of a mixture of plans."""
        shares = [self._variable(f"share_{r}_{k}") for k in range(len(plans))]
        self.lp += pulp.LpAffineExpression(dict.fromkeys(shares, 1.0)) == 1
        parts = [self._variable(f"{part}_{r}") for part in Waits._fields]
        rows = []
        for k, part in enumerate(parts):
            theirs = {
                share: -plan[k] / self.unit for share, plan in zip(shares, plans, strict=True)
            }
            row = pulp.LpAffineExpression({part: 1.0, **theirs}) == 0
            self.lp += row
            rows.append(row)
        self.parts.append(parts)
        self.rows.append(rows)

    def _later(self, value: pulp.LpVariable, terms: _Terms, constant: float = 0.0) -> None:
        """A value is no less than a sum."""
        less = {variable: -factor for variable, factor in terms.items() if factor}
        self.lp += pulp.LpAffineExpression({value: 1.0, **less}) >= constant

    def _begin(self, hops: Sequence[float]) -> list[pulp.LpVariable]:
        begun: list[pulp.LpVariable] = []
        for r, (prepare, *_) in enumerate(self.parts):
            begun.append(self._variable(f"begun_{r}"))
            self._later(begun[r], {prepare: 1.0})
            if r:
                self._later(begun[r], {begun[r - 1]: 1.0, self.parts[r - 1][1]: 1.0}, hops[r - 1])
        return begun

    def _end(
        self, begun: Sequence[pulp.LpVariable], ahead: Sequence[int], hops: Sequence[float]
    ) -> None:
        m, last = self.turns, len(begun) - 1
        returns = [self._variable(f"returns_{r}") for r in range(len(begun))]
        done = [self._variable(f"done_{r}") for r in range(len(begun))]
        for r in range(last, -1, -1):
            _, forward, inputs, weights, finish = self.parts[r]
            left = {forward: m - ahead[r], inputs: m}
            if r == last:
                self._later(returns[r], {begun[r]: 1.0, forward: 1.0})
            else:
                there = {returns[r + 1]: 1.0, self.parts[r + 1][2]: 1.0}
                self._later(returns[r], there, hops[r])
                self._later(done[r], {done[r + 1]: 1.0, inputs: 1.0}, hops[r])
            self._later(done[r], {begun[r]: 1.0, forward: m, inputs: m})
            self._later(done[r], {returns[r]: 1.0, **left})
            behind = {weights: m, finish: 1.0}
            self._later(self.step, {begun[r]: 1.0, forward: m, inputs: m, **behind})
            self._later(self.step, {returns[r]: 1.0, **left, **behind})
            self._later(self.step, {done[r]: 1.0, weights: 1.0, finish: 1.0})

    def solved(self) -> Mixture:
        self.lp.setObjective(pulp.LpAffineExpression({self.step: 1.0}))
        self.lp.solve(HiGHS())
        if self.lp.sol_status != pulp.LpSolutionOptimal:
            raise Infeasible("the LP of a pipeline's stages has no solution")
        turn = 1.0 / self.turns
        often = Waits(1.0, turn, turn, turn, 1.0)
        waits = tuple(
            Waits(*(abs(float(row.pi or 0.0)) * n for row, n in zip(rows, often, strict=True)))
            for rows in self.rows
        )
        return Mixture(float(self.step.value() or 0.0) * self.unit, waits)
