"""`plan_step`: chooses whether to pipeline a step, and how: stages, microbatches, schedule.

The shapes that a pipeline may have are listed and bounded from below (`pipeline_shapes.py`). The
one with the least bound gets a closer bound or, where there is none, a plan (`stage_planning.py`),
until no bound is below the best plan, or some shapes have been planned. The least bound of all that
was listed is the bound of the plan: nothing that the search ranges over is faster.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from functools import cached_property

from autopar.codegen.fusion import Fusion
from autopar.core.collector import paused_collector
from autopar.core.constraints import NO_PIPELINE, Constraints, PipelinePin, assign_mesh
from autopar.core.graph import TracedModel
from autopar.core.plan import Plan
from autopar.core.units import format_bytes
from autopar.cost_model import Cluster
from autopar.errors import AutoparError, ConstraintError, InfeasiblePlanError
from autopar.search.fitting_cuts import FittingCuts
from autopar.search.one_piece import OnePiece
from autopar.search.pipeline_shapes import Shapes
from autopar.search.plan_seconds import GAIN, as_fast_s, counted_s, faster, to_beat_s
from autopar.search.scheduling import scheduled
from autopar.search.stage_planning import StagePlanner, on_the_clock
from autopar.search.step_limits import StepLimits
from autopar.search.verified_limits import with_verified_limit
from autopar.solver.discrete.time_limit import OutOfTime, is_timed, plan_found, time_limit
from autopar.solver.fit import UNLIMITED
from autopar.solver.overlap import NotBelow
from autopar.solver.pipelines.pipeline_shape import PipelineShape
from autopar.solver.solve import fits

__all__ = ["plan_step", "plan_within"]

_SCHEDULE_GAIN = 0.01  # what a schedule other than 1F1B must promise to be planned
_MOST = 4  # shapes that are planned unasked
_UNSUITED = 1.1  # times what a pipeline may take before its stages are suited to its schedule
_LARGE = 4  # shapes that turn out not to fit, before no more are tried
_FAR = 0.75  # of what a plan in one piece takes at least: faster pipelines are planned without it
_BELOW = 0.9  # of a bound of pipelines: beneath, one of plans in one piece tells more
_PROVED = 0.01  # shapes whose bounds are nearer to the best plan are not planned


def plan_step(
    traced: TracedModel,
    cluster: Cluster,
    *,
    constraints: Constraints,
    memory_limit: int | None = None,
    optimizer: object = "adamw",
    fusion: Fusion | None = None,
    seconds: float | None = None,
) -> Plan:
    """The fastest plan of a step that was found, in microbatches and with a pipeline or without.

    Args:
        traced: the step on the whole batch, folded or not.
        cluster: all devices.
        constraints: what is pinned, of the pipeline and inside its stages.
        memory_limit: bytes per device; default: the device's memory.
        optimizer: whose states count in memory.
        fusion: the kernels that ops will be fused in, and are priced in; default: none.
        seconds: after which the best plan that is known is taken, if there is one.

    Raises:
        ConstraintError: a pinned pipeline is not possible, or other pins cannot hold.
        InfeasiblePlanError: nothing fits.
    """
    known = StepLimits(traced, cluster, constraints, optimizer, fusion)
    limit = cluster.memory_bytes if memory_limit is None else int(memory_limit)
    return plan_within(known, limit, seconds)


@paused_collector()
def plan_within(known: StepLimits, limit: int, seconds: float | None = None) -> Plan:
    """`plan_step` for a step that is planned under several limits, in bytes per device.

    Args:
        known: what plans under other limits have told.
        limit: bytes per device.
        seconds: as of `plan_step`.
    """
    search = _Search(known, min(limit, UNLIMITED - 1))  # that is no limit of a user's
    pin = known.constraints.pipeline
    try:
        with time_limit(seconds):
            return search.unasked() if pin is None else search.asked(pin)
    except OutOfTime:
        return search.so_far()


class _Search:
    def __init__(self, known: StepLimits, limit: int) -> None:
        self.known = known
        self.traced = known.traced
        self.cluster = known.cluster
        self.constraints = known.constraints
        self.kernels = known.kernels
        self.limit = limit
        self.refused: tuple[PipelineShape, AutoparError] | None = None  # the first
        self.pipeline: Plan | None = None  # the fastest that was climbed to
        self.unsuited: Plan | None = None  # the fastest that was too slow to be suited
        self.noted: Plan | None = None  # the fastest in microbatches or stages that fits
        self.shapes: Shapes | None = None  # of which plans are weighed
        self.alone_s = 0.0  # that no plan in one piece is below, as far as is known
        self.may_cut = True  # microbatches and pipelines are in question

    @cached_property
    def planner(self) -> StagePlanner:
        return self.known.planner(self.limit)

    @cached_property
    def whole(self) -> OnePiece:
        """Of plans in one piece; what is begun for one of them is gone on with for the next."""
        whole = self.known.whole
        return whole if whole.searches is not None else replace(whole, searches={})

    @cached_property
    def cuts(self) -> FittingCuts:
        return FittingCuts(self.planner)

    # --- which plan ----------------------------------------------------------------------------
    def unasked(self) -> Plan:
        """The best plan in one piece, unless microbatches or a pipeline are faster."""
        self.may_cut = self.known.holds_parameters(self.limit) and self._may_pipeline()
        self._hurry()
        if not self.may_cut:
            return self._plain()
        shapes = self.shapes = Shapes(self.planner, PipelinePin(), short=True)
        alone_s = self.alone_s = self._alone_s(shapes.least_s() / _FAR)
        found: Plan | None = None
        first = shapes.most_promising(_FAR * alone_s) is not None
        if first:
            found = self._climb(shapes, math.inf)
            if found is not None and counted_s(found) < _FAR * alone_s:
                return self._reported(found, shapes, alone_s)
        free = self.known.free(self.limit)
        small = fits(free, self.cluster, self.limit)
        plain = replace(free, memory_limit_bytes=self.limit) if small else None
        if not first:
            shapes = self.shapes = Shapes(self.planner, PipelinePin(), short=not small)
        for shape in shapes.known:
            if shape.size == 1:  # more turns, and else the same
                shapes.raised(shape, free.solver.bound)
        if found is not None and counted_s(found) < _FAR * free.solver.bound:
            return self._reported(found, shapes, free.solver.bound)
        if plain is not None:
            plain = self._plain(plain)
        if not first:
            free_s = free.solver.objective  # a limit makes no step faster
            if plain is None:
                found = self._climb(shapes, free_s)
            if counted_s(found) >= free_s * (1 - GAIN):
                found = self._climb(shapes, to_beat_s(plain or self.whole.soon(self.limit)))
        elif counted_s(found) >= to_beat_s(plain):
            found = None
        if not small and (found is None or counted_s(found) >= free.solver.bound * (1 - GAIN)):
            return self._against_limited(found, shapes)
        return self._reported(_or_raise(found or plain, None), shapes, free.solver.bound)

    def _alone_s(self, enough_s: float) -> float:
        """Seconds that no plan in one piece is below; more than `enough_s` are of interest."""
        if math.isinf(enough_s):
            return 0.0  # no pipeline is possible
        try:
            return self.planner.least_alone_s(enough_s)
        except ConstraintError:
            return 0.0  # planning says what is wrong

    def _against_limited(self, found: Plan | None, shapes: Shapes) -> Plan:
        """A pipeline, or the plan in one piece that fits the limit."""
        free_s, found_s = self.known.free(self.limit).solver.bound, counted_s(found)
        if found is not None:
            # a limit makes no step faster: what is slower without one is not searched with it,
            # nor what is ahead by no more than a limit that binds is thought to cost
            free = self.known.free_program(self.limit)
            if found_s * (1 - _PROVED) < to_beat_s(free) or self._is_as_fast(found, free):
                return self._reported(found, shapes, free_s)
        # bounds take longer than plans, and those above what is found, or bounds pipelines, tell
        # nothing: what that is of a plan in one piece is known once there is one
        least_s = shapes.least_s() / (1 - GAIN)
        proved = free_s < min(found_s * (1 - _PROVED), least_s * _BELOW)
        try:
            plain = self.whole.best(self.limit, below_s=found_s / (1 - GAIN), proved=proved)
            alone = found_s >= to_beat_s(plain)
            if not proved and alone and free_s < self._bound_by(plain, shapes) * (1 - _PROVED):
                plain, proved = self._plain(), True
        except InfeasiblePlanError as error:
            found = found or self._limited(shapes, math.inf)
            return self._reported(_or_raise(found, error), shapes, math.inf)
        except NotBelow as error:
            alone_s = max(free_s, error.bound) if proved else free_s
            return self._reported(_or_raise(found, None), shapes, alone_s)
        if not proved:
            plain = replace(plain, solver=plain.solver.proved(free_s))
        found = found or self._limited(shapes, to_beat_s(plain))
        best = found if found is not None and counted_s(found) < to_beat_s(plain) else plain
        if proved:
            # beyond this share the other bound is the lower
            share = min(1 - _PROVED, 1 - plain.solver.gap)
            best_s = to_beat_s(best) if best is plain else counted_s(best)
            shapes.close_least(share * best_s, short=True)
        return self._reported(best, shapes, plain.solver.bound)

    def _is_as_fast(self, pipeline: Plan, plain: Plan) -> bool:
        """True if the programs of a pipeline take no longer than that of a plan in one piece.

        They take seconds to write, where the search for a plan within a limit may take minutes.
        """
        enough_s = plain.predicted.step_time_s
        if counted_s(pipeline) >= enough_s or pipeline.pipeline is None:
            return False
        written = scheduled(replace(pipeline, fusion=self.kernels), self.traced)
        return written.predicted.step_time_s <= enough_s

    def _bound_by(self, plain: Plan, shapes: Shapes) -> float:
        """What bounds pipelines, made as close as can be, in seconds that a plan counts."""
        shapes.close_least(to_beat_s(plain) * (1 - _PROVED), short=True)
        return as_fast_s(plain, shapes.least_s())

    def asked(self, pin: PipelinePin) -> Plan:
        """The best plan with what is pinned of a pipeline."""
        if pin == NO_PIPELINE:
            self.may_cut = False
            self._hurry()
            return self._plain()
        shapes = self.shapes = Shapes(self.planner, pin, short=True)
        best = self._best_of(shapes)
        if not shapes.known and pin.microbatches is None and pin.size != 1:
            # what cannot be split, such as batch normalisation, may still be cut into stages
            whole = Shapes(self.planner, replace(pin, microbatches=1), short=True)
            self.shapes = whole
            best = self._best_of(whole)
            shapes = whole if best is not None else shapes
        if best is None:
            raise self._refusal(shapes)
        best = self._suited(best)
        self._note(best)
        binds = best.pipeline is not None and not _is_free(best)
        shapes.close_least(counted_s(best) * (1 - _PROVED), short=binds)
        return self._reported(best, shapes, math.inf)

    def _refusal(self, shapes: Shapes) -> AutoparError:
        """Why no shape that was asked for has a plan."""
        if self.refused is None:
            assert shapes.refused is not None
            return shapes.refused
        shape, error = self.refused
        if isinstance(error, InfeasiblePlanError) and error.stage is not None:
            return with_verified_limit(error, lambda more: self.planner.under(more).plan(shape))
        return error

    def _best_of(self, shapes: Shapes) -> Plan | None:
        """The fastest plan of any shape, if one has a plan."""
        best: Plan | None = None
        while (shape := shapes.most_promising(counted_s(best))) is not None:
            found = self._planned(shape, shapes)
            if found is not None:
                self._note(found)
                found = self._with_schedule(shape, found, counted_s(best), shapes)
                shapes.planned(shape, found)
                self._note(found)
            best = faster(best, found)
        return best

    def _plain(self, plan: Plan | None = None) -> Plan:
        """The plan in one piece, maybe the given one."""
        return self.whole.best(self.limit, plan)

    def _hurry(self) -> None:
        """Under a time limit, look first for plans that the search can end with."""
        if is_timed():
            # what is wrong the search itself says
            with suppress(ConstraintError, InfeasiblePlanError):
                self.whole.hasty(self.limit)
                self.whole.soon(self.limit)

    def _note(self, found: Plan) -> None:
        """Note a plan that the search can end with; those in one piece are noted elsewhere."""
        if found.pipeline is not None:
            self.noted = faster(self.noted, found)
            plan_found()

    def so_far(self) -> Plan:
        """The best plan that is known when the time is up, and what is proved by then."""
        known = self.whole.within(self.limit)
        plain = min(known, key=lambda p: p.predicted.step_time_s, default=None)
        asked = self.constraints.pipeline is not None
        # unasked, a pipeline must save more
        limit_s = counted_s(plain) if asked else to_beat_s(plain)
        best = _or_raise(self.noted if counted_s(self.noted) < limit_s else plain, None)
        alone_s = max(self.alone_s, self.known.free_bound_s(), self.whole.bound_s(self.limit))
        if self.may_cut and (asked or self.shapes is None):
            # plans in one piece are among the shapes that are asked for
            alone_s = 0.0 if self.shapes is None else self.shapes.least_s()
        best = replace(best, solver=replace(best.solver.proved(alone_s), out_of_time=True))
        return best if self.shapes is None else self._reported(best, self.shapes, alone_s)

    def _may_pipeline(self) -> bool:
        """A training step, and devices that no pin speaks of."""
        if not self.traced.training or self.traced.loss_index is None:
            return False
        if self.constraints.params or self.constraints.pins_blocks:
            return False
        roles = assign_mesh(self.constraints, self.cluster.mesh_shape)
        return any(r.name == "free" for r in roles) and bool(self.planner.work.names)

    def _climb(self, shapes: Shapes, limit_s: float) -> Plan | None:
        """Plans the most promising shapes, while that may help; None above the limit."""
        best, planned = self.pipeline, 0
        if self.unsuited is not None and counted_s(self.unsuited) < limit_s * _UNSUITED:
            best, self.unsuited = faster(best, self._suited(self.unsuited)), None
        while planned < _MOST and len({shape.size for shape in self.cuts.large}) < _LARGE:
            below_s = min(limit_s, counted_s(best) * (1 - _PROVED))
            shape = shapes.most_promising(below_s)
            if shape is None:
                break
            suited_s = min(limit_s, counted_s(best)) * _UNSUITED
            found = self.cuts.fitting(shape, shapes, suited_s)
            if found is not None:
                self._note(found)
                found = self._with_schedule(shape, found, limit_s, shapes)
                if counted_s(found) < suited_s:
                    found = self._suited(found)
                else:
                    self.unsuited = faster(self.unsuited, found)
                shapes.planned(shape, found)
                self._note(found)
            # also one that is given up
            planned += shape not in self.cuts.large and not shapes.is_open(shape)
            best = faster(best, found)
        if best is None and self.cuts.large:
            known_s = limit_s
            if not fits(self.known.free(self.limit), self.cluster, self.limit):
                # what is slower than the plan in one piece without a limit is weighed with it
                known_s = min(limit_s, to_beat_s(self.known.free_program(self.limit)))
            best = self._limited(shapes, known_s)
        self.pipeline = best
        far_s = min(limit_s, counted_s(best) * (1 - _PROVED))
        shapes.close_least(far_s, short=self.cuts.is_short)
        return best if counted_s(best) < limit_s else None

    def _with_schedule(
        self, shape: PipelineShape, first: Plan, limit_s: float, shapes: Shapes
    ) -> Plan:
        """The plan of a shape, or that with the schedule that promises most, if that is faster."""
        others = list(shapes.schedules(shape))
        if first.pipeline is None or not others:
            return first
        cuts = first.pipeline.cuts  # which two chunks a rank do not share
        same = (replace(s, cuts=cuts) if s.chunks == shape.chunks else s for s in (shape, *others))
        promised = {s: on_the_clock(s, first) for s in same}
        (now_s,) = (t for s, t in promised.items() if s.schedule == first.pipeline.schedule)
        least = min(promised, key=promised.__getitem__)
        hoped_s = counted_s(first) - (now_s - promised[least])
        if hoped_s >= min(limit_s, counted_s(first) * (1 - _SCHEDULE_GAIN)):
            return first
        try:
            found = self.planner.plan(least, free=shapes.pin == PipelinePin())
        except (ConstraintError, InfeasiblePlanError):
            return first
        small = fits(found, self.cluster, self.limit)
        return found if small and counted_s(found) < counted_s(first) else first

    def _suited(self, plan: Plan) -> Plan:
        """The plan, or that with stages for what their schedule waits for, if that is faster."""
        p = plan.pipeline
        return plan if p is None or p.size == 1 or not _is_free(plan) else self.planner.suited(plan)

    def _limited(self, shapes: Shapes, below_s: float) -> Plan | None:
        """The plan with recomputation of the smallest shape that is too large without.

        Those that take `below_s` seconds or more without a limit stay for later.
        """
        free = {shape: self.planner.plan(shape, free=True) for shape in self.cuts.large}
        fast = [shape for shape in self.cuts.large if counted_s(free[shape]) < below_s]
        for shape in sorted(fast, key=lambda s: free[s].predicted.peak_memory_bytes):
            self.cuts.large.remove(shape)
            found = self._planned(shape, shapes)
            if found is not None:
                shapes.planned(shape, found)
                self._note(found)
                return found
        return None

    def _planned(self, shape: PipelineShape, shapes: Shapes) -> Plan | None:
        """The plan of a shape within the limit."""
        try:
            if shape.size == 1 and shape.microbatches == 1:
                return self._plain()
            found = self.planner.plan(shape)
            return found if _is_free(found) else self.cuts.evened(shape, found, None)
        except ConstraintError as error:
            shapes.impossible(shape, error)
            self.refused = self.refused or (shape, error)
        except InfeasiblePlanError as error:
            evened = self.cuts.evened(shape, None, error)
            if evened is not None:
                return evened
            shapes.settle(shape, f"needs {format_bytes(error.required_bytes or 0)}")
            self.refused = self.refused or (shape, error)
        return None

    def _reported(self, plan: Plan, shapes: Shapes, plain_bound_s: float) -> Plan:
        """The plan with its bound, and with what it was preferred to."""
        p, report = plan.pipeline, plan.solver
        chosen = (p.size, p.microbatches) if p is not None else (1, 1)
        if p is None and shapes.pin == PipelinePin():
            # a pipeline must save more: those that do not are no rivals; its seconds are a step's,
            # those of the objective are longer by what is hidden
            bound_s = min(report.bound, as_fast_s(plan, shapes.least_s()))
            limit_s = to_beat_s(plan)
        else:
            bound_s = min(shapes.least_s(), plain_bound_s)
            limit_s = counted_s(plan)
        others = shapes.considered(chosen, limit_s, report.out_of_time)
        proved = report.proved(bound_s)
        return replace(plan, solver=proved, considered=others, fusion=self.kernels)


def _is_free(plan: Plan) -> bool:
    """True for a pipeline that neither recomputes nor offloads; a limit may bind its layouts."""
    assert plan.pipeline is not None
    return all(p.checkpoint == "none" and p.offload == "none" for p in plan.pipeline.stages)


def _or_raise(plan: Plan | None, error: AutoparError | None) -> Plan:
    if plan is None:
        assert error is not None
        raise error
    return plan
