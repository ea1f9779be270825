"""`solve`: a traced step, a cluster and constraints to a `Plan`, with a proof of how good it is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from autopar.core.constraints import AxisRole, Constraints, assign_mesh
from autopar.core.folding import every_instance
from autopar.core.graph import TracedModel
from autopar.core.placement import Layout
from autopar.core.plan import BucketBytes, NodePlan, Plan, Prediction, SolverReport
from autopar.core.recompute import RECOMPUTATIONS, recomputed
from autopar.core.units import format_bytes
from autopar.cost_model import (
    Cluster,
    CollectiveKind,
    Offloaded,
    can_offload,
    offload_seconds,
    optimizer_state_bytes,
)
from autopar.errors import AutoparError, ConstraintError, InfeasiblePlanError
from autopar.solver import rules as _rules  # noqa: F401  (registers the rules)
from autopar.solver.breakdown import timeline
from autopar.solver.build import StepProblem, build_problem
from autopar.solver.exclude import Excluded, exclude
from autopar.solver.fit import Fit, MemorySearch
from autopar.solver.ilp import Infeasible, Solution
from autopar.solver.input_layouts import input_layouts
from autopar.solver.liveness import Liveness
from autopar.solver.modes import mode_names
from autopar.solver.offers import Offers
from autopar.solver.pins import Pins
from autopar.solver.price import Decision, price
from autopar.solver.rules.own_order import note_orders
from autopar.solver.step import Step, build_step

__all__ = ["Solved", "in_other_flights", "solve", "solve_step"]

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
) -> Plan:
    """Choose placements for every tensor of a traced step; see `solve_step`."""
    return solve_step(
        traced,
        cluster,
        constraints=constraints,
        memory_limit=memory_limit,
        optimizer=optimizer,
        without=without,
        ports=ports,
        offers=offers,
    ).plan


@dataclass(frozen=True, slots=True)
class Solved:
    """A plan, and the choices that it is."""

    plan: Plan
    _found: _Found
    _fit: Fit


def in_other_flights(known: Solved, traced: TracedModel) -> Solved:
    """The choices of a step without a memory limit, for the same step in another schedule.

    How many microbatches a schedule holds at once changes what is live, not what ops cost.
    """
    found = known._found
    assert found.kind == "none", "without a limit nothing is computed twice"
    blocks = found.step.blocks.of(traced)
    found = replace(found, traced=traced, graph=traced, step=replace(found.step, blocks=blocks))
    fit = found.search.priced(found.step, known._fit.solution)
    predicted = _predicted(found, fit)
    return Solved(replace(known.plan, predicted=predicted), found, fit)


def solve_step(
    traced: TracedModel,
    cluster: Cluster,
    *,
    constraints: Constraints | None = None,
    memory_limit: int | None = None,
    optimizer: object = "adamw",
    without: Excluded | None = None,
    ports: Mapping[str, Layout] | None = None,
    offers: Offers | None = None,
) -> Solved:
    """Choose placements for every tensor of a traced step.

    Args:
        traced: from `autopar.tracer`.
        cluster: devices, links and mesh.
        constraints: what is pinned.
        memory_limit: bytes per device; default: the device's memory.
        optimizer: whose states count in memory.
        without: a choice that the plan must not make.
        ports: layouts of what goes between pipeline stages, where a stage before has settled them.
        offers: what is known of ops on these devices from earlier steps.

    Raises:
        ConstraintError: the constraints cannot hold, or nothing is left without `without`.
        InfeasiblePlanError: nothing fits; carries the smallest limit that would.
    """
    wanted = constraints or Constraints()
    roles = assign_mesh(wanted, cluster.mesh_shape)
    note_orders(traced.graph)
    planned = _with_roles(cluster, roles)
    limit = planned.memory_bytes if memory_limit is None else int(memory_limit)
    known = (offers or Offers(planned)).over(planned)
    tried: list[_Found] = []
    done: list[object] = []  # optimizers, where they are, of which an unlimited plan fits
    for kind, held in _variants(traced, planned, wanted, optimizer):
        if any(held is which for which in done):
            continue
        if isinstance(held, Offloaded) and tried and _no_offload_beats(tried, held):
            break
        found = _Found.search_for(traced, known, wanted, roles, held, kind, limit, ports)
        if without is not None and not exclude(without, found.step, found.search.built):
            continue
        tried.append(found)
        price = max((f.search.memory.price for f in tried), default=0.0)
        fit = found.search.start(_fastest(tried), price)
        # what saves memory costs time: an unlimited plan is the fastest of its kind and the later
        if fit is not None and fit is found.search.memory.free:
            if len(tried) == 1:
                break
            done.append(held)
    if not tried:
        assert without is not None
        raise ConstraintError(f"the step has no {without.name}")
    for found in sorted(tried, key=lambda f: f.search.memory.bound):
        found.search.memory.finish(_fastest(tried))
    best = min(tried, key=lambda f: f.seconds)
    if best.search.memory.best is None:
        raise min(tried, key=lambda f: f.search.memory.least().peak).search.does_not_fit()
    bound = min(found.search.memory.bound for found in tried)
    plan = _as_plan(best, bound, planned, wanted, limit, optimizer)
    return Solved(plan, best, best.search.memory.best)


def _variants(
    traced: TracedModel, cluster: Cluster, wanted: Constraints, optimizer: object
) -> list[tuple[str, object]]:
    """Kinds of recomputation, each with the optimizer where it is; offloaded ones come last."""
    if not traced.training:
        return [("none", optimizer)]
    kinds = [wanted.checkpoint] if wanted.checkpoint else list(RECOMPUTATIONS)
    held: list[object] = [] if wanted.offload == "optimizer" else [optimizer]
    chosen = wanted.offload is None and can_offload(cluster.device)
    if wanted.offload == "optimizer" or (chosen and optimizer_state_bytes(optimizer, 1024)):
        held.append(Offloaded(optimizer))
    return [(kind, which) for which in held for kind in kinds]


@dataclass(frozen=True, slots=True)
class _Found:
    """A search with one kind of recomputation, and the best plan that it found.

    `graph` is `traced` with the copies of that kind; `unlimited` is a bound of the seconds of any
    plan with the states on the device.
    """

    traced: TracedModel
    kind: str
    graph: TracedModel
    step: Step
    pins: Pins
    search: _Search

    @classmethod
    def search_for(
        cls,
        traced: TracedModel,
        offers: Offers,
        wanted: Constraints,
        roles: tuple[AxisRole, ...],
        optimizer: object,
        kind: str,
        limit: int,
        ports: Mapping[str, Layout] | None,
    ) -> _Found:
        """States, costs and edges of the step with a kind of recomputation."""
        graph = recomputed(traced, kind)
        step = build_step(graph)
        pins = Pins(wanted, roles, graph, step)
        built = build_problem(graph, step, offers.cluster, pins, optimizer, ports, offers)
        search = _Search(step, offers, built, optimizer, pins, limit)
        return cls(traced, kind, graph, step, pins, search)

    @property
    def seconds(self) -> float:
        """Of the best plan found; infinite without one."""
        best = self.search.memory.best
        return best.solution.objective if best else math.inf


def _fastest(tried: list[_Found]) -> float:
    return min(found.seconds for found in tried)


def _no_offload_beats(tried: list[_Found], offloaded: Offloaded) -> bool:
    """True if no plan with the offloaded optimizer can beat the best one.

    Each costs at least an unlimited plan without recomputation, and the transfer of shards that
    are split over all devices.
    """
    first = tried[0]
    cluster = first.search.cluster
    least_s = sum(
        offload_seconds(
            cluster.device, offloaded,
            first.step.specs[name, 0].num_bytes // math.prod(cluster.mesh_shape),
            first.step.parameters[name].dtype,
        ) * first.step.blocks.copies(name)
        for name in first.step.gradients
    )  # fmt: skip
    return _fastest(tried) <= first.search.memory.approximate().bound + least_s


def _as_plan(
    found: _Found,
    bound: float,
    planned: Cluster,
    wanted: Constraints,
    limit: int,
    optimizer: object,
) -> Plan:
    traced, step, best = found.traced, found.step, found.search.memory.best
    assert best is not None
    report = best.solution
    report = replace(report, bound=min(bound, report.objective))
    nodes = {
        name: NodePlan(inputs=c.inputs, outputs=c.outputs, variants=c.variants)
        for name, c in best.decision.candidates.items()
    }
    parameters = list(traced.parameters())

    def whole(named: dict[str, T]) -> dict[str, T]:
        return every_instance(named, traced.repeats)

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
            **input_layouts(step, best.decision.candidates, len(planned.mesh_shape)),
            **{name: best.decision.storages[name] for name in step.ports},
        },
        modes=whole(mode_names(step, found.pins, best.decision)),
        cluster=planned.to_dict(),
        predicted=_predicted(found, best),
        solver=SolverReport(
            status=report.status,
            objective=report.objective,
            bound=report.bound,
            gap=report.gap,
            seconds=report.seconds,
            variables=report.variables,
            constraints=report.constraints,
        ),
        constraints=wanted.to_dict(),
        memory_limit_bytes=limit,
        optimizer=optimizer if isinstance(optimizer, str) else _name(optimizer),
        checkpoint=found.kind,
        offload="optimizer" if isinstance(found.search.optimizer, Offloaded) else "none",
        repeats=traced.repeats,
        precision=traced.precision,
        reduce_dtype=traced.reduce_dtype,
        buckets=tuple(
            BucketBytes(axis=axis, kind=kind, num_bytes=planned.bucket_bytes(kind, axis))
            for axis, size in enumerate(planned.mesh_shape)
            for kind in _BUCKETED
            if size > 1
        ),
    )


def _predicted(found: _Found, fit: Fit) -> Prediction:
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
        offload_s=price.offload_s,
        host_bytes=price.host_bytes,
        held=price.footprint.held(),
    )


def _name(optimizer: Any) -> str:
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    return kind.__name__.lower()


def _with_roles(cluster: Cluster, roles: tuple[AxisRole, ...]) -> Cluster:
    shape = tuple(r.size for r in roles)
    if shape == cluster.mesh_shape:
        return cluster
    names: list[str] = []
    for role in roles:
        name = role.name.replace("-", "")
        names.append(name if name not in names else f"{name}{len(names)}")
    return cluster.with_mesh_shape(shape, tuple(names))


class _Search:
    """Finds the plan under the limit, or says what limit would do."""

    def __init__(
        self,
        step: Step,
        offers: Offers,
        built: StepProblem,
        optimizer: object,
        pins: Pins,
        limit: int,
    ) -> None:
        self.step = step
        self.offers = offers
        self.cluster = offers.cluster
        self.built = built
        self.optimizer = optimizer
        self.pins = pins
        granularity = self.cluster.device.allocation_granularity_bytes
        liveness = Liveness(step, built, optimizer, granularity)
        self.memory = MemorySearch(built.problem, liveness, self._fit, limit)

    def start(self, beat: float, price: float) -> Fit | None:
        """A fast plan found within the limit, if it beats some seconds."""
        try:
            self.memory.approximate()
        except Infeasible as error:
            raise ConstraintError(
                f"{self.pins.describe()} cannot hold for the model as a whole: no combination of "
                "placements connects its ops"
            ) from error
        return self.memory.start(beat, price)

    def does_not_fit(self) -> InfeasiblePlanError:
        """The error, with the least memory that some plan was found to need."""
        smallest = self.memory.least()
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

    def _fit(self, solution: Solution) -> Fit:
        return self.priced(self.step, solution)

    def priced(self, step: Step, solution: Solution) -> Fit:
        """The plan of a solution, for this step or for the same one in another schedule."""
        decision = self._decision(solution)
        priced = price(step, self.cluster, decision, self.optimizer, self.offers)
        if not math.isclose(priced.total_s, solution.objective, rel_tol=1e-6, abs_tol=1e-9):
            raise AutoparError(
                f"the plan costs {priced.total_s:.9f} s by its placements, but the solver claims "
                f"{solution.objective:.9f} s: this is a defect of autopar"
            )
        return Fit(solution, decision, priced)

    def _decision(self, solution: Solution) -> Decision:
        classes, chosen = self.built.classes, solution.chosen
        return Decision(
            {
                name: self.built.candidates[classes[name]][chosen[classes[name]]]
                for name in self.step.ops
            },
            {
                name: self.built.storages[classes[name]][chosen[classes[name]]]
                for name in (*self.step.parameters, *self.step.ports)
            },
        )
