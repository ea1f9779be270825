"""The shapes of pipelines that a search ranges over, their bounds, and what became of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from autopar.core.considered import Considered
from autopar.core.constraints import PipelinePin
from autopar.core.plan import Plan
from autopar.core.units import format_bytes, format_seconds
from autopar.errors import AutoparError, ConstraintError
from autopar.search.shape_bounds import CLOSEST, ShapeBounds, is_bound_of
from autopar.search.stage_planning import StagePlanner
from autopar.solver.discrete.ilp import Infeasible
from autopar.solver.discrete.time_limit import check_time
from autopar.solver.pipelines.balanced_cuts import expected_seconds
from autopar.solver.pipelines.pipeline_shape import PipelineShape
from autopar.solver.pipelines.turn import WIDE
from autopar.solver.pipelines.windows import WindowKind, kinds_for

__all__ = ["Shapes"]

_TELLS = 1e-3  # of the bound
_TURNS_PER_RANK = (1, 2, 4)  # microbatches for each pipeline rank, where they are not pinned
_CLOSE = 3  # shapes of which the closest bound is found before the first is planned
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


class Shapes(ShapeBounds):
    """The shapes that a pin leaves open, with what is known of each.

    Args:
        planner: plans them.
        pin: what is pinned of a pipeline; without any, all is weighed against a plan in one piece.
        short: memory is short: also those of one rank.
    """

    def __init__(self, planner: StagePlanner, pin: PipelinePin, short: bool) -> None:
        super().__init__(planner, pin)
        self.known: dict[PipelineShape, _Known] = {}
        self.others: dict[PipelineShape, AutoparError] = {}  # that are impossible
        listed = list(self._listed(short))
        turns = {shape.microbatches for shape in listed}
        for shape in listed:
            try:
                planner.in_time(_fewest(shape.microbatches, turns))
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

    # --- bounds --------------------------------------------------------------------------------
    def open(self, limit_s: float) -> list[PipelineShape]:
        """Shapes without a plan that may take less than some seconds, the least bound first."""
        found = [s for s, k in self.known.items() if not k.why and k.bound_s < limit_s]
        return sorted(found, key=lambda s: (self.known[s].bound_s, s.size, s.microbatches))

    def most_promising(self, limit_s: float) -> PipelineShape | None:
        """The shape to plan next, that is expected to take less than some seconds, if there is one.

        Bounds are made closer until no shape but one with its closest bound looks better, or enough
        of them have been.

        Args:
            limit_s: above which a shape is of no use.
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
            # where many are to be ruled out, one of fewer turns first: it also bounds those of more
            self.closer(best if math.isinf(limit_s) else self._tells_of(best, found))

    def _tells_of(self, shape: PipelineShape, found: Sequence[PipelineShape]) -> PipelineShape:
        """The shape to bound more closely first: this one, or one that it has a bound from."""
        return min(
            (s for s in found if is_bound_of(s, shape) and not self.is_close(s)),
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
        likes = [s for s in self.known if is_bound_of(s, shape) and s.chunks == shape.chunks == 1]
        fewer = sorted(likes, key=lambda s: s.microbatches)
        for each in (*fewer[:1], shape) if shape.chunks == 1 else ():
            if each not in self.weighed:
                before = self.known[shape].bound_s
                self.weighed[each] = False
                with suppress(Infeasible):
                    self.weighed[each] = bool(self.planner.within(each))
                for other in [s for s in self.known if is_bound_of(each, s)]:
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
        check_time()
        known = self.known[shape]
        known.level += 1
        try:
            self.raised(shape, self._bound(shape, known.level))
            if known.level == CLOSEST and shape.chunks == 1 and shape.cuts is None:
                turn = self._turn(shape, CLOSEST, self.planner.rank_cluster(shape.size).num_devices)
                expected_s = expected_seconds(self.planner.work, shape, turn)
                known.expected_s = max(known.bound_s, expected_s)
            for other in [s for s in self.known if s != shape and is_bound_of(shape, s)]:
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
        """Raise a bound by what all ranks take together; False if that tells nothing."""
        known = self.known[shape]
        if known.joined_s >= limit_s or math.isinf(limit_s):
            return False
        known.joined_s, before = limit_s, known.bound_s
        self._find_together(shape, known.level, limit_s)
        self.raised(shape, self._bound(shape, known.level))
        return known.bound_s > before

    def raised(self, shape: PipelineShape, bound_s: float) -> None:
        """Note another bound of a shape."""
        known = self.known[shape]
        known.bound_s = max(known.bound_s, bound_s)
        known.expected_s = max(known.expected_s, known.bound_s)

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

    def considered(
        self, chosen: tuple[int, int], limit_s: float, out_of_time: bool = False
    ) -> tuple[Considered, ...]:
        """The most promising shapes that were not chosen, and why.

        Args:
            chosen: ranks and microbatches of the plan.
            limit_s: seconds that another one would have had to stay below.
            out_of_time: the search ended before all that looked promising was planned.
        """
        rows = [
            Considered(
                shape=str(shape),
                bound_s=known.bound_s,
                step_s=known.step_s,
                why=known.why or _not_planned(known.bound_s, limit_s, out_of_time),
            )
            for shape, known in self.known.items()
            if (shape.size, shape.microbatches) != chosen
        ]
        rows.sort(key=lambda row: (row.bound_s or 0.0, row.shape))
        refused = [Considered(shape=str(s), why=str(why)) for s, why in self.others.items()]
        return tuple([*rows, *refused][:_KEPT])


def _fewest(microbatches: int, listed: Collection[int]) -> int:
    """The least of some numbers that divides one of them: what cannot run in it, cannot in that."""
    return min((n for n in listed if n > 1 and microbatches % n == 0), default=1)


def _not_planned(bound_s: float, limit_s: float, out_of_time: bool) -> str:
    if bound_s >= limit_s:
        return f"bound {format_seconds(bound_s)} ≥ {format_seconds(limit_s)}"
    why = "the time was up" if out_of_time else "others looked better"
    return f"not planned: {why}, its bound is {format_seconds(bound_s)}"
