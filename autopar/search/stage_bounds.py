"""What no pipeline of a step is below: bounds of its blocks on the ranks of each shape.

Bounds of blocks (`solver/pipelines/floor.py`) do not know where a pipeline is cut; what several
shapes have in common is made once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from autopar.codegen.microbatch import Microbatch, localise
from autopar.core.constraints import Constraints, assign_mesh
from autopar.core.graph import TracedModel
from autopar.core.plan import NodePlan
from autopar.core.schedule import AUTOMATIC
from autopar.cost_model import Cluster
from autopar.errors import ConstraintError
from autopar.solver.discrete.ilp import Infeasible
from autopar.solver.known import places_of
from autopar.solver.meshes import meshes
from autopar.solver.microbatch import split_in_time
from autopar.solver.offers import Offers
from autopar.solver.overlap import EXPOSED, least_share
from autopar.solver.pins import with_roles
from autopar.solver.pipelines.floor import Floors
from autopar.solver.pipelines.functionals import functionals
from autopar.solver.pipelines.held_floors import HeldFloors, runs_within
from autopar.solver.pipelines.held_runs import HeldRuns
from autopar.solver.pipelines.ideal import BlockWork
from autopar.solver.pipelines.pipeline_shape import PipelineShape, line_of, open_runs, stage_mesh
from autopar.solver.pipelines.ranks_together import Plane, least_together
from autopar.solver.pipelines.turn import Turn, floored, windowed
from autopar.solver.pipelines.windows import WindowKind, widened

__all__ = ["StageBounds"]


class StageBounds:
    """Bounds pipelines of one step; arguments as of `StagePlanner`."""

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
        self.offers = offers
        self.work = BlockWork(traced, cluster, offers.fused)
        self._times: dict[int, dict[str, NodePlan]] = {}
        self._refused: dict[int, ConstraintError] = {}  # numbers of microbatches
        self._micros: dict[int, tuple[dict[str, NodePlan], Microbatch]] = {}
        self._turns: dict[tuple[int, int], Turn] = {}
        self._alone: dict[tuple[int, ...], Turn] = {}  # of the step in one piece, by mesh
        # of the last shape without all sums: of many it would be much to hold
        self._begun: dict[tuple[int, int], Floors] = {}
        self._wide: dict[tuple[int, int], Floors] = {}
        self._within: dict[tuple[int, int, int], Mapping[str, HeldRuns]] = {}

    def rank_cluster(self, size: int) -> Cluster:
        """The devices of one of so many pipeline ranks.

        Raises:
            ConstraintError: the ranks do not divide the devices.
        """
        mesh = stage_mesh(self.whole.mesh_shape, size)
        return replace(self.whole, mesh_shape=mesh, axis_names=self.whole.axis_names[-len(mesh) :])

    def in_time(self, microbatches: int) -> dict[str, NodePlan]:
        """The placements of all ops over the microbatches.

        Raises:
            ConstraintError: the model cannot be split so, nor in a divisor of that number, as
                microbatches that follow each other would make one.
        """
        for fewer, error in self._refused.items():
            if microbatches % fewer == 0:
                raise error
        if microbatches not in self._times:
            try:
                time = split_in_time(self.traced, self.whole, microbatches)
            except ConstraintError as error:
                self._refused[microbatches] = error
                raise
            self._times[microbatches] = time
        return self._times[microbatches]

    def micro(self, microbatches: int) -> tuple[dict[str, NodePlan], Microbatch]:
        """The step on one microbatch, and the placements of all ops over the microbatches.

        Raises:
            ConstraintError: the model cannot be split so.
        """
        if microbatches not in self._micros:
            time = self.in_time(microbatches)
            self._micros[microbatches] = time, localise(self.traced, time, microbatches)
        return self._micros[microbatches]

    def ahead(self, size: int) -> int:
        """Forwards that the first of some ranks may begin ahead of its first gradient."""
        pin = self.constraints.pipeline
        automatic = pin is None or pin.schedule in (None, AUTOMATIC)
        return 2 * size - 1 if automatic else size

    def turn(self, shape: PipelineShape, sums: Collection[str] | None = None) -> Turn:
        """Lower bounds of all blocks on a rank of a pipeline, communication included.

        Args:
            shape: of the pipeline.
            sums: names of `functionals` of which they are found; default: all.

        Raises:
            ConstraintError: the model cannot be split into such microbatches.
        """
        key = (shape.size, shape.microbatches)
        known = self._turns.get(key)
        every = functionals(shape.microbatches, self.ahead(shape.size))
        wanted = every.keys() if sums is None else every.keys() & set(sums)
        names = wanted - (known.beside.keys() if known else set())
        if known is None or names:
            floors = self._begun.pop(key, None)
            if floors is None:
                floors = self._floors(self.micro(shape.microbatches)[1].body, shape)
            self._turns[key] = self._floored(floors, shape, names, known)
            self._begun = {} if sums is None else {key: floors}
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
            self._wide[key] = self._floors(wide, shape)
        self._turns[key] = windowed(turn, self._wide[key], body, self.work.names, kind)

    def together(
        self,
        shape: PipelineShape,
        turn: Turn,
        hop_s: float,
        limit_s: float,
        starts: Sequence[int] | None,
    ) -> float:
        """Seconds that its ranks take together at least (`ranks_together`), up to a limit.

        Args:
            shape: of the pipeline, with its schedule.
            turn: what is known of its blocks.
            hop_s: latency of a transfer.
            limit_s: bounds above it are of no use.
            starts: first blocks of all stages but the first; None: any.
        """
        sums = functionals(shape.microbatches, turn.ahead)
        planes = [Plane(w, turn.runs(name)) for name, w in sums.items() if name in turn.found]
        limit_s, runs = open_runs(shape, turn, hop_s, self.work.joint, limit_s, starts)
        return least_together(line_of(shape, hop_s), runs, planes, limit_s)

    def within(self, shape: PipelineShape) -> Mapping[str, HeldRuns]:
        """Lower bounds of runs of blocks on its ranks within the limit (`held_floors`)."""
        key = (shape.size, shape.microbatches, self.limit)
        if key not in self._within:
            body, cluster = self.micro(shape.microbatches)[1].body, self.rank_cluster(shape.size)
            floors = self._floors(body, shape)
            held = (
                HeldFloors([floors.held_as(place)], self.work.held, self.work.like)
                for place in places_of(cluster, self.constraints, self.optimizer)
            )
            self._within[key] = runs_within(held, shape.size, self.limit)
        return self._within[key]

    def coarser(self, shape: PipelineShape) -> list[Turn]:
        """The same from steps in fewer turns whose bounds are known."""
        known = [
            turn
            for (size, turns), turn in self._turns.items()
            if size == shape.size and shape.microbatches % turns == 0
        ]
        if shape.size == 1 and self.whole.mesh_shape in self._alone:
            known.append(self._alone[self.whole.mesh_shape])
        return [turn.in_turns(shape.microbatches) for turn in known]

    def least_alone_s(self, enough_s: float = 0.0) -> float:
        """Seconds that no plan in one piece is below, on any of its meshes, whatever it hides.

        Args:
            enough_s: no more is found out where that is so much or less.

        Raises:
            ConstraintError: the constraints cannot hold.
        """
        whole = PipelineShape(size=1, microbatches=1, schedule="1f1b")
        least_s = math.inf
        # few axes are soon searched
        given = meshes(self.whole, self.constraints)
        for cluster in sorted(given, key=lambda cluster: len(cluster.mesh_shape)):
            turn = self._alone.get(cluster.mesh_shape)
            if turn is None:
                floors = self._floors(self.traced, whole, cluster)
                turn = self._alone[cluster.mesh_shape] = self._floored(floors, whole, {"step"})
            least_s = min(least_s, float(turn.step.sum()) * least_share(EXPOSED))
            if least_s <= enough_s:
                break
        return least_s

    def _floors(
        self,
        body: TracedModel,
        shape: PipelineShape,
        cluster: Cluster | None = None,
    ) -> Floors:
        cluster = cluster or self.rank_cluster(shape.size)
        inside = replace(self.constraints, pipeline=None, params={})
        meshed = with_roles(cluster, assign_mesh(inside, cluster.mesh_shape))
        offers = self.offers.over(meshed)
        return Floors(body, inside, self.optimizer, offers, self.ahead(shape.size))

    def _floored(
        self,
        floors: Floors,
        shape: PipelineShape,
        names: Collection[str],
        known: Turn | None = None,
    ) -> Turn:
        ahead, devices = self.ahead(shape.size), self.whole.num_devices // shape.size
        ideal = Turn.ideal(self.work, shape.microbatches, ahead, devices)
        try:
            return floored(self.work, floors, known or ideal, names)
        except Infeasible as error:
            raise ConstraintError(
                f"{floors.pins.describe()} cannot hold on the {devices} devices of "
                f"each of {shape.size} pipeline ranks, with {shape.microbatches} microbatches: no "
                "combination of placements connects the ops"
            ) from error
