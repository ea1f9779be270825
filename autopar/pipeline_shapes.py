"""The shapes of pipelines that a search ranges over, their bounds, and what became of them.

A shape is bounded three times, each time closer: by the work of its ops alone, with the
communication of blocks in one turn (as no step gets cheaper by being run in more), and with that
in its own turns. All cuts are allowed for, and every schedule that the search may take: one stage
a rank in any order that begins with no more than 2 (p - r) - 1 forwards, such as 1F1B, zero-bubble
and automatic orders, and two chunks a rank interleaved, cut as they would be.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.core.considered import Considered
from autopar.core.constraints import PipelinePin, assign_mesh
from autopar.core.plan import Plan
from autopar.core.schedule import AUTOMATIC, SCHEDULES, actions
from autopar.core.units import format_bytes, format_seconds
from autopar.cost_model import CollectiveKind
from autopar.errors import AutoparError, ConstraintError
from autopar.solver.ilp import Infeasible
from autopar.solver.pipeline_shape import (
    PipelineShape,
    balanced_cuts,
    expected_seconds,
    least_seconds,
)
from autopar.solver.problem import Array
from autopar.solver.turn import WIDE, Turn, hoped
from autopar.solver.windows import WindowKind, kinds_for
from autopar.stage_planning import StagePlanner

__all__ = ["CLOSEST", "Shapes"]

CLOSEST = 2  # level of the closest bound of a shape that is planned
_HIGHER = 0.05  # by which sums of whole runs are taken to be higher, to see which of them tell
_TELLS = 1e-3  # of the bound
_TURNS_PER_RANK = (1, 2, 4)  # microbatches for each pipeline rank, where they are not pinned
_CLOSE = 3  # shapes of which the closest bound is found before the first is planned
_OF_ALL_TURNS = ("step", "end")  # what is not less in more turns
_KEPT = 12  # shapes that a plan tells of


@dataclass(slots=True)
class _Known:
    bound_s: float
    expected_s: float  # no less than the bound
    level: int = 0
    step_s: float | None = None
    why: str = ""
    wide: set[WindowKind] = field(default_factory=set)  # runs that are bounded, or tell nothing
    joined_s: float = 0.0  # up to which ranks are bounded together


class Shapes:
    """The shapes that a pin leaves open, with what is known of each.

    Args:
        planner: plans them.
        pin: what is pinned of a pipeline; without any, all is weighed against a plan in one piece.
        short: memory is short: also those of one rank.
    """

    def __init__(self, planner: StagePlanner, pin: PipelinePin, short: bool) -> None:
        self.planner = planner
        self.pin = pin
        self.known: dict[PipelineShape, _Known] = {}
        self.others: dict[PipelineShape, AutoparError] = {}  # that are impossible
        self.weighed: dict[PipelineShape, bool] = {}  # bounded with the limit, if that told
        self.together: dict[PipelineShape, float] = {}  # bounds of all ranks, by schedule
        for shape in self._listed(short):
            try:
                bound_s = self._bound(shape, 0)
                self.known[shape] = _Known(bound_s, bound_s)
            except ConstraintError as error:
                self.impossible(shape, error)

    # --- which there are -----------------------------------------------------------------------
    def _listed(self, short: bool) -> Iterator[PipelineShape]:
        pin, unasked = self.pin, self.pin == PipelinePin()
        devices, blocks = self.planner.whole.num_devices, len(self.planner.work.names)
        sizes = [pin.size] if pin.size else [
            n for n in range(1, devices + 1) if devices % n == 0 and n <= max(blocks, 1)
        ]  # fmt: skip
        for size in sizes:
            chunks = pin.chunks or (2 if pin.schedule == "interleaved" else 1)
            if pin.cuts is not None and pin.chunks is None:
                chunks = max(1, (len(pin.cuts) + 1) // size)
            schedule = pin.schedule or ("interleaved" if chunks > 1 else "1f1b")
            if unasked and size == 1 and not short:
                continue  # more turns, and nothing to gain
            for turns in [pin.microbatches] if pin.microbatches else self._turns(size, chunks):
                yield PipelineShape(
                    size=size,
                    microbatches=turns,
                    schedule=schedule,
                    chunks=chunks,
                    cuts=pin.cuts and self.planner.work.named(pin.cuts),
                )

    def _turns(self, size: int, chunks: int) -> list[int]:
        """Numbers of microbatches to try: of a pinned pipeline, also fewer than it has ranks."""
        unasked = self.pin == PipelinePin()
        given = (s.shape[0] for s in self.planner.traced.inputs if s.kind == "input" and s.shape)
        batch = max(given, default=1)
        most = max(_TURNS_PER_RANK) * max(size, 4)
        least = max(size, 2) if unasked else 2
        found = {n for n in range(least, min(batch, most) + 1) if batch % n == 0}
        # which input has the batch, and where, is not known here
        found |= set() if unasked else {size * n for n in _TURNS_PER_RANK}
        return sorted(n for n in found if chunks == 1 or n % size == 0)

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

    # --- bounds --------------------------------------------------------------------------------
    def open(self, limit_s: float) -> list[PipelineShape]:
        """Shapes without a plan that may take less than some seconds, the least bound first."""
        found = [s for s, k in self.known.items() if not k.why and k.bound_s < limit_s]
        return sorted(found, key=lambda s: (self.known[s].bound_s, s.size, s.microbatches))

    def most_promising(self, limit_s: float, *, planned: bool = True) -> PipelineShape | None:
        """The shape to plan next, that is expected to take less than some seconds, if there is one.

        Bounds are made closer until no shape but one with its closest bound looks better, or enough
        of them have been.

        Args:
            limit_s: above which a shape is of no use.
            planned: some plan takes about as long, so that many shapes are to be ruled out.
        """
        while True:
            found = [s for s, k in self.known.items() if not k.why and k.expected_s < limit_s]
            close = [s for s in found if self.is_close(s)]
            if len(close) >= _CLOSE:
                found = close
            if not found:
                return None
            best = min(found, key=lambda s: (self.known[s].expected_s, s.size, s.microbatches))
            if self.is_close(best):
                return best
            self.closer(self._tells_of(best, found) if planned and limit_s < math.inf else best)

    def _tells_of(self, shape: PipelineShape, found: Sequence[PipelineShape]) -> PipelineShape:
        """The shape to bound more closely first: one of fewer turns also bounds this one."""
        return min(
            (s for s in found if _bounds(s, shape) and not self.is_close(s)),
            key=lambda s: s.microbatches,
        )

    def close_least(self, limit_s: float, short: bool = False) -> None:
        """Make the least bound below some seconds, that of all shapes, as close as can be.

        Args:
            limit_s: of which bounds are of use.
            short: the memory limit may tell of them.
        """
        while True:
            found = [s for s, k in self.known.items() if k.bound_s < limit_s]
            least = min(found, key=lambda s: (self.known[s].bound_s, s.size), default=None)
            if least is None:
                return
            if not self.is_close(least):
                self.closer(least)
            elif not (
                (short and self._weigh(least)) or self._widen(least) or self._join(least, limit_s)
            ):
                return

    def _weigh(self, shape: PipelineShape) -> bool:
        """Raise a bound by what ranks take within the limit; False if that tells nothing.

        A shape of the fewest turns first: it also bounds those of more.
        """
        likes = [s for s in self.known if _bounds(s, shape) and s.chunks == shape.chunks == 1]
        fewer = sorted(likes, key=lambda s: s.microbatches)
        for each in (*fewer[:1], shape) if shape.chunks == 1 else ():
            if each not in self.weighed:
                before = self.known[shape].bound_s
                self.weighed[each] = False
                with suppress(Infeasible):
                    self.weighed[each] = any(map(len, self.planner.within(each).values()))
                for other in [s for s in self.known if _bounds(each, s)]:
                    self.raised(other, self._bound(other, self.known[other].level))
                if self.known[shape].bound_s > before:
                    return True
        return False

    def least_s(self) -> float:
        """Seconds that no plan of any shape can beat."""
        return min((k.bound_s for k in self.known.values()), default=math.inf)

    def is_open(self, shape: PipelineShape) -> bool:
        """True if it is not known what becomes of a shape."""
        return shape in self.known and not self.known[shape].why

    def expect(self, shape: PipelineShape, seconds: float) -> None:
        """Note what a shape is now expected to take, with other cuts."""
        known = self.known[shape]
        known.expected_s = max(known.expected_s, seconds)

    def is_close(self, shape: PipelineShape) -> bool:
        """True if no closer bound is to be had."""
        return self.known[shape].level >= CLOSEST

    def closer(self, shape: PipelineShape) -> None:
        """Raise the bound of a shape."""
        known = self.known[shape]
        known.level += 1
        try:
            self.raised(shape, self._bound(shape, known.level))
            if known.level == CLOSEST and shape.chunks == 1 and shape.cuts is None:
                turn = self._turn(shape, CLOSEST, self.planner.rank_cluster(shape.size).num_devices)
                expected_s = expected_seconds(self.planner.work, shape, turn)
                known.expected_s = max(known.bound_s, expected_s)
            if known.level == CLOSEST:
                for other in [s for s in self.known if s != shape and _bounds(shape, s)]:
                    self.raised(other, self._bound(other, self.known[other].level))
        except Infeasible:
            return  # planning says what is wrong
        except ConstraintError as error:
            self.impossible(shape, error)

    def _widen(self, shape: PipelineShape) -> bool:
        """Raise a bound by what whole runs of blocks take of a step; False if that tells nothing.

        Of the sums that a bound is made of, and of runs, that is taken which matters most to it.
        """
        known, blocks = self.known[shape], len(self.planner.work.names)
        left = {name: kinds_for(name, blocks, shape.size) for name in WIDE}
        left = {name: [k for k in kinds if k not in known.wide] for name, kinds in left.items()}
        enough_s = known.bound_s * (1 + _TELLS)
        hopes = {name: self._bound(shape, known.level, kinds) for name, kinds in left.items()}
        for name in sorted(WIDE, key=hopes.__getitem__, reverse=True):
            if hopes[name] <= enough_s:
                break
            each = {kind: self._bound(shape, known.level, [kind]) for kind in left[name]}
            best = max(each, key=each.__getitem__)
            if each[best] <= enough_s:
                continue
            with suppress(Infeasible):  # planning says what is wrong
                self.planner.widen(shape, best)
            self.raised(shape, self._bound(shape, known.level))
            # where one tells nothing, blocks of this sum have little to hand on
            known.wide.update([best] if known.bound_s > enough_s else left[name])
            return True
        return False

    def _join(self, shape: PipelineShape, limit_s: float) -> bool:
        """Raise a bound by what all ranks take together; False if that tells nothing.

        Of the schedules that with the least bound comes first; behind it others matter no more.
        """
        known = self.known[shape]
        if known.joined_s >= limit_s or math.isinf(limit_s):
            return False
        known.joined_s, before = limit_s, known.bound_s
        cluster = self.planner.rank_cluster(shape.size)
        turn, hop_s = self._turn(shape, known.level, cluster.num_devices), self._hop_s(shape)
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
        self.raised(shape, self._bound(shape, known.level))
        return known.bound_s > before

    def _may_join(self, shape: PipelineShape) -> bool:
        """True if something is known of the order of its ranks, and its cuts are possible."""
        fixed = shape.chunks > 1 or shape.cuts is not None
        known = shape.schedule in (*SCHEDULES, AUTOMATIC) and shape.num_stages > 1
        return known and not (fixed and self._starts(shape) is None)

    def raised(self, shape: PipelineShape, bound_s: float) -> None:
        """Note another bound of a shape."""
        known = self.known[shape]
        known.bound_s = max(known.bound_s, bound_s)
        known.expected_s = max(known.expected_s, known.bound_s)

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
        if level:
            turn = turn.above(self.planner.one_turn(shape))
        for coarser in self.planner.coarser(shape):
            turn = turn.above(coarser)
        if level == CLOSEST:
            turn = turn.above(self.planner.turn(shape))
        within: dict[str, Array] = {}
        for other, tells in self.weighed.items():
            if tells and _bounds(other, shape):
                for name, runs in self.planner.within(other).items():
                    if other == shape or name in _OF_ALL_TURNS:
                        within[name] = np.maximum(within.get(name, 0.0), runs)
        return replace(turn, within=within)

    def _of_schedule(self, shape: PipelineShape, turn: Turn, hop_s: float) -> float:
        starts = self._starts(shape)
        if shape.chunks > 1 or shape.cuts is not None:
            if starts is None:
                return 0.0
        elif shape.num_stages > 1:
            balanced_cuts(self.planner.work, shape, None)  # there are blocks enough
        least_s = least_seconds(shape, turn, hop_s, self.planner.work.joint, starts)
        return max(least_s, self.together.get(shape, 0.0))

    def _starts(self, shape: PipelineShape) -> list[int] | None:
        """First blocks of all stages but the first; None: any, or bad cuts: planning says so."""
        work = self.planner.work
        if shape.chunks == 1 and shape.cuts is None:
            return None
        cuts = shape.cuts or balanced_cuts(work, shape, None)
        if not set(cuts) <= set(work.names) or len(cuts) + 1 != shape.num_stages:
            return None
        starts = [work.names.index(cut) for cut in cuts]
        return starts if starts == sorted(set(starts)) and 0 not in starts else None

    # --- what became of them -------------------------------------------------------------------
    @property
    def refused(self) -> AutoparError | None:
        """Why no shape has a plan: of the fewest turns, as more may just not divide the batch."""
        least = min(self.others, key=lambda s: (s.microbatches, s.size), default=None)
        return None if least is None else self.others[least]

    def impossible(self, shape: PipelineShape, error: AutoparError) -> None:
        """Note a shape that no plan has."""
        self.known.pop(shape, None)
        self.others[shape] = error

    def settle(self, shape: PipelineShape, why: str, step_s: float | None = None) -> None:
        """Note that a shape need not be planned any more."""
        self.known[shape].why = why
        self.known[shape].step_s = step_s

    def planned(self, shape: PipelineShape, plan: Plan) -> None:
        """Note the plan of a shape."""
        step_s = plan.predicted.step_time_s
        self.settle(shape, f"takes {format_seconds(step_s)}", step_s)
        if shape.size == 1:
            self.raised(shape, plan.solver.bound)

    def too_large(self, shape: PipelineShape, peak_bytes: int) -> None:
        """Note a shape that does not fit, and those whose microbatches are larger yet."""
        need = f"needs {format_bytes(peak_bytes)}"
        self.settle(shape, f"{need} without recomputation")
        for other in self.known:
            if other.size == shape.size and other.microbatches < shape.microbatches:
                self.settle(other, f"with {shape.microbatches} microbatches it {need}")

    def considered(self, chosen: tuple[int, int], limit_s: float) -> tuple[Considered, ...]:
        """The most promising shapes that were not chosen, and why.

        Args:
            chosen: ranks and microbatches of the plan.
            limit_s: seconds that another one would have had to stay below.
        """
        rows = [
            Considered(
                shape=str(shape),
                bound_s=known.bound_s,
                step_s=known.step_s,
                why=known.why or _not_planned(known.bound_s, limit_s),
            )
            for shape, known in self.known.items()
            if (shape.size, shape.microbatches) != chosen
        ]
        rows.sort(key=lambda row: (row.bound_s or 0.0, row.shape))
        refused = [Considered(shape=str(s), why=str(why)) for s, why in self.others.items()]
        return tuple([*rows, *refused][:_KEPT])


def _bounds(shape: PipelineShape, other: PipelineShape) -> bool:
    """True if the blocks of one shape take no longer than those of another one, in more turns."""
    return shape.size == other.size and other.microbatches % shape.microbatches == 0


def _not_planned(bound_s: float, limit_s: float) -> str:
    if bound_s >= limit_s:
        return f"bound {format_seconds(bound_s)} ≥ {format_seconds(limit_s)}"
    return f"not planned: others looked better, its bound is {format_seconds(bound_s)}"
