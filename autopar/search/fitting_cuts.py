"""Cuts of pipelines that memory binds: with which a shape fits as it is, or recomputes least."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

from autopar.core.plan import Plan
from autopar.core.schedule import AUTOMATIC
from autopar.core.units import format_seconds
from autopar.errors import ConstraintError, InfeasiblePlanError
from autopar.search.pipeline_shapes import Shapes
from autopar.search.pipeline_stages import Stopped
from autopar.search.stage_planning import StagePlanner
from autopar.solver.pipelines.memory_cuts import RECOMPUTED, RankBytes, cuts_within
from autopar.solver.pipelines.pipeline_shape import PipelineShape

__all__ = ["FittingCuts"]

_RECUTS = 3  # times that a shape that is too large is cut anew
_LIGHTER = 1.6  # times the limit, that stages planned for it may take without
_SPARE = 0.05  # of the limit, for what is only estimated


class FittingCuts:
    """Plans shapes under a memory limit, with other cuts where those by time are too large.

    Args:
        planner: under the limit.

    Attributes:
        large: shapes that do not fit as they are, with any cuts that were tried.
        tried: other cuts of a shape that was too large, the latest last.
    """

    def __init__(self, planner: StagePlanner) -> None:
        self.planner = planner
        self.large: list[PipelineShape] = []
        self._full: dict[PipelineShape, dict[int, RankBytes]] = {}  # ranks that were too large
        self.tried: dict[PipelineShape, list[tuple[str, ...]]] = {}

    @property
    def is_short(self) -> bool:
        """True if some rank was too large."""
        return bool(self._full)

    def fitting(self, shape: PipelineShape, shapes: Shapes, below_s: float) -> Plan | None:
        """The plan of a shape without recomputation; None where it does not fit, or is slower.

        Automatic orders first: they wait least, and 1F1B holds least; then both with stages that
        are planned for their own seconds, which may hold less, too; then with stages that are
        planned for the limit.
        """
        cut = self._cut(shape)
        waits_least = [s for s in shapes.schedules(cut) if s.schedule == AUTOMATIC]
        alone = (False, True) if shape.size > 1 else (False,)
        for own, each in itertools.product(alone, (*waits_least, cut)):
            try:
                return self.planner.plan(each, free=True, below_s=below_s, alone=own)
            except Stopped as stopped:
                if not stopped.kinds:
                    shapes.settle(shape, f"takes {format_seconds(stopped.least_s)} at least")
                    return None
                peak_bytes = sum(stopped.kinds.values())
                run = self.planner.work.run_of(stopped.cuts, stopped.rank)
                known = self._full.setdefault(shape, {})
                known[stopped.rank] = RankBytes.of(run, stopped.kinds, peak_bytes)
            except (ConstraintError, InfeasiblePlanError) as error:
                shapes.impossible(shape, error)
                return None
        if peak_bytes <= _LIGHTER * self.planner.limit and self._may_be_lighter(shape):
            for each in (*waits_least, cut):
                try:
                    return self.planner.plan(each, below_s=below_s, as_is=True)
                except Stopped as stopped:
                    if not stopped.kinds:
                        break  # too slow; the others wait longer, though they hold less
                except InfeasiblePlanError:
                    continue
        if not self._recut(shape, shapes):
            self.large.append(shape)
            shapes.too_large(shape, peak_bytes)
        return None

    def _may_be_lighter(self, shape: PipelineShape) -> bool:
        """True if stages of a shape that is too large are to be planned for the limit."""
        pinned = self.planner.constraints.checkpoint is not None
        return shape.size > 1 and shape not in self.tried and not pinned

    def _cut(self, shape: PipelineShape) -> PipelineShape:
        """The shape with the cuts with which it is expected to fit, if it was too large."""
        return replace(shape, cuts=self.tried[shape][-1]) if shape in self.tried else shape

    def _recut(self, shape: PipelineShape, shapes: Shapes) -> bool:
        """Find cuts with which a shape that was too large may fit; False if there are none."""
        tried = self.tried.get(shape, [])
        if shape.size == 1 or len(tried) == _RECUTS:
            return False
        sure = int(self.planner.limit * (1 - _SPARE))
        work, turn = self.planner.work, self.planner.turn(shape)
        found = cuts_within(work, shape, turn, self._full[shape], sure, recompute=0.0)
        if found is None or found[1] in tried:
            return False
        self.tried[shape] = [*tried, found[1]]
        shapes.expect(shape, found[0])
        return True

    def evened(
        self, shape: PipelineShape, found: Plan | None, error: InfeasiblePlanError | None
    ) -> Plan | None:
        """The plan of a shape whose ranks memory binds, or that with cuts that even it out.

        Where more microbatches wait for their backward, fewer blocks leave less to recompute.

        Args:
            shape: of the pipeline.
            found: its plan, if it has one.
            error: that says which stage does not fit, if one does not.
        """
        if shape.size == 1 or shape.chunks > 1 or shape.cuts is not None:
            return found
        found_s = math.inf if found is None else found.predicted.step_time_s
        free = self.planner.plan(shape, free=True)
        assert free.pipeline is not None
        cuts, work = free.pipeline.cuts, self.planner.work
        known = {
            rank: RankBytes.of(work.run_of(cuts, rank), part.predicted.memory, peak)
            for rank, (part, peak) in enumerate(
                zip(free.pipeline.stages, free.pipeline.peaks, strict=True)
            )
        }
        share = RECOMPUTED if self.planner.constraints.checkpoint is None else 0.0
        refused: dict[int, tuple[int, int]] = {}
        for _ in range(_RECUTS):
            if error is not None and error.stage is not None:
                refused[error.stage] = work.run_of(cuts, error.stage)
            turn = self.planner.turn(shape)
            other = cuts_within(
                work, shape, turn, known, self.planner.limit, recompute=share, refused=refused
            )
            if other is None or other[0] >= found_s or other[1] == cuts:
                break
            cuts = other[1]
            try:
                plan = self.planner.plan(replace(shape, cuts=cuts))
            except InfeasiblePlanError as again:
                error = again
            else:
                return plan if plan.predicted.step_time_s < found_s else found
        return found
