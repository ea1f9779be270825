"""Plans the stages of one pipeline in their order, and runs them on the clock.

A search that has a faster plan need not see all stages: those that are planned, with the least that
the others can take, bound the step from below. Nor need it where one rank exceeds the limit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from autopar.codegen.stages import batch_bytes, flying
from autopar.core.flights import ALONE, flights, in_any_order
from autopar.core.graph import TracedModel
from autopar.core.placement import Layout
from autopar.core.plan import NodePlan, Plan
from autopar.core.schedule import AUTOMATIC, Kind, Orders
from autopar.core.transfers import port_of
from autopar.cost_model import Cluster
from autopar.cost_model.pipeline import simulate_pipeline
from autopar.cost_model.rank_memory import rank_memory, rank_peak
from autopar.cost_model.stages import (
    action_seconds,
    pipelined_time,
    transfer_seconds,
)
from autopar.errors import ConstraintError, InfeasiblePlanError
from autopar.search.own_orders import fastest_orders, least_seconds
from autopar.search.pipeline_plan import plan_of_stages
from autopar.search.stage_menus import Aim
from autopar.solver.fit import UNLIMITED
from autopar.solver.pipelines.pipeline_shape import PipelineShape
from autopar.solver.solve import fits
from autopar.solver.variant import host_is_short

if TYPE_CHECKING:
    from autopar.search.stage_planning import StagePlanner

__all__ = ["Pipeliner", "Stopped"]

_SHARINGS = 4  # rounds
_NO_AIMS: Mapping[int, Aim] = {}
_ROUNDING = 1e-9  # relative, of sums of seconds


class Stopped(Exception):
    """A pipeline that was given up before all of its stages were planned.

    Args:
        least_s: with its cuts it takes no less; 0 where it is not known to be slow.
        rank: that exceeds the memory limit.
        kinds: bytes by kind that it holds at its highest moment; empty where none exceeds it.
        cuts: of the pipeline.
    """

    def __init__(
        self,
        *,
        least_s: float = 0.0,
        rank: int = 0,
        kinds: Mapping[str, int] | None = None,
        cuts: tuple[str, ...] = (),
    ) -> None:
        super().__init__("too large" if kinds else f"takes {least_s} s at least")
        self.least_s = least_s
        self.rank = rank
        self.kinds = kinds or {}
        self.cuts = cuts


class Pipeliner:
    """Plans the stages of one pipeline.

    Args:
        planner: solves stages.
        shape, cuts: of the pipeline.
        cluster: with the mesh of one pipeline rank.
        orders: of each rank.
        free: without the memory limit.
        below_s: seconds that a plan must stay below, and a free one fit the limit, to be of use;
            else it is given up as soon as that is known. None: it is planned in any case.
        alone: plan stages for their own seconds, whatever others wait for.
        as_is: within the limit by placements, without recomputation and offload.
    """

    def __init__(
        self,
        planner: StagePlanner,
        shape: PipelineShape,
        cuts: tuple[str, ...],
        cluster: Cluster,
        orders: Orders,
        free: bool,
        below_s: float | None,
        alone: bool = False,
        as_is: bool = False,
    ) -> None:
        self.free = free
        self.as_is = as_is
        self.below_s = below_s
        self.planner = planner
        self.traced = planner.traced
        self.shape = shape
        self.cuts = cuts
        self.cluster = cluster
        self.orders = orders
        parts = planner.parts(shape.microbatches, cuts)
        batch = batch_bytes(self.traced, parts.microbatch)
        held = flights(orders)
        self.automatic = shape.schedule == AUTOMATIC
        if self.automatic:
            held = in_any_order(held, shape.size, shape.microbatches)
        if alone:
            held = tuple(replace(flight, waits=ALONE) for flight in held)
        self.parts = flying(parts, held, batch)
        self.limit = planner.limit
        self.stuck = 0  # the stage that did not fit last

    def run(self, time: Mapping[str, NodePlan]) -> Plan:
        """The plan of the step.

        Args:
            time: placements of all ops over the microbatches.

        Raises:
            Stopped: it is slower than asked for, or too large.
            InfeasiblePlanError: a stage does not fit.
        """
        plans = self._fitting()
        if self.automatic:
            self.order(plans, search=not self.free)
        return self.assembled(time, plans)

    def order(self, plans: Sequence[Plan], quick: bool = False, search: bool = False) -> None:
        """Make the orders of an automatic schedule for plans of the stages.

        Args:
            plans: of all stages.
            quick: of few orders; whether they fit is not known then, else they do if any was found.
            search: more orders; where stages are still exchanged, plans that would gain as much by
                a search of their own would seem slower than the ones there are.
        """
        turns, transfer_s = self.shape.microbatches, self._transfer_seconds(plans)
        found = fastest_orders(plans, transfer_s, turns, self.limit, self.orders, quick, search)
        self.orders = found or self.orders

    def assembled(self, time: Mapping[str, NodePlan], plans: Sequence[Plan]) -> Plan:
        """The plan of the step from those of its stages.

        Raises:
            InfeasiblePlanError: the host does not hold what goes there.
        """
        shifted = [self.parts.named(s, plan) for s, plan in enumerate(plans)]
        transfer_s = self._transfer_seconds(shifted)
        memory = rank_memory(self.orders, [p.predicted.held for p in plans])
        highest = max(memory, key=lambda kinds: sum(kinds.values()))
        clock = pipelined_time(shifted, self.orders, transfer_s, highest)
        peaks = tuple(sum(kinds.values()) for kinds in memory)
        found = plan_of_stages(self, time, shifted, clock, peaks)
        if not fits(found, self.cluster, UNLIMITED) and (not self.free or self.below_s is not None):
            raise host_is_short(
                self.cluster, self.limit, found.predicted.host_bytes,
                found.predicted.host_activation_bytes, found.predicted.peak_memory_bytes,
            )  # fmt: skip
        return found

    def _transfer_seconds(self, plans: Sequence[Plan]) -> list[float]:
        return transfer_seconds(self.parts.crossings(), plans, self.cluster, self.shape.size)

    def solve_for(self, aims: Mapping[int, Aim], last: int | None = None) -> list[Plan]:
        """Plans of the stages, up to one of them, for other aims than usual.

        Raises:
            ConstraintError: layouts do not go together.
            InfeasiblePlanError: a stage does not fit as it is.
        """
        count = len(self.parts.kinds) if last is None else last + 1
        return self._solve([None if self.free else self.limit] * count, aims)

    def holds(self, plans: Sequence[Plan]) -> bool:
        """True if no rank exceeds the limit."""
        return max(self._peaks(plans)) <= self.limit

    def _fitting(self) -> list[Plan]:
        """Plans of the stages, of which those of each rank fit the limit together.

        The stages of a rank do not peak at once. So each gets what it would take of a rank without
        a limit, and less if that is too much; in the end so little that they may peak at once.
        """
        count, chunks = len(self.parts.kinds), self.shape.chunks
        if self.free:
            return self._solve([None] * count)
        if chunks > 1:
            found = self._together()
            if found is not None:
                return found
        return self._solve([self.limit // chunks] * count)

    def _together(self) -> list[Plan] | None:
        """Plans of stages whose highest moments are not the same; None if none were found."""
        plans = self._solve([None] * len(self.parts.kinds))
        limits = [p.predicted.peak_memory_bytes for p in plans]
        least: dict[int, int] = {}
        for _ in range(_SHARINGS):
            peaks = self._peaks(plans)
            if max(peaks) <= self.limit:
                return plans
            limits = self._shares(limits, peaks, least)
            for _ in range(len(self.parts.stages.models)):
                try:
                    plans = self._solve(limits)
                    break
                except InfeasiblePlanError as error:
                    kind = self.parts.kinds[self.stuck]
                    least[kind] = (error.required_bytes or 0) // self.shape.chunks
                    limits = self._shares(limits, [self.limit], least)
            else:
                return None
        return plans if max(self._peaks(plans)) <= self.limit else None

    def _peaks(self, plans: Sequence[Plan]) -> list[int]:
        memory = rank_memory(self.orders, [p.predicted.held for p in plans])
        return [sum(kinds.values()) for kinds in memory]

    def _shares(
        self, limits: Sequence[int], peaks: Sequence[int], least: Mapping[int, int]
    ) -> list[int]:
        """Limits with which ranks of these peaks would just fit, none below what its kind needs."""
        shares: dict[int, int] = {}
        for number, kind in enumerate(self.parts.kinds):
            peak = max(peaks[number % len(peaks)], self.limit)
            share = max(limits[number] * self.limit // peak, least.get(kind, 0))
            shares[kind] = min(share, shares.get(kind, share))
        return [shares[kind] for kind in self.parts.kinds]

    def _solve(
        self, limits: Sequence[int | None], aims: Mapping[int, Aim] = _NO_AIMS
    ) -> list[Plan]:
        """Plans of the stages, each within a limit of its own.

        Raises:
            InfeasiblePlanError: one does not fit.
        """
        settled: dict[str, Layout] = {}
        plans: list[Plan] = []
        for number, kind in enumerate(self.parts.kinds[: len(limits)]):
            if number:
                settled.update(self._handed(self.parts.kinds[number - 1], kind, settled))
            try:
                plan = self.planner.solve(
                    self.parts,
                    self.cuts,
                    kind,
                    self.cluster,
                    settled,
                    limits[number],
                    aims.get(number, Aim()),
                    self.as_is,
                )
            except InfeasiblePlanError as error:
                self.stuck = number
                raise InfeasiblePlanError(
                    f"pipeline stage {number} of {self.shape.num_stages}: {error}",
                    memory_limit_bytes=self.limit,
                    required_bytes=(error.required_bytes or 0) * self.shape.chunks,
                    stage=number,
                ) from error
            plans.append(plan)
            if self.below_s is not None and self.shape.chunks == 1:
                self._check(plans, self.below_s)
            settled.update(_settled(self.parts.model(number), plan))
        return plans

    def _check(self, plans: Sequence[Plan], below_s: float) -> None:
        """Give up where the stages planned so far are too large or too slow.

        Raises:
            Stopped: they are.
        """
        last = len(plans) - 1
        held = plans[last].predicted.held
        assert held is not None
        kinds = rank_peak(self.orders, [held], last)
        if sum(kinds.values()) > self.limit:
            raise Stopped(rank=last, kinds=kinds, cuts=self.cuts)
        if math.isinf(below_s):
            return
        least_s = self._least_seconds(plans)
        if least_s >= below_s * (1 + _ROUNDING):
            raise Stopped(least_s=least_s)

    def _least_seconds(self, plans: Sequence[Plan]) -> float:
        """What the step takes at least, with these plans of its first stages."""
        if self.automatic:
            return least_seconds(plans, self.shape.microbatches)
        names, turn = self.planner.work.names, self.planner.turn(self.shape)
        starts = [names.index(cut) for cut in self.cuts]
        parts = [turn.of_turn(name) for name in ("forward", "backward", "inputs", "weights")]
        seconds: list[Mapping[Kind, float]] = [action_seconds(p) for p in plans]
        for row in list(zip(*(np.split(x, starts) for x in parts), strict=True))[len(plans) :]:
            forward, backward, inputs, weights = (float(x.sum()) for x in row)
            seconds.append({"F": forward, "B": backward, "I": inputs, "W": weights})
        prepare, finish = (
            [p.predicted.phases[part] for p in plans] + [0.0] * (len(self.orders) - len(plans))
            for part in ("prepare", "finish")
        )
        ends_s = simulate_pipeline(self.orders, seconds, begin_s=prepare).finish_s()
        return max(end + more for end, more in zip(ends_s, finish, strict=True))

    def _handed(self, below: int, kind: int, settled: Mapping[str, Layout]) -> dict[str, Layout]:
        """Layouts of what a stage of one kind exchanges with the next, by the names of the next.

        Raises:
            ConstraintError: what one sends is not what the other takes.
        """
        if kind == below + 1:
            return {}  # neighbours in the graph: the names are the same
        found: dict[str, Layout] = {}
        for phase in ("forward", "backward"):
            ours = self.parts.crossing(below, below + 1, phase)
            theirs = self.parts.crossing(kind - 1, kind, phase)
            if [(t.shape, t.dtype) for t in ours] != [(t.shape, t.dtype) for t in theirs]:
                raise ConstraintError(
                    f"equal stages of the pipeline cut at {list(self.cuts)} exchange unlike values"
                )
            for mine, other in zip(ours, theirs, strict=True):
                for name, twin in (
                    (mine.value, other.value),
                    (port_of(mine.value), port_of(other.value)),
                ):
                    if name in settled:
                        found[twin] = settled[name]
        return found


def _settled(model: TracedModel, plan: Plan) -> dict[str, Layout]:
    """Layouts of what goes over the cuts, by the port names of the stages that come later."""
    found: dict[str, Layout] = {}
    for spec in model.outputs:
        if spec.kind == "sent" and not spec.accumulated:
            found[spec.target] = plan.inputs[spec.port]
    for given in model.inputs:
        if given.kind == "received":
            found[f"port.{given.node}"] = plan.inputs[given.node]
    for name, layout in plan.parameters.items():
        found[f"port.gradient of {name}"] = layout
    return found
