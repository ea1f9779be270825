"""`solve`: a traced step, a cluster and constraints to a `Plan`, with a proof of how good it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from autopar.core.constraints import Constraints, assign_mesh
from autopar.core.folding import every_instance
from autopar.core.graph import TracedModel
from autopar.core.placement import Layout
from autopar.core.plan import BucketBytes, NodePlan, Plan, Prediction, SolverReport
from autopar.cost_model import (
    Cluster,
    CollectiveKind,
    Offloaded,
    optimizer_text,
)
from autopar.solver import rules as _rules  # noqa: F401  (registers the rules)
from autopar.solver.breakdown import timeline
from autopar.solver.exclude import Excluded
from autopar.solver.fit import UNLIMITED, Fit
from autopar.solver.input_layouts import input_layouts
from autopar.solver.known import KnownVariants, Variants
from autopar.solver.modes import mode_names
from autopar.solver.offers import Offers
from autopar.solver.overlap import (
    ALL,
    EXPOSED,
    Found,
    NotBelow,
    counted_seconds,
    least,
    promising,
    weights_at,
)
from autopar.solver.pins import with_roles
from autopar.solver.rules.notes import note_places
from autopar.solver.sums import SumSearch
from autopar.solver.variant import Variant

__all__ = [
    "KnownVariants",
    "Solved",
    "StepSearch",
    "fits",
    "in_other_flights",
    "solve",
]

T = TypeVar("T")
_BUCKETED = (
    CollectiveKind.ALL_REDUCE,
    CollectiveKind.REDUCE_SCATTER,
    CollectiveKind.ALL_GATHER,
)


def solve(
    traced: TracedModel,
    cluster: Cluster,
    *,
    constraints: Constraints | None = None,
    memory_limit: int | None = None,
    optimizer: object = "adamw",
    without: Excluded | None = None,
    ports: Mapping[str, Layout] | None = None,
    offers: Offers | None = None,
    exposed: float = EXPOSED,
) -> Plan:
    """The plan that `StepSearch` finds; arguments and errors are its own."""
    search = StepSearch(
        traced,
        cluster,
        constraints=constraints,
        memory_limit=memory_limit,
        optimizer=optimizer,
        without=without,
        ports=ports,
        offers=offers,
        exposed=exposed,
    )
    return search.run().plan


def fits(plan: Plan, cluster: Cluster, limit: int) -> bool:
    """True if a plan keeps to a limit on the device's memory, and to what its host has."""
    host = cluster.host_memory_bytes
    on_host = plan.predicted.host_bytes
    return plan.predicted.peak_memory_bytes <= limit and (host is None or on_host <= host)


@dataclass(frozen=True, slots=True)
class Solved:
    """A plan, the choices that it is, and t of the sum that bounds it best (`overlap`)."""

    plan: Plan
    _found: Variant
    _fit: Fit
    t: float = 0.0


def in_other_flights(known: Solved, traced: TracedModel) -> Solved:
    """The choices of a step without a memory limit, for the same step in another schedule.

    How many microbatches a schedule holds at once changes what is live, not what ops cost.

    Args:
        known: without recomputation.
        traced: the same graph with another `flight`.
    """
    found = known._found
    assert found.checkpoint == "none"
    blocks = found.step.blocks.of(traced)
    found = replace(found, traced=traced, graph=traced, step=replace(found.step, blocks=blocks))
    fit = found.search.priced(found.step, known._fit.solution)
    predicted = _predicted(found, fit)
    return Solved(replace(known.plan, predicted=predicted), found, fit)


class StepSearch:
    """Chooses placements for every tensor of a traced step.

    Args:
        traced: from `autopar.tracer`.
        cluster: devices, links and mesh.
        constraints: what is pinned.
        memory_limit: bytes per device; default: the device's memory.
        optimizer: whose states count in memory.
        without: a choice that the plan must not make.
        ports: layouts of what goes between pipeline stages, where a stage before has settled them.
        offers: what is known of ops on these devices from earlier steps.
        exposed: share of the seconds of gathers of parameters and of reductions of gradients that
            compute waits for at least, in a step in one piece.
        known: searches of this step under other limits, to go on with; those of this one are added.
        proved_within: bytes per device up to which a plan that no limit binds is proved as closely
            as can be; else mostly within a part in a thousand. None: no bound is asked for.
        first: t of the sum to begin with (`overlap.least`).
    """

    def __init__(
        self,
        traced: TracedModel,
        cluster: Cluster,
        *,
        constraints: Constraints | None = None,
        memory_limit: int | None = None,
        optimizer: object = "adamw",
        without: Excluded | None = None,
        ports: Mapping[str, Layout] | None = None,
        offers: Offers | None = None,
        exposed: float = EXPOSED,
        known: KnownVariants | None = None,
        proved_within: int | None = UNLIMITED,
        first: float = 0.0,
    ) -> None:
        self.wanted = constraints or Constraints()
        roles = assign_mesh(self.wanted, cluster.mesh_shape)
        note_places(traced)
        self.planned = with_roles(cluster, roles)
        self.limit = self.planned.memory_bytes if memory_limit is None else int(memory_limit)
        priced = (offers or Offers(self.planned)).over(self.planned)
        variants = Variants(
            traced=traced,
            offers=priced,
            wanted=self.wanted,
            roles=roles,
            limit=self.limit,
            ports=ports,
            known={} if known is None else known,
        )
        self.optimizer = optimizer
        self.search = SumSearch(variants, optimizer, without, proved_within)
        self.counts_all = bool(traced.hoisted) or ports is not None
        self.exposed = 1.0 if self.counts_all else exposed
        self.first = first
        self._seen: Variant | None = None
        self._has_glanced = self.counts_all
        self._slow: NotBelow | None = None  # what a glance has told

    def prove_within(self, num_bytes: int | None) -> None:
        """Go on with another `proved_within`."""
        self.search = replace(self.search, proved_within=num_bytes)

    def hasty(self) -> Plan | None:
        """The first plan that is found, without a bound, if there is one.

        Raises:
            InfeasiblePlanError: see `run`.
        """
        found = self.search.first(ALL if self.counts_all else weights_at(self.first, self.exposed))
        return None if found is None else self._as_plan(found, 0.0)

    def glance(self, below_s: float = math.inf) -> float:
        """Seconds of a plan that is soon found (`soon`); infinite if none is.

        Raises:
            InfeasiblePlanError, NotBelow: see `run`.
        """
        self._has_glanced = True
        try:
            self.first, self._seen = promising(self.search.soon, self.exposed, self.first, below_s)
        except NotBelow as error:
            self._slow = error
            raise
        self.search.forget_but(self.first)
        best = None if self._seen is None else self._seen.search.memory.best
        return math.inf if best is None else counted_seconds(best.price, self.exposed)

    def soon(self) -> Plan | None:
        """The plan that a glance has found, without a bound."""
        return None if self._seen is None else self._as_plan(self._seen, 0.0)

    def run(
        self,
        below_s: float = math.inf,
        doubts: Callable[[Plan], bool] | None = None,
        enough_s: float = math.inf,
    ) -> Solved:
        """The plan.

        Args:
            below_s: seconds that it must stay below to be of use.
            doubts: asked of the first plan where more sums would be searched under the limit
                (`overlap`); if it says True, they are not.
            enough_s: seconds beyond which a bound is of no use.

        Raises:
            ConstraintError: the constraints cannot hold, or nothing is left without `without`.
            InfeasiblePlanError: nothing fits; carries the smallest limit that would.
            NotBelow: nothing is below `below_s`, whether or not anything fits.
        """

        def stop(found: Found) -> bool:
            if doubts is None:
                return False
            return doubts(self._as_plan(found.variant, found.bound))

        def mixed(waiting: Found, hidden: Found, t: float) -> Found | None:
            return self.search.mixed(waiting, hidden, t, self.exposed)

        if self._slow is not None and self._slow.bound >= below_s:
            raise NotBelow(self._slow.bound, self._slow.t)
        if self.counts_all:
            (best, bound, _), t = self.search(ALL, below_s=below_s, least_s=enough_s), 0.0
        else:
            if not self._has_glanced:
                self.glance(below_s)
            try:
                search = partial(self.search, least_s=enough_s)
                best, bound, t = least(search, self.exposed, stop, self.first, below_s, mixed)
            except NotBelow as error:
                known_s = self._proved(error.t, error.bound, min(below_s, enough_s))
                raise NotBelow(known_s, error.t) from error
        fit = best.search.memory.best
        assert fit is not None
        now_s = counted_seconds(fit.price, self.exposed)
        proved_s = self._proved(t, bound, min(now_s, enough_s))
        return Solved(self._as_plan(best, proved_s), best, fit, t)

    def _proved(self, t: float, bound: float, enough_s: float) -> float:
        """A bound of one sum for blocks that are recomputed in several ways, too."""
        if self.search.proved_within is None:
            return bound
        weights = ALL if self.counts_all else weights_at(t, self.exposed)
        return self.search.of_any(weights, bound, enough_s)

    def _as_plan(self, variant: Variant, bound: float) -> Plan:
        given = (self.planned, self.wanted, self.limit, self.optimizer)
        return _as_plan(variant, bound, self.exposed, *given)


def _as_plan(
    found: Variant,
    bound: float,
    exposed: float,
    planned: Cluster,
    wanted: Constraints,
    limit: int,
    optimizer: object,
) -> Plan:
    traced, step, best = found.traced, found.step, found.search.memory.best
    assert best is not None
    nodes = {
        name: NodePlan(inputs=c.inputs, outputs=c.outputs, variants=c.variants)
        for name, c in best.decision.candidates.items()
    }
    parameters = list(found.graph.parameters())
    order = every_instance({s.target: None for s in traced.parameters()}, traced.repeats)

    def whole(named: dict[str, T]) -> dict[str, T]:
        given = every_instance(named, found.graph.repeats)
        return {name: given[name] for name in order if name in given}

    return Plan(
        fingerprint=traced.fingerprint(),
        mesh_shape=planned.mesh_shape,
        axis_names=planned.axis_names,
        training=traced.training,
        nodes=nodes,
        parameters=whole({s.target: best.decision.storages[s.node] for s in parameters}),
        shapes=whole({s.target: s.shape for s in parameters}),
        dtypes=whole({s.target: str(s.dtype).removeprefix("torch.") for s in parameters}),
        inputs={
            **input_layouts(step, best.decision.candidates, planned.mesh_shape),
            **{name: best.decision.storages[name] for name in step.ports},
        },
        modes=whole(mode_names(step, found.pins, best.decision)),
        cluster=planned.to_dict(),
        predicted=_predicted(found, best),
        solver=_report(best, bound, exposed),
        constraints=wanted.to_dict(),
        memory_limit_bytes=limit,
        optimizer=optimizer_text(optimizer),
        checkpoint=found.checkpoint,
        offload="optimizer" if isinstance(found.search.optimizer, Offloaded) else "none",
        repeats=traced.repeats,
        nested=traced.nested,
        precision=traced.precision,
        reduce_dtype=traced.reduce_dtype,
        buckets=_buckets(planned),
    )


def _report(best: Fit, bound: float, exposed: float) -> SolverReport:
    report = best.solution
    objective = report.objective if exposed == 1.0 else counted_seconds(best.price, exposed)
    return SolverReport(
        objective=objective,
        bound=objective,
        gap=0.0,
        seconds=report.seconds,
        variables=report.variables,
        constraints=report.constraints,
        exposed=exposed,
        waits=best.price.pricing.step.waits,
    ).proved(bound)


def _buckets(planned: Cluster) -> tuple[BucketBytes, ...]:
    return tuple(
        BucketBytes(axis=axis, kind=kind, num_bytes=planned.bucket_bytes(kind, axis))
        for axis, size in enumerate(planned.mesh_shape)
        for kind in _BUCKETED
        if size > 1
    )


def _predicted(found: Variant, fit: Fit) -> Prediction:
    price = fit.price
    return Prediction(
        step_time_s=price.total_s,
        compute_time_s=price.compute_s,
        comm_time_s=price.comm_s,
        peak_memory_bytes=price.peak.peak_bytes,
        memory=dict(price.peak.breakdown),
        comm_bytes=price.comm_bytes,
        timeline=timeline(found.graph, price, found.search.built, fit.solution.chosen),
        phases=price.phases,
        update_s=price.update_s,
        offload_s=price.offload_s,
        host_bytes=price.host_bytes,
        host_activation_bytes=price.copies.num_bytes,
        copy_time_s=price.copies.total_s,
        exposed_copy_s=price.copies.exposed_s,
        packing_s=price.packing_s,
        held=price.footprint.held(),
    )
