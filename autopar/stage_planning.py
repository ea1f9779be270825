"""Plans a pipeline of a given shape: cuts, each stage's own plan, the clock.

The step is split over the microbatches where the sharding rules allow it without communication
(`solver/microbatch.py`), cut into stages between blocks (`core/stages.py`), and each stage is
solved as any other step, on the mesh of one pipeline rank. A stage takes what it receives in the
layout that the stage before has settled. Equal stages of a folded graph that receive the same are
solved once. The schedule then runs on the clock (`cost_model/pipeline.py`).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.codegen.microbatch import Microbatch, localise
from autopar.codegen.stages import Staged, batch_bytes, cut_body, flying
from autopar.core.constraints import Constraints
from autopar.core.flights import flights
from autopar.core.folding import every_instance
from autopar.core.graph import TracedModel
from autopar.core.placement import Layout
from autopar.core.plan import NodePlan, PipelinePlan, Plan, SolverReport
from autopar.core.schedule import Orders, actions
from autopar.core.transfers import port_of
from autopar.cost_model import Cluster
from autopar.cost_model.rank_memory import rank_memory
from autopar.cost_model.stages import PipelinedTime, pipelined_time, transfer_seconds
from autopar.errors import ConstraintError, InfeasiblePlanError
from autopar.solver.fit import UNLIMITED
from autopar.solver.ideal import BlockWork
from autopar.solver.microbatch import split_in_time
from autopar.solver.offers import Offers
from autopar.solver.pipeline_shape import PipelineShape, balanced_cuts, stage_mesh
from autopar.solver.solve import Solved, in_other_flights, solve_step

__all__ = ["StagePlanner"]

_SHARINGS = 4  # rounds


class StagePlanner:
    """Plans pipelines of one step; what several shapes have in common is made once.

    Args:
        traced: the step on the whole batch, folded or not.
        cluster: all devices.
        constraints: what is pinned inside the stages.
        memory_limit: bytes per device; default: the device's memory.
        optimizer: whose states count in memory.
        offers: what is known of ops on these devices.
    """

    def __init__(
        self,
        traced: TracedModel,
        cluster: Cluster,
        constraints: Constraints,
        memory_limit: int | None,
        optimizer: object,
        offers: Offers,
    ) -> None:
        self.traced = traced
        self.whole = cluster
        self.constraints = constraints
        self.limit = cluster.memory_bytes if memory_limit is None else int(memory_limit)
        self.optimizer = optimizer
        self.work = BlockWork(traced, cluster)
        self._micros: dict[int, tuple[dict[str, NodePlan], Microbatch]] = {}
        self._parts: dict[tuple[int, tuple[str, ...]], Staged] = {}
        self._solved: dict[object, Plan | InfeasiblePlanError] = {}
        self._free: dict[object, Solved] = {}
        self.offers = offers

    def plan(self, shape: PipelineShape, *, free: bool = False) -> Plan:
        """The plan of a step with a pipeline of a given shape.

        Args:
            shape: of the pipeline.
            free: without the memory limit, hence without recomputation: soon found.

        Raises:
            ConstraintError: the model cannot be split or cut so.
            InfeasiblePlanError: a stage does not fit.
        """
        mesh = stage_mesh(self.whole.mesh_shape, shape.size)
        names = self.whole.axis_names[-len(mesh) :]
        cluster = replace(self.whole, mesh_shape=mesh, axis_names=names)
        orders = actions(shape.schedule, shape.size, shape.microbatches, shape.chunks)
        time, _ = self.micro(shape.microbatches)
        cuts = shape.cuts if shape.cuts is not None else balanced_cuts(self.work, shape)
        if len(cuts) + 1 != shape.num_stages:
            raise ConstraintError(
                f"pipeline cuts make {len(cuts) + 1} stages, size {shape.size} × chunks "
                f"{shape.chunks} are {shape.num_stages}"
            )
        return _Pipeliner(self, shape, cuts, cluster, orders, free).run(time)

    def micro(self, microbatches: int) -> tuple[dict[str, NodePlan], Microbatch]:
        """The step on one microbatch, and the placements of all ops over the microbatches.

        Raises:
            ConstraintError: the model cannot be split so.
        """
        if microbatches not in self._micros:
            time = split_in_time(self.traced, self.whole, microbatches)
            self._micros[microbatches] = time, localise(self.traced, time, microbatches)
        return self._micros[microbatches]

    def parts(self, microbatches: int, cuts: tuple[str, ...]) -> Staged:
        """The step cut into stages."""
        key = (microbatches, cuts)
        if key not in self._parts:
            self._parts[key] = cut_body(self.micro(microbatches)[1], cuts)
        return self._parts[key]

    def solve(
        self,
        parts: Staged,
        cuts: tuple[str, ...],
        kind: int,
        cluster: Cluster,
        settled: Mapping[str, Layout],
        limit: int | None,
    ) -> Plan:
        """The plan of a kind of stage that receives what is settled, within a limit if there is.

        Raises:
            InfeasiblePlanError: it does not fit.
        """
        model = parts.stages.models[kind]
        taken = {name: settled[name] for name in _port_names(model) if name in settled}
        turns = (model.microbatches, model.flight)
        key = (cuts, kind, *turns, cluster.mesh_shape, limit, tuple(taken.items()))
        if key not in self._solved:
            try:
                plan = self._plan(model, cluster, taken, limit, (cuts, kind))
                self._solved[key] = replace(plan, memory_limit_bytes=limit or self.limit)
            except InfeasiblePlanError as error:
                self._solved[key] = error
        found = self._solved[key]
        if isinstance(found, InfeasiblePlanError):
            raise found
        return found

    def _plan(
        self,
        model: TracedModel,
        cluster: Cluster,
        taken: Mapping[str, Layout],
        limit: int | None,
        name: object,
    ) -> Plan:
        """The plan of a stage; without a limit, schedules share its choices.

        Raises:
            InfeasiblePlanError: it does not fit.
        """
        key = (name, model.microbatches, cluster.mesh_shape, tuple(taken.items()))
        if limit is None and key in self._free:
            return in_other_flights(self._free[key], model).plan
        found = solve_step(
            model,
            cluster,
            constraints=self._inside(model),
            memory_limit=UNLIMITED if limit is None else limit,
            optimizer=self.optimizer,
            ports=taken,
            offers=self.offers,
        )
        if limit is None:
            self._free[key] = found
        return found.plan

    def _inside(self, model: TracedModel) -> Constraints:
        """The constraints of a stage: those that speak of its parameters."""
        named = every_instance({s.target: None for s in model.parameters()}, model.repeats)
        params = {
            glob: wanted
            for glob, wanted in self.constraints.params.items()
            if fnmatch.filter(named, glob)
        }
        return replace(self.constraints, pipeline=None, params=params)


class _Pipeliner:
    """Plans the stages of one pipeline in their order, and runs them on the clock."""

    def __init__(
        self,
        planner: StagePlanner,
        shape: PipelineShape,
        cuts: tuple[str, ...],
        cluster: Cluster,
        orders: Orders,
        free: bool,
    ) -> None:
        self.free = free
        self.planner = planner
        self.traced = planner.traced
        self.shape = shape
        self.cuts = cuts
        self.cluster = cluster
        self.orders = orders
        parts = planner.parts(shape.microbatches, cuts)
        batch = batch_bytes(self.traced, parts.microbatch)
        self.parts = flying(parts, flights(orders), batch)
        self.limit = planner.limit
        self.stuck = 0  # the stage that did not fit last

    def run(self, time: Mapping[str, NodePlan]) -> Plan:
        plans = self._fitting()
        shifted = [self.parts.named(s, plan) for s, plan in enumerate(plans)]
        size, turns = self.shape.size, self.shape.microbatches
        transfer_s = transfer_seconds(self.parts.crossings(), shifted, self.cluster, size)
        memory = rank_memory(self.orders, [p.predicted.held for p in plans])
        highest = max(memory, key=lambda kinds: sum(kinds.values()))
        clock = pipelined_time(shifted, self.orders, transfer_s, turns, highest)
        peaks = tuple(sum(kinds.values()) for kinds in memory)
        return self._assembled(time, self.cuts, shifted, clock, peaks)

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

    def _solve(self, limits: Sequence[int | None]) -> list[Plan]:
        """Plans of the stages, each within a limit of its own.

        Raises:
            InfeasiblePlanError: one does not fit.
        """
        settled: dict[str, Layout] = {}
        plans: list[Plan] = []
        for number, kind in enumerate(self.parts.kinds):
            if number:
                settled.update(self._handed(self.parts.kinds[number - 1], kind, settled))
            try:
                plan = self.planner.solve(
                    self.parts, self.cuts, kind, self.cluster, settled, limits[number]
                )
            except InfeasiblePlanError as error:
                self.stuck = number
                raise InfeasiblePlanError(
                    f"pipeline stage {number} of {self.shape.num_stages}: {error}",
                    memory_limit_bytes=self.limit,
                    required_bytes=(error.required_bytes or 0) * self.shape.chunks,
                ) from error
            plans.append(plan)
            settled.update(_settled(self.parts.model(number), plan))
        return plans

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

    # --- the plan ------------------------------------------------------------------------------
    def _assembled(
        self,
        time: Mapping[str, NodePlan],
        cuts: tuple[str, ...],
        plans: Sequence[Plan],
        clock: PipelinedTime,
        peaks: tuple[int, ...],
    ) -> Plan:
        shape, size = self.shape, self.shape.size
        step_s = clock.predicted.step_time_s
        slowest = max(plans, key=lambda p: p.predicted.step_time_s)
        bound = max(sum(p.solver.bound for p in plans[rank::size]) for rank in range(size))
        plans = [replace(p, predicted=replace(p.predicted, held=None)) for p in plans]
        unlike = list({p.fingerprint: p for p in plans}.values())
        merged: dict[str, Layout] = {}
        for p in plans:
            merged.update(p.parameters)
        named = {s.target: None for s in self.traced.parameters()}
        order = every_instance(named, self.traced.repeats)
        return replace(
            slowest,
            fingerprint=self.traced.fingerprint(),
            nodes={},
            inputs={},
            parameters={name: merged[name] for name in order},
            shapes={k: v for p in plans for k, v in p.shapes.items()},
            dtypes={k: v for p in plans for k, v in p.dtypes.items()},
            modes={k: v for p in plans for k, v in p.modes.items()},
            constraints=self.planner.constraints.to_dict(),
            memory_limit_bytes=self.limit,
            repeats=self.traced.repeats,
            predicted=clock.predicted,
            solver=SolverReport(
                status="bounded" if size > 1 else slowest.solver.status,
                objective=step_s,
                bound=min(bound, step_s),
                gap=max(0.0, 1 - bound / step_s),
                seconds=sum(p.solver.seconds for p in unlike),
                variables=sum(p.solver.variables for p in unlike),
                constraints=sum(p.solver.constraints for p in unlike),
            ),
            pipeline=PipelinePlan(
                size=size,
                chunks=shape.chunks,
                microbatches=shape.microbatches,
                schedule=shape.schedule,
                cuts=cuts,
                time=time,
                stages=tuple(plans),
                bubble=clock.bubble,
                slots=clock.slots,
                peaks=peaks,
            ),
        )


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


def _port_names(model: TracedModel) -> list[str]:
    """Names of the layouts that a stage shares with others."""
    names = [s.node for s in model.inputs if s.kind == "received"]
    return [*names, *dict.fromkeys(s.port for s in model.outputs if s.kind == "sent")]
