"""Plans a pipeline of a given shape: cuts, each stage's own plan, the clock.

The step is split over the microbatches where the sharding rules allow it without communication
(`solver/microbatch.py`), cut into stages between blocks (`core/stages.py`), and each stage is
solved as any other step, on the mesh of one pipeline rank. A stage takes what it receives in the
layout that the stage before has settled. Equal stages of a folded graph that receive the same are
solved once. The schedule then runs on the clock (`cost_model/pipeline.py`).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from copy import copy
from dataclasses import replace

from autopar.codegen.microbatch import Microbatch, localise
from autopar.codegen.stages import Staged, cut_body
from autopar.core.block_kinds import pinned_kinds, pins_among
from autopar.core.blocks import Blocks
from autopar.core.constraints import Constraints, assign_mesh
from autopar.core.folding import every_instance
from autopar.core.graph import TracedModel, port_names
from autopar.core.placement import Layout
from autopar.core.plan import NodePlan, Plan
from autopar.core.schedule import AUTOMATIC, Kind, Orders, actions
from autopar.cost_model import Cluster
from autopar.cost_model.pipeline import simulate_pipeline
from autopar.cost_model.stages import action_seconds
from autopar.critical_stages import CriticalStages
from autopar.errors import ConstraintError, InfeasiblePlanError
from autopar.own_orders import fastest_orders, least_held
from autopar.pipeline_stages import Pipeliner
from autopar.solver.fit import UNLIMITED
from autopar.solver.floor import Floors
from autopar.solver.ideal import BlockWork
from autopar.solver.ilp import Infeasible
from autopar.solver.meshes import meshes
from autopar.solver.microbatch import split_in_time
from autopar.solver.offers import Offers
from autopar.solver.overlap import EXPOSED, least_share
from autopar.solver.pins import with_roles
from autopar.solver.pipeline_shape import PipelineShape, balanced_cuts, stage_mesh
from autopar.solver.solve import KnownVariants, Solved, fits, in_other_flights, solve_step
from autopar.solver.turn import Turn, floored, windowed
from autopar.solver.windows import WindowKind, widened
from autopar.stage_menus import Aim

__all__ = ["StagePlanner", "on_the_clock"]


class StagePlanner:
    """Plans pipelines of one step; what several shapes have in common is made once.

    Args:
        traced: the step on the whole batch, folded or not.
        cluster: all devices.
        constraints: what is pinned inside the stages.
        memory_limit: bytes per device; default: the device's memory.
        optimizer: whose states count in memory.
        offers: what is known of ops on these devices.

    Raises:
        ConstraintError: the recomputation of a block is pinned that there is not.
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
        if isinstance(constraints.checkpoint, Mapping):
            pinned_kinds(constraints.checkpoint, Blocks(traced).every())  # else it says what is not
        self.traced = traced
        self.whole = cluster
        self.constraints = constraints
        self.limit = cluster.memory_bytes if memory_limit is None else int(memory_limit)
        self.optimizer = optimizer
        self.work = BlockWork(traced, cluster, offers.fused)
        self._micros: dict[int, tuple[dict[str, NodePlan], Microbatch]] = {}
        self._parts: dict[tuple[int, tuple[str, ...]], Staged] = {}
        self._solved: dict[object, Plan | InfeasiblePlanError] = {}
        self._free: dict[object, Solved] = {}
        self.offers = offers
        self._turns: dict[tuple[int, int], Turn] = {}
        self._wide: dict[tuple[int, int], Floors] = {}
        self.searches: dict[object, KnownVariants] | None = None  # of stages, to go on with

    def under(self, limit: int) -> StagePlanner:
        """The planner with another memory limit, and with all that is known already."""
        other = copy(self)
        other.limit = limit
        return other

    def plan(
        self,
        shape: PipelineShape,
        *,
        free: bool = False,
        below_s: float | None = None,
        alone: bool = False,
    ) -> Plan:
        """The plan of a step with a pipeline of a given shape.

        Args:
            shape: of the pipeline.
            free: without the memory limit, hence without recomputation: soon found.
            below_s: of a free plan, seconds above which it is of no use, nor beyond the limit.
            alone: plan stages for their own seconds, which may take less memory.

        Raises:
            Stopped: it is of no use.
            ConstraintError: the model cannot be split or cut so.
            InfeasiblePlanError: a stage does not fit.
        """
        cluster = self.rank_cluster(shape.size)
        orders: Orders
        if shape.schedule == AUTOMATIC:
            orders = least_held(shape.size, shape.microbatches)
        else:
            orders = actions(shape.schedule, shape.size, shape.microbatches, shape.chunks)
        time, _ = self.micro(shape.microbatches)
        cuts = shape.cuts
        if cuts is None:
            cuts = balanced_cuts(self.work, shape, self.turn(shape) if shape.chunks == 1 else None)
        if len(cuts) + 1 != shape.num_stages:
            raise ConstraintError(
                f"pipeline cuts make {len(cuts) + 1} stages, size {shape.size} × chunks "
                f"{shape.chunks} are {shape.num_stages}"
            )
        return Pipeliner(self, shape, cuts, cluster, orders, free, below_s, alone).run(time)

    def suited(self, plan: Plan) -> Plan:
        """The plan with stages for what the critical path of its schedule counts.

        Args:
            plan: of a pipeline of this step without recomputation or offload.

        Returns:
            A plan of the same shape that takes less, or the same plan.
        """
        p = plan.pipeline
        assert p is not None
        shape = PipelineShape(
            size=p.size,
            microbatches=p.microbatches,
            schedule=p.schedule,
            chunks=p.chunks,
            cuts=p.cuts,
        )
        cluster = self.rank_cluster(p.size)
        pipeliner = Pipeliner(self, shape, p.cuts, cluster, p.actions(), free=True, below_s=None)
        aims = {n: Aim(stage.solver.waits) for n, stage in enumerate(p.stages)}
        critical, (time, _) = CriticalStages(pipeliner, aims), self.micro(p.microbatches)
        if not pipeliner.holds(critical.plans):
            return plan  # the limit has made its stages others than the fastest
        suited = critical.suited()
        if pipeliner.automatic:
            pipeliner.order(suited)
        found = pipeliner.assembled(time, suited)
        faster = found.predicted.step_time_s < plan.predicted.step_time_s
        return found if faster and fits(found, cluster, self.limit) else plan

    def rank_cluster(self, size: int) -> Cluster:
        """The devices of one of so many pipeline ranks.

        Raises:
            ConstraintError: the ranks do not divide the devices.
        """
        mesh = stage_mesh(self.whole.mesh_shape, size)
        return replace(self.whole, mesh_shape=mesh, axis_names=self.whole.axis_names[-len(mesh) :])

    def ahead(self, size: int) -> int:
        """Forwards that the first of some ranks may begin ahead of its first gradient."""
        pin = self.constraints.pipeline
        automatic = pin is None or pin.schedule in (None, AUTOMATIC)
        return 2 * size - 1 if automatic else size

    def turn(self, shape: PipelineShape) -> Turn:
        """Lower bounds of all blocks on a rank of a pipeline, communication included.

        Raises:
            ConstraintError: the model cannot be split into such microbatches.
        """
        key = (shape.size, shape.microbatches)
        if key not in self._turns:
            body = self.micro(shape.microbatches)[1].body
            self._turns[key] = self._floored(body, shape, parts=True)
        return self._turns[key]

    def widen(self, shape: PipelineShape, kind: WindowKind) -> None:
        """Make `turn` higher by bounds of blocks that follow each other on a rank.

        Args:
            shape: of the pipeline.
            kind: which are bounded, with a name out of `turn.WIDE`.
        """
        key = (shape.size, shape.microbatches)
        turn, body = self.turn(shape), self.micro(shape.microbatches)[1].body
        if key not in self._wide:
            wide = widened(body) if body.repeats else body
            self._wide[key] = self._floors(wide, shape, parts=True)
        self._turns[key] = windowed(turn, self._wide[key], body, self.work.names, kind)

    def one_turn(self, shape: PipelineShape) -> Turn:
        """The same from the step in one turn, for any number of turns: soon found, and lower."""
        if (shape.size, 0) not in self._turns:
            whole = replace(shape, microbatches=1)
            self._turns[shape.size, 0] = self._floored(self.traced, whole, parts=False)
        return self._turns[shape.size, 0].in_turns(shape.microbatches)

    def coarser(self, shape: PipelineShape) -> list[Turn]:
        """The same from steps in fewer turns whose bounds are known."""
        return [
            turn.in_turns(shape.microbatches)
            for (size, turns), turn in self._turns.items()
            if size == shape.size and turns and shape.microbatches % turns == 0
        ]

    def least_alone_s(self) -> float:
        """Seconds that no plan in one piece is below, on any of its meshes, whatever it hides.

        Raises:
            ConstraintError: the constraints cannot hold.
        """
        whole = PipelineShape(size=1, microbatches=1, schedule="1f1b")
        given, *joined = meshes(self.whole, self.constraints)
        assert given.mesh_shape == self.whole.mesh_shape
        found = [self.one_turn(whole)]
        found += (self._floored(self.traced, whole, parts=False, cluster=c) for c in joined)
        return float(min(turn.step.sum() for turn in found)) * least_share(EXPOSED)

    def _floors(
        self, body: TracedModel, shape: PipelineShape, parts: bool, cluster: Cluster | None = None
    ) -> Floors:
        cluster = cluster or self.rank_cluster(shape.size)
        inside = replace(self.constraints, pipeline=None, params={})
        meshed = with_roles(cluster, assign_mesh(inside, cluster.mesh_shape))
        offers = self.offers.over(meshed)
        return Floors(body, inside, self.optimizer, offers, self.ahead(shape.size), parts)

    def _floored(
        self, body: TracedModel, shape: PipelineShape, parts: bool, cluster: Cluster | None = None
    ) -> Turn:
        floors = self._floors(body, shape, parts, cluster)
        ahead, devices = self.ahead(shape.size), self.whole.num_devices // shape.size
        try:
            return floored(self.work, floors, shape.microbatches, ahead, devices)
        except Infeasible as error:
            raise ConstraintError(
                f"{floors.pins.describe()} cannot hold on the {devices} devices of "
                f"each of {shape.size} pipeline ranks, with {shape.microbatches} microbatches: no "
                "combination of placements connects the ops"
            ) from error

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
        aim: Aim,
    ) -> Plan:
        """The plan of a kind of stage that receives what is settled, within a limit if there is.

        Raises:
            InfeasiblePlanError: it does not fit.
        """
        model = parts.stages.models[kind]
        if aim.waits is not None:
            model = replace(model, flight=replace(model.flight, waits=aim.waits))
        given = dict(aim.ports) | dict(settled)
        open_names = {s.node for s in model.inputs if s.kind == "received"} & settled.keys()
        taken = {
            name: given[name]
            for name in port_names(model)
            if name in given and not (aim.free and name in open_names)
        }
        turns = (model.microbatches, model.flight)
        limits = (limit, limit or self.limit)  # to solve within, and to say in the plan
        stage = (cuts, kind, *turns, cluster.mesh_shape, tuple(taken.items()))
        key = (stage, limits)
        if key not in self._solved:
            known: KnownVariants | None = None
            if self.searches is not None and limit is not None:
                known = self.searches.setdefault(stage, {})
            try:
                plan = self._plan(model, cluster, taken, limit, (cuts, kind), known)
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
        name: tuple[tuple[str, ...], int],
        known: KnownVariants | None,
    ) -> Plan:
        """The plan of a stage; without a limit, schedules share its choices.

        Raises:
            InfeasiblePlanError: it does not fit.
        """
        turns = (model.microbatches, model.flight.waits)
        key = (name, *turns, cluster.mesh_shape, tuple(taken.items()))
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
            known=known,
            proved_within=None if name[0] else 0,  # a pipeline is proved by bounds of its blocks
        )
        if limit is None and found.plan.checkpoint == "none":
            self._free[key] = found
        return found.plan

    def _inside(self, model: TracedModel) -> Constraints:
        """The constraints of a stage: those that speak of its parameters and blocks."""
        named = every_instance({s.target: None for s in model.parameters()}, model.repeats)
        params = {
            glob: wanted
            for glob, wanted in self.constraints.params.items()
            if fnmatch.filter(named, glob)
        }
        checkpoint = self.constraints.checkpoint
        if isinstance(checkpoint, Mapping):
            checkpoint = pins_among(checkpoint, Blocks(model).every()) or None
        return replace(self.constraints, pipeline=None, params=params, checkpoint=checkpoint)


def on_the_clock(shape: PipelineShape, plan: Plan) -> float:
    """What the stages of a plan promise to take in another schedule, halved for two chunks."""
    assert plan.pipeline is not None
    seconds: list[Mapping[Kind, float]] = []
    for _ in range(shape.chunks):
        for stage in plan.pipeline.stages:
            seconds.append({k: s / shape.chunks for k, s in action_seconds(stage).items()})
    orders: Orders
    if shape.schedule == plan.pipeline.schedule:
        orders = plan.pipeline.actions()
    elif shape.schedule == AUTOMATIC:
        none = [0.0] * (shape.size - 1)
        orders = fastest_orders(plan.pipeline.stages, none, shape.microbatches, None) or ()
    else:
        orders = actions(shape.schedule, shape.size, shape.microbatches, shape.chunks)
    return simulate_pipeline(orders, seconds).step_s
