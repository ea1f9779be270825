"""Bounds of the shapes of pipelines that a search ranges over.

A shape is bounded four times, each time closer: by the work of its ops alone, with the
communication of whole steps, of what is not in front of their turns, and of all sums of their parts
(`functionals`). As no step gets cheaper by being run in more turns, each also bounds those of more.
All cuts are allowed for, and every schedule that the search may take: one stage a rank in any order
that begins with no more than 2 (p - r) - 1 forwards, such as 1F1B, zero-bubble and automatic
orders, and two chunks a rank interleaved, cut as they would be.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.core.constraints import PipelinePin, assign_mesh
from autopar.core.schedule import AUTOMATIC, SCHEDULES, actions
from autopar.cost_model import CollectiveKind
from autopar.search.stage_planning import StagePlanner
from autopar.solver.pipelines.balanced_cuts import balanced_cuts
from autopar.solver.pipelines.held_runs import HeldRuns
from autopar.solver.pipelines.pipeline_shape import PipelineShape, least_seconds
from autopar.solver.pipelines.turn import Turn, hoped
from autopar.solver.pipelines.windows import WindowKind

__all__ = ["CLOSEST", "ShapeBounds", "is_bound_of"]

CLOSEST = 3  # level of the closest bound of a shape that is planned
_SUMS = {1: ("step",), 2: ("step", "end"), CLOSEST: None}  # that are found by level; None: all
_HIGHER = 0.05  # by which sums of whole runs are taken to be higher, to see which of them tell
_OF_ALL_TURNS = ("step", "end")  # what is not less in more turns


class ShapeBounds:
    """Bounds shapes, with what has been found out; arguments as of `Shapes`."""

    def __init__(self, planner: StagePlanner, pin: PipelinePin) -> None:
        self.planner = planner
        self.pin = pin
        self.weighed: dict[PipelineShape, bool] = {}  # bounded with the limit, if that told
        self.together: dict[PipelineShape, float] = {}  # bounds of all ranks, by schedule
        self._balanced: dict[PipelineShape, tuple[str, ...]] = {}

    def schedules(self, shape: PipelineShape) -> Iterator[PipelineShape]:
        """The shape with the other schedules that it may run by."""
        if shape.size == 1 or self.pin.schedule or shape.schedule != "1f1b":
            return
        yield replace(shape, schedule=AUTOMATIC)
        work = self.planner.work
        deep = len(work.names) - sum(work.joint) >= 2 * shape.size
        if deep and self.pin.chunks is None and shape.cuts is None:
            if shape.microbatches % shape.size == 0:
                yield replace(shape, schedule="interleaved", chunks=2)

    def _bound(self, shape: PipelineShape, level: int, kinds: Sequence[WindowKind] = ()) -> float:
        """Seconds that no plan of a shape can beat, with any schedule that is not pinned.

        Args:
            shape: of the pipeline.
            level: how close.
            kinds: runs that are taken to be higher than is known.

        Raises:
            ConstraintError: the shape does not fit the devices, the blocks or its schedule.
        """
        actions(shape.schedule, shape.size, shape.microbatches, shape.chunks)
        cluster = self.planner.rank_cluster(shape.size)
        assign_mesh(replace(self.planner.constraints, pipeline=None), cluster.mesh_shape)
        turn = self._turn(shape, level, cluster.num_devices)
        if kinds:
            body = self.planner.micro(shape.microbatches)[1].body
            turn = hoped(turn, body, self.planner.work.names, kinds, _HIGHER)
        hop_s = self._hop_s(shape)
        return min(self._of_schedule(each, turn, hop_s) for each in self._any_of(shape))

    def _hop_s(self, shape: PipelineShape) -> float:
        """Seconds that a transfer between two ranks takes at least."""
        cluster = self.planner.rank_cluster(shape.size)
        line = replace(
            cluster,
            mesh_shape=(shape.size, *cluster.mesh_shape),
            axis_names=("pipeline", *(f"axis{i}" for i in range(len(cluster.mesh_shape)))),
        )
        share = self.planner.work.crossing_bytes // (shape.microbatches * cluster.num_devices)
        return line.collective_seconds(CollectiveKind("send_recv"), max(1, share), 0)

    def _any_of(self, shape: PipelineShape) -> list[PipelineShape]:
        """The shape with each schedule whose bounds are to be known."""
        others = list(self.schedules(shape))
        if any(other.schedule == AUTOMATIC for other in others):
            return others  # any order of one stage a rank has the bounds of automatic ones
        return [shape, *others]

    def _turn(self, shape: PipelineShape, level: int, devices: int) -> Turn:
        ahead = self.planner.ahead(shape.size)
        turn = Turn.ideal(self.planner.work, shape.microbatches, ahead, devices)
        for coarser in self.planner.coarser(shape):
            turn = turn.above(coarser)
        if level:
            turn = turn.above(self.planner.turn(shape, _SUMS[level]))
        within: dict[str, list[HeldRuns]] = {}
        for other, tells in self.weighed.items():
            if tells and is_bound_of(other, shape):
                for name, runs in self.planner.within(other).items():
                    if other == shape or name in _OF_ALL_TURNS:
                        within.setdefault(name, []).append(runs)
        return replace(turn, within=within)

    def _of_schedule(self, shape: PipelineShape, turn: Turn, hop_s: float) -> float:
        starts = self._starts(shape)
        if shape.chunks > 1 or shape.cuts is not None:
            if starts is None:
                return 0.0
        elif shape.num_stages > 1:
            self._cuts(shape)  # there are blocks enough
        least_s = least_seconds(shape, turn, hop_s, self.planner.work.joint, starts)
        return max(least_s, self.together.get(shape, 0.0))

    def _starts(self, shape: PipelineShape) -> list[int] | None:
        """First blocks of all stages but the first; None: any, or bad cuts: planning says so."""
        work = self.planner.work
        if shape.chunks == 1 and shape.cuts is None:
            return None
        cuts = shape.cuts or self._cuts(shape)
        if not set(cuts) <= set(work.names) or len(cuts) + 1 != shape.num_stages:
            return None
        starts = [work.names.index(cut) for cut in cuts]
        return starts if starts == sorted(set(starts)) and 0 not in starts else None

    def _cuts(self, shape: PipelineShape) -> tuple[str, ...]:
        """Where a shape is cut by the work of its blocks alone.

        Raises:
            ConstraintError: there are fewer blocks than stages.
        """
        if shape not in self._balanced:
            self._balanced[shape] = balanced_cuts(self.planner.work, shape, None)
        return self._balanced[shape]

    def _find_together(self, shape: PipelineShape, level: int, limit_s: float) -> None:
        """Bound all ranks together, up to a limit.

        Of the schedules that with the least bound comes first; behind it others matter no more.
        """
        cluster = self.planner.rank_cluster(shape.size)
        turn, hop_s = self._turn(shape, level, cluster.num_devices), self._hop_s(shape)
        left = {each: self._of_schedule(each, turn, hop_s) for each in self._any_of(shape)}
        while left:
            each = min(left, key=left.__getitem__)
            if left[each] >= limit_s or not self._may_join(each):
                break
            starts, alone_s = self._starts(each), left.pop(each)
            found_s = self.planner.together(each, turn, hop_s, limit_s, starts)
            self.together[each] = max(found_s, self.together.get(each, 0.0))
            if max(alone_s, found_s) <= min(left.values(), default=math.inf):
                break

    def _may_join(self, shape: PipelineShape) -> bool:
        """True if something is known of the order of its ranks, and its cuts are possible."""
        fixed = shape.chunks > 1 or shape.cuts is not None
        known = shape.schedule in (*SCHEDULES, AUTOMATIC) and shape.num_stages > 1
        return known and not (fixed and self._starts(shape) is None)


def is_bound_of(shape: PipelineShape, other: PipelineShape) -> bool:
    """True if the blocks of one shape take no longer than those of another one, in more turns."""
    return shape.size == other.size and other.microbatches % shape.microbatches == 0
