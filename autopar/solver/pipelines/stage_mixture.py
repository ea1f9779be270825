"""The plans of a pipeline's stages that make a step short together, whole or as mixtures.

The linear program is that of `step_lp.py`, with the seconds of the parts of a stage those of a
mixture of its plans: what `core/soonest.py` says, where stages may be mixtures. A plan that holds
much has fewer forwards ahead of the first gradient, and its rank waits for microbatches to come
around. The dual values tell what a second of each part of a stage adds to the step: plans that are
made for these are the ones to add (Dantzig and Wolfe 1960). Of whole plans, it is an integer
program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pulp

from autopar.core.flights import Waits
from autopar.core.list_schedule import RankLoad, most_ahead
from autopar.core.soonest import most_held, rounds_of
from autopar.solver.discrete.ilp import Infeasible
from autopar.solver.pipelines.step_lp import Line, StepLP

__all__ = ["Mixture", "StageLoad", "best_mixture"]

_GAP = 1e-3  # of the step, at which the search of whole plans ends
_NODES = 100


@dataclass(frozen=True, slots=True)
class StageLoad:
    """What a rank does with a plan of its stage.

    Attributes:
        load: at the turns, in front of them, and what it holds.
        finish_s: seconds behind the turns.
        update_s: seconds behind that, when all ranks are done.
    """

    load: RankLoad
    finish_s: float = 0.0
    update_s: float = 0.0

    def seconds(self, turns: int) -> tuple[float, ...]:
        """Of the parts in a step of so many turns, in the order of `Waits`."""
        load = self.load
        at_turns = (turns * s for s in (load.forward_s, load.input_s, load.weight_s))
        return (load.begin_s, *at_turns, self.finish_s)


@dataclass(frozen=True, slots=True)
class Mixture:
    """A step whose stages are mixtures of plans.

    Attributes:
        step_s: its seconds.
        waits: what the seconds of each part of a stage count, but for what waits for memory; zeros
            for whole plans.
        most: which plan each stage has the largest share of.
    """

    step_s: float
    waits: tuple[Waits, ...]
    most: tuple[int, ...]


def best_mixture(
    options: Sequence[Sequence[StageLoad]],
    microbatches: int,
    transfer_s: Sequence[float],
    whole: bool = False,
) -> Mixture:
    """The mixtures, or whole plans, with which a step takes least.

    Args:
        options: plans of each stage, one a rank.
        microbatches: of the step.
        transfer_s: over the boundary behind each rank but the last.
        whole: of plans, no mixtures; near the best.

    Raises:
        Infeasible: the solver finds no solution.
    """
    master = _Master(options, microbatches, transfer_s, whole)
    limits = {"gap_abs": _GAP, "mip_max_nodes": _NODES} if whole else {}
    if not master.program.solve(**limits):
        raise Infeasible("the LP of a pipeline's stages has no solution")
    return Mixture(
        step_s=master.program.step_s,
        waits=tuple(map(master.waits, range(len(options)))),
        most=tuple(map(_largest, master.shares)),
    )


def _largest(shares: Sequence[pulp.LpVariable]) -> int:
    return max(range(len(shares)), key=lambda i: float(shares[i].value() or 0.0))


class _Master:
    """The program over shares of plans; arguments as of `best_mixture`."""

    def __init__(
        self,
        options: Sequence[Sequence[StageLoad]],
        microbatches: int,
        transfer_s: Sequence[float],
        whole: bool,
    ) -> None:
        self.options, self.turns = options, microbatches
        ranks = len(options)
        self.most = most_ahead(ranks, microbatches)
        unit = max(sum(plans[0].seconds(microbatches)) for plans in options) or 1.0
        self.program = StepLP(
            Line(ranks=ranks, microbatches=microbatches, transfer_s=transfer_s, ahead=self.most),
            unit,
        )
        self.shares = [
            [self._share(f"share_{r}_{k}", whole) for k in range(len(plans))]
            for r, plans in enumerate(options)
        ]
        self.rows = [self._mixed(r) for r in range(ranks)]
        around_s = 0.0  # a microbatch's way through the ranks behind, at the least
        for r in range(ranks - 1, -1, -1):
            self._wait_for_memory(r, around_s)
            loads = [plan.load for plan in options[r]]
            around_s += min(load.forward_s + load.input_s for load in loads)
            around_s += 2 * transfer_s[r - 1] if r else 0.0

    def _share(self, name: str, whole: bool) -> pulp.LpVariable:
        share = self.program.variable(name)
        if whole:
            share.cat, share.upBound = pulp.LpInteger, 1
        return share

    def _mixed(self, rank: int) -> list[pulp.LpConstraint]:
        """Rows: the parts of a stage take no less than in the mixture."""
        program, plans = self.program, self.options[rank]
        program.lp += pulp.LpAffineExpression(dict.fromkeys(self.shares[rank], 1.0)) == 1
        parts = zip(*(plan.seconds(self.turns) for plan in plans), strict=True)
        rows = [
            self._no_less(part, rank, seconds)
            for part, seconds in zip(program.parts[rank][:-1], parts, strict=True)
        ]
        self._no_less(program.update, rank, [plan.update_s for plan in plans])  # of all ranks
        return rows

    def _no_less(
        self, variable: pulp.LpVariable, rank: int, seconds: Sequence[float]
    ) -> pulp.LpConstraint:
        shares = zip(self.shares[rank], seconds, strict=True)
        mixture = {share: -s / self.program.unit for share, s in shares}
        return self.program.require({variable: 1.0, **mixture})

    def _wait_for_memory(self, rank: int, around_s: float) -> None:
        """Forwards behind the first gradient, and rounds, where plans hold much."""
        program, loads = self.program, [plan.load for plan in self.options[rank]]
        ahead = [min(self.most[rank], most_held(load, self.turns)) for load in loads]
        if min(ahead) < self.most[rank]:
            _, _, inputs, weights, finish, _ = program.parts[rank]
            left = program.variable(f"left_{rank}")
            left_s = [(self.turns - n) * x.forward_s for n, x in zip(ahead, loads, strict=True)]
            self._no_less(left, rank, left_s)
            gradients = {program.returns[rank]: 1.0, left: 1.0, inputs: 1.0}
            program.later(program.done[rank], gradients)
            program.later(program.step, gradients, {weights: 1.0, finish: 1.0})
        rounds = [rounds_of(load, self.turns) for load in loads]
        if max(rounds) > 1:
            held = program.variable(f"rounds_{rank}")
            round_s = (x.forward_s + around_s + x.input_s for x in loads)
            self._no_less(held, rank, [n * s for n, s in zip(rounds, round_s, strict=True)])
            program.later(program.done[rank], {program.begun[rank]: 1.0, held: 1.0})

    def waits(self, rank: int) -> Waits:
        """What the seconds of each part of a stage add to the step."""
        return Waits(*(abs(float(row.pi or 0.0)) for row in self.rows[rank]))
