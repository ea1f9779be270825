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

from autopar.codegen.stages import Staged, cut_body
from autopar.core.block_kinds import pinned_kinds, pins_among
from autopar.core.blocks import Blocks
from autopar.core.constraints import Constraints
from autopar.core.folding import every_instance
from autopar.core.graph import TracedModel, port_names
from autopar.core.placement import Layout
from autopar.core.plan import Plan
from autopar.core.schedule import AUTOMATIC, Kind, Orders, actions
from autopar.cost_model import Cluster
from autopar.cost_model.pipeline import simulate_pipeline
from autopar.cost_model.stages import action_seconds
from autopar.errors import ConstraintError, InfeasiblePlanError
from autopar.search.critical_stages import CriticalStages
from autopar.search.own_orders import fastest_orders, least_held
from autopar.search.pipeline_stages import Pipeliner
from autopar.search.stage_bounds import StageBounds
from autopar.search.stage_menus import Aim
from autopar.solver.discrete.time_limit import check_time
from autopar.solver.fit import UNLIMITED
from autopar.solver.offers import Offers
from autopar.solver.pipelines.balanced_cuts import balanced_cuts
from autopar.solver.pipelines.pipeline_shape import PipelineShape
from autopar.solver.solve import KnownVariants, Solved, StepSearch, fits, in_other_flights

__all__ = ["StagePlanner", "on_the_clock"]


class StagePlanner(StageBounds):
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
        super().__init__(traced, cluster, constraints, memory_limit, optimizer, offers)
        self._parts: dict[tuple[int, tuple[str, ...]], Staged] = {}
        self._solved: dict[object, Plan | InfeasiblePlanError] = {}
        self._free: dict[object, Solved] = {}
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
        as_is: bool = False,
    ) -> Plan:
        """The plan of a step with a pipeline of a given shape.

        Args:
            shape: of the pipeline.
            free: without the memory limit, hence without recomputation: soon found.
            below_s: seconds above which it is of no use; nor is a free plan beyond the limit then.
            alone: plan stages for their own seconds, which may take less memory.
            as_is: within the limit by placements, without recomputation and offload.

        Raises:
            Stopped: it is of no use.
            ConstraintError: the model cannot be split or cut so.
            InfeasiblePlanError: a stage does not fit.
        """
        check_time()
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
        pipeliner = Pipeliner(self, shape, cuts, cluster, orders, free, below_s, alone, as_is)
        return pipeliner.run(time)

    def suited(self, plan: Plan) -> Plan:
        """The plan with stages for what the critical path of its schedule counts.

        They are planned without a limit, if the first ones are what that gives, or else within it.

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
        aims = {n: Aim(stage.solver.waits) for n, stage in enumerate(p.stages)}
        for as_is in (False, True):
            given = (self, shape, p.cuts, cluster, p.actions())
            pipeliner = Pipeliner(*given, free=not as_is, below_s=None, as_is=as_is)
            try:
                critical = CriticalStages(pipeliner, aims)
            except InfeasiblePlanError:
                return plan
            if pipeliner.holds(critical.plans):
                break
        else:
            return plan
        suited, (time, _) = critical.suited(), self.micro(p.microbatches)
        if pipeliner.automatic and pipeliner.as_is:  # else their orders are annealed
            pipeliner.order(suited, search=True)
        found = pipeliner.assembled(time, suited)
        faster = found.predicted.step_time_s < plan.predicted.step_time_s
        return found if faster and fits(found, cluster, self.limit) else plan

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
        as_is: bool = False,
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
        stage = (cuts, kind, *turns, cluster.mesh_shape, tuple(taken.items()), as_is)
        key = (stage, limits)
        if key not in self._solved:
            known: KnownVariants | None = None
            if self.searches is not None and limit is not None:
                known = self.searches.setdefault(stage, {})
            try:
                plan = self._plan(model, cluster, taken, limit, (cuts, kind), known, as_is)
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
        as_is: bool,
    ) -> Plan:
        """The plan of a stage; without a limit, schedules share its choices.

        Raises:
            InfeasiblePlanError: it does not fit.
        """
        turns = (model.microbatches, model.flight.waits)
        key = (name, *turns, cluster.mesh_shape, tuple(taken.items()))
        if limit is None and key in self._free:
            return in_other_flights(self._free[key], model).plan
        pinned = inside = self._inside(model)
        if as_is:
            inside = replace(pinned, checkpoint="none", offload=pinned.offload or "none")
        search = StepSearch(
            model,
            cluster,
            constraints=inside,
            memory_limit=UNLIMITED if limit is None else limit,
            optimizer=self.optimizer,
            ports=taken,
            offers=self.offers,
            known=known,
            proved_within=None if name[0] else 0,  # a pipeline is proved by bounds of its blocks
        )
        found = search.run()
        if limit is None and found.plan.checkpoint == "none":
            self._free[key] = found
        return replace(found.plan, constraints=pinned.to_dict())

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
