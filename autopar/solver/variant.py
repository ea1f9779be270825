"""A step with a kind of recomputation and a place for the optimizer: its problem and its plans."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from autopar.core.block_kinds import Checkpoint
from autopar.core.constraints import AxisRole, Constraints
from autopar.core.graph import TracedModel
from autopar.core.placement import Layout
from autopar.core.recompute import recomputed
from autopar.core.units import format_bytes
from autopar.cost_model import Cluster
from autopar.errors import AutoparError, ConstraintError, InfeasiblePlanError
from autopar.solver.beside import run_beside
from autopar.solver.build import StepProblem, build_problem
from autopar.solver.clash import unconnected_op
from autopar.solver.discrete.ilp import Infeasible, Solution
from autopar.solver.discrete.problem import Assignment, evaluate
from autopar.solver.exclude import Excluded, exclude
from autopar.solver.fit import UNLIMITED, Fit, MemorySearch
from autopar.solver.liveness import Liveness
from autopar.solver.offers import Offers
from autopar.solver.overlap import ALL, Weights
from autopar.solver.pins import Pins
from autopar.solver.price import Decision, price
from autopar.solver.read_step import build_step
from autopar.solver.row_at import HOST_ROW
from autopar.solver.step import Step

__all__ = ["Search", "Variant", "host_is_short"]

_SURELY = 1.5  # times what a plan takes, rows never count


@dataclass(frozen=True, slots=True)
class Variant:
    """A search with one kind of recomputation, and the best plan that it found.

    `graph` is `traced` with the copies of that kind, or of each block's.
    """

    traced: TracedModel
    checkpoint: Checkpoint
    graph: TracedModel
    step: Step
    pins: Pins
    search: Search

    @classmethod
    def search_for(
        cls,
        traced: TracedModel,
        offers: Offers,
        wanted: Constraints,
        roles: tuple[AxisRole, ...],
        optimizer: object,
        checkpoint: Checkpoint,
        limit: int,
        ports: Mapping[str, Layout] | None,
        weights: Weights = ALL,
        like: Variant | None = None,
    ) -> Variant:
        """States, costs and edges of the step with a kind of recomputation.

        `like` is the same with the optimizer in another place, if that is known.
        """
        if like is None:
            graph = recomputed(traced, checkpoint)
            step = build_step(graph, offers.fused)
            beside, waits = run_beside(step, offers), traced.flight.waits
            step = replace(step, beside=beside, weights=weights, waits=waits)
            pins = Pins(wanted, roles, graph, step)
        else:
            graph, step, pins = like.graph, replace(like.step, weights=weights), like.pins
        built = build_problem(step, offers.cluster, pins, optimizer, ports, offers)
        search = Search(step, offers, built, optimizer, pins, limit)
        return cls(traced, checkpoint, graph, step, pins, search)

    def reweighted(self, weights: Weights, limit: int) -> Variant:
        """The same, where seconds count otherwise; rows and plans that are known are kept."""
        step = replace(self.step, weights=weights)
        built, known = self.built.weighted(weights), self.search
        given = (step, known.offers, built, known.optimizer, self.pins, limit)
        known.memory.rest()
        return replace(self, step=step, search=Search(*given, known.memory))

    @property
    def built(self) -> StepProblem:
        return self.search.built

    @property
    def seconds(self) -> float:
        """Of the best plan found; infinite without one."""
        best = self.search.memory.best
        return best.solution.objective if best else math.inf


class Search:
    """Finds the plan under the limit, or says what limit would do."""

    def __init__(
        self,
        step: Step,
        offers: Offers,
        built: StepProblem,
        optimizer: object,
        pins: Pins,
        limit: int,
        known: MemorySearch | None = None,
    ) -> None:
        self.step = step
        self.offers = offers
        self.cluster = offers.cluster
        self.built = built
        self.optimizer = optimizer
        self.pins = pins
        granularity = self.cluster.device.allocation_granularity_bytes
        scale = self._host_scale(limit)
        if known is None:
            liveness = Liveness(step, built, optimizer, granularity, scale)
        else:
            liveness = known.relaxed.liveness  # bytes do not depend on what seconds count
            liveness.host_scale = scale
        self.memory = MemorySearch(built.problem, liveness, self._pricer(scale), limit, known)

    def renew(self, limit: int) -> None:
        """Search within another limit; see `MemorySearch.renew`."""
        scale = self._host_scale(limit)
        self.memory.renew(limit, self._pricer(scale), scale)

    def _host_scale(self, limit: int) -> float:
        host = self.cluster.host_memory_bytes
        return limit / host if host is not None and limit < UNLIMITED else 0.0

    def _pricer(self, scale: float) -> Callable[[Solution], Fit]:
        # not a method of this: a cycle would keep all tables until the collector comes by
        given = (self.step, self.offers, self.built, self.optimizer)
        return partial(_fitted, *given, host_scale=scale)

    def start(self, beat: float, price: float, proved_within: int | None = UNLIMITED) -> Fit | None:
        """A fast plan found within the limit, if it beats some seconds."""
        try:
            limited = self.memory.limit < UNLIMITED
            self.memory.approximate(proved=limited or proved_within is not None)
        except Infeasible as error:
            raise ConstraintError(
                f"{self.pins.describe()} cannot hold for the model as a whole: no combination of "
                f"placements connects {unconnected_op(self.step, self.built.problem)} with the ops "
                "before it. Drop the constraint, or compute this in another way."
            ) from error
        return self.memory.start(beat, price, proved_within or 0)

    def lightest(self, without: Excluded | None = None, rival: float = math.inf) -> Fit | None:
        """The plan of the least memory found, whatever the limit is and what seconds count.

        So one that is found under a limit is found again under the limit that it needs.

        Args:
            without: a choice that it must not make.
            rival: bytes that it must stay below to be of use.

        Returns:
            None where none stays below.
        """
        if self.memory.least_bytes >= _SURELY * rival:
            return None
        step, built = replace(self.step, weights=ALL), self.built.weighted(ALL)
        if without is not None:
            exclude(without, step, built)
        decide = partial(_fitted, step, self.offers, built, self.optimizer)
        # with rows and plans of its own: those that are known depend on the limit
        return MemorySearch(built.problem, self.memory.relaxed.liveness, decide, 0).least(rival)

    def does_not_fit(self, smallest: Fit | None = None) -> InfeasiblePlanError:
        """The error, with the memory of the smallest plan, or that of the smallest one met."""
        smallest = smallest or self.memory.least()
        if smallest.row == HOST_ROW:
            return host_is_short(
                self.cluster, self.memory.limit, smallest.price.host_bytes,
                smallest.price.copies.num_bytes, smallest.price.peak.peak_bytes,
            )  # fmt: skip
        need = smallest.peak
        parts = ", ".join(
            f"{kind} {format_bytes(size)}" for kind, size in smallest.price.peak.breakdown[:4]
        )
        return InfeasiblePlanError(
            f"no plan fits {format_bytes(self.memory.limit)} per device on mesh "
            f"{self.cluster.mesh_shape}. "
            f"The smallest limit that a plan was found for is {need} bytes "
            f"({format_bytes(need)}): {parts}. Use more devices, a smaller batch, an optimizer "
            "with less state, or a lower precision.",
            memory_limit_bytes=self.memory.limit,
            required_bytes=need,
        )

    def of(self, chosen: Assignment) -> Fit | None:
        """The plan of an assignment, priced and not yet considered; None if it is not possible."""
        seconds = evaluate(self.built.problem, chosen)
        if not math.isfinite(seconds):
            return None
        solution = Solution(
            chosen=dict(chosen),
            objective=seconds,
            bound=0.0,
            seconds=0.0,
            variables=0,
            constraints=0,
        )
        return self.priced(self.step, solution)

    def priced(self, step: Step, solution: Solution) -> Fit:
        """The plan of a solution, for this step or for the same one in another schedule."""
        return _fitted(step, self.offers, self.built, self.optimizer, solution)


def host_is_short(
    cluster: Cluster, limit: int, num_bytes: int, activation_bytes: int, peak_bytes: int
) -> InfeasiblePlanError:
    """The error of plans that the host has too little memory for.

    Args:
        cluster: the devices.
        limit: bytes per device.
        num_bytes: of host memory per device, in the plan that needs least of what was found.
        activation_bytes: of these, activations.
        peak_bytes: that this plan needs on the device.
    """
    states = num_bytes - activation_bytes
    return InfeasiblePlanError(
        f"no plan fits {format_bytes(cluster.host_memory_bytes or 0)} of host memory per device, "
        f"with {format_bytes(limit)} on the device itself, on mesh {cluster.mesh_shape}. The "
        f"smallest found needs {format_bytes(num_bytes)} of the host for each device (optimizer "
        f"states {format_bytes(states)}, activations {format_bytes(activation_bytes)}) and "
        f"{format_bytes(peak_bytes)} on the device. Use more devices or fewer of them per host, "
        "an optimizer with less state, or leave out the pins on offload and checkpoint; or give "
        "the cluster's device the host_memory_bytes that its host has.",
        memory_limit_bytes=limit,
        required_bytes=max(peak_bytes, limit + 1),
    )


def _fitted(
    step: Step,
    offers: Offers,
    built: StepProblem,
    optimizer: object,
    solution: Solution,
    host_scale: float = 0.0,
) -> Fit:
    """The plan of a solution with its price, which must be what the solver says."""
    classes, chosen = built.classes, solution.chosen
    decision = Decision(
        {name: built.candidates[classes[name]][chosen[classes[name]]] for name in step.ops},
        {
            name: built.storages[classes[name]][chosen[classes[name]]]
            for name in (*step.parameters, *step.ports)
        },
    )
    priced = price(step, offers.cluster, decision, optimizer, offers)
    counted_s = priced.weighted_s(step.weights)
    if not math.isclose(counted_s, solution.objective, rel_tol=1e-6, abs_tol=1e-9):
        raise AutoparError(
            f"the plan costs {counted_s:.9f} s by its placements, but the solver claims "
            f"{solution.objective:.9f} s: this is a defect of autopar"
        )
    return Fit(solution, decision, priced, host_scale)
