"""What the step of a pipeline takes at least, as a linear program in what its stages do.

With P, F, I, W, E and U the seconds of a stage in a step of m microbatches (in front of the turns,
its forwards, input and weight gradients, behind the turns, and of the update, when all ranks are
there), summed over the stages of rank r where it has several, b when the rank begins, and h a
transfer,

    b_r >= P_r                       b_r >= b_(r-1) + F_(r-1) / m + h
    T >= b_r + F_r + I_r + W_r + E_r

where F_(r-1) is of the first of its stages. Where an input gradient may run without its weight
gradient, with one stage a rank, g when the first gradient is there, d when the last input gradient
is done, and n forwards at most ahead of the first gradient,

    g_r >= g_(r+1) + I_(r+1) / m + h     g_last >= b_last + F_last / m
    d_r >= b_r + F_r + I_r               d_r >= g_r + (1 - n_r / m) F_r + I_r
    d_r >= d_(r+1) + I_r / m + h
    T >= g_r + (1 - n_r / m) F_r + I_r + W_r + E_r
    T >= d_r + W_r / m + E_r

and where backwards run whole, e when the last one of a rank is done,

    e_r >= b_r + F_r + I_r + W_r         e_(r-1) >= e_r + (I_(r-1) + W_(r-1)) / m + h
    T >= e_r + E_r

of first stages again. Where the orders of all ranks are known, with several stages on each, every
action ends no sooner than the one before it on its rank and the one whose result it reads, by its
own seconds. T and the longest U are minimised. What holds for orders of which more is left open
holds for others, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import pulp

from autopar.core.schedule import Action, Orders
from autopar.solver.discrete.highs import HiGHS
from autopar.solver.pipelines.functionals import Weights

__all__ = ["Line", "StepLP"]

Terms: TypeAlias = Mapping[pulp.LpVariable, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What is known of the order in which the ranks of a pipeline work.

    Attributes:
        ranks, microbatches: of the pipeline.
        chunks: stages of each rank.
        transfer_s: over the boundary behind each rank but the last.
        ahead: forwards that each rank may begin ahead of its first gradient, with one stage a rank;
            None where nothing is known.
        whole: backwards run whole.
        orders: of each rank, with whole backwards; empty where nothing is known.
    """

    ranks: int
    microbatches: int
    transfer_s: Sequence[float]
    chunks: int = 1
    ahead: Sequence[int] | None = None
    whole: bool = False
    orders: Orders = ()


class StepLP:
    """The program; what stages do is to be required of `parts`.

    Args:
        line: of the ranks.
        unit: seconds that a step is near to, which the program counts in.

    Attributes:
        parts: seconds of each stage, as of `functionals.Weights`.
        begun, returns, done: of each rank, b, g and d; the last two where they are known.
        update: of all ranks, seconds behind all else.
    """

    def __init__(self, line: Line, unit: float) -> None:
        self.line = line
        self.unit = unit
        self.lp = pulp.LpProblem("step", pulp.LpMinimize)
        self.step = self.variable("step")
        self.parts = [
            [self.variable(f"{part}_{stage}") for part in Weights._fields]
            for stage in range(line.ranks * line.chunks)
        ]
        self.update = self.variable("update")
        self._hops = [seconds / unit for seconds in line.transfer_s]
        self.begun = self._begin()
        self.returns: list[pulp.LpVariable] = []
        self.done: list[pulp.LpVariable] = []
        if line.ahead is not None:
            self._split(self.begun, line.ahead)
        if line.whole:
            self._whole(self.begun)
        if line.orders:
            self._ordered(self.begun, line.orders)

    def variable(self, name: str) -> pulp.LpVariable:
        """Another variable, no less than 0."""
        return self.lp.add_variable(name, lowBound=0)

    def require(self, terms: Terms, at_least: float = 0.0) -> pulp.LpConstraint:
        """A sum is no less than a number."""
        row = pulp.LpAffineExpression({v: a for v, a in terms.items() if a}) >= at_least
        self.lp += row
        return row

    def later(self, value: pulp.LpVariable, *sums: Terms, hop: float = 0.0) -> None:
        """A value is no less than the sum of some sums."""
        less = defaultdict[pulp.LpVariable, float](float)
        for terms in sums:
            for variable, factor in terms.items():
                less[variable] -= factor
        self.require({value: 1.0, **less}, hop)

    def _of_rank(self, rank: int, *parts: int) -> dict[pulp.LpVariable, float]:
        """Some parts of all stages of a rank."""
        stages = self.parts[rank :: self.line.ranks]
        return {stage[part]: 1.0 for stage in stages for part in parts}

    def _begin(self) -> list[pulp.LpVariable]:
        begun: list[pulp.LpVariable] = []
        for r in range(self.line.ranks):
            begun.append(self.variable(f"begun_{r}"))
            self.later(begun[r], self._of_rank(r, 0))
            if r:
                forward = {self.parts[r - 1][1]: 1 / self.line.microbatches}
                self.later(begun[r], {begun[r - 1]: 1.0}, forward, hop=self._hops[r - 1])
            self.later(self.step, {begun[r]: 1.0}, self._of_rank(r, 1, 2, 3, 4))
            self.later(self.update, self._of_rank(r, 5))
        return begun

    def _split(self, begun: Sequence[pulp.LpVariable], ahead: Sequence[int]) -> None:
        m, last = self.line.microbatches, len(begun) - 1
        returns = self.returns = [self.variable(f"returns_{r}") for r in range(len(begun))]
        done = self.done = [self.variable(f"done_{r}") for r in range(len(begun))]
        for r in range(last, -1, -1):
            _, forward, inputs, weights, finish, _ = self.parts[r]
            left = {returns[r]: 1.0, forward: 1 - ahead[r] / m, inputs: 1.0}
            if r == last:
                self.later(returns[r], {begun[r]: 1.0, forward: 1 / m})
            else:
                there = {returns[r + 1]: 1.0, self.parts[r + 1][2]: 1 / m}
                self.later(returns[r], there, hop=self._hops[r])
                self.later(done[r], {done[r + 1]: 1.0, inputs: 1 / m}, hop=self._hops[r])
            self.later(done[r], {begun[r]: 1.0, forward: 1.0, inputs: 1.0})
            self.later(done[r], left)
            self.later(self.step, left, {weights: 1.0, finish: 1.0})
            self.later(self.step, {done[r]: 1.0, weights: 1 / m, finish: 1.0})

    def _whole(self, begun: Sequence[pulp.LpVariable]) -> None:
        m = self.line.microbatches
        ended = [self.variable(f"ended_{r}") for r in range(len(begun))]
        for r, end in enumerate(ended):
            self.later(end, {begun[r]: 1.0}, self._of_rank(r, 1, 2, 3))
            self.later(self.step, {end: 1.0}, self._of_rank(r, 4))
            if r:
                _, _, inputs, weights, *_ = self.parts[r - 1]
                backward = {inputs: 1 / m, weights: 1 / m}
                self.later(ended[r - 1], {end: 1.0}, backward, hop=self._hops[r - 1])

    def _ordered(self, begun: Sequence[pulp.LpVariable], orders: Orders) -> None:
        m = self.line.microbatches
        hops = [*self._hops, min(self._hops, default=0.0)]  # at last around to the first rank
        actions = [action for order in orders for action in order]
        ended = {a: self.variable(f"{a.kind}_{a.stage}_{a.microbatch}") for a in actions}
        for r, order in enumerate(orders):
            before = begun[r]
            for action in order:
                _, forward, inputs, weights, *_ = self.parts[action.stage]
                backward = {inputs: 1 / m, weights: 1 / m}
                took = {forward: 1 / m} if action.kind == "F" else backward
                self.later(ended[action], {before: 1.0}, took)
                source = _source(action, len(self.parts))
                if source is not None:
                    hop = hops[min(action.stage, source.stage) % self.line.ranks]
                    sent = source.stage != action.stage
                    self.later(ended[action], {ended[source]: 1.0}, took, hop=hop * sent)
                before = ended[action]
            self.later(self.step, {before: 1.0}, self._of_rank(r, 4))

    def solve(self, **options: float) -> bool:
        """Minimise the step; options as for `HiGHS`. False if no solution was found."""
        self.lp.setObjective(pulp.LpAffineExpression({self.step: 1.0, self.update: 1.0}))
        self.lp.solve(HiGHS(**options))
        return self.lp.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)

    @property
    def step_s(self) -> float:
        """Seconds of the step that was found."""
        return (float(self.step.value() or 0.0) + float(self.update.value() or 0.0)) * self.unit

    @property
    def bound_s(self) -> float:
        """Seconds that no step takes less than, as far as that is proved."""
        if not self.lp.isMIP():
            return self.step_s
        return float(self.lp.solverModel.getInfo().mip_dual_bound) * self.unit


def _source(action: Action, num_stages: int) -> Action | None:
    """The action whose result a forward or a whole backward reads."""
    if action.kind == "F":
        return replace(action, stage=action.stage - 1) if action.stage else None
    if action.stage + 1 == num_stages:
        return replace(action, kind="F")
    return replace(action, stage=action.stage + 1)
