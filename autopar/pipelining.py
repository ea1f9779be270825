"""`plan_step`: chooses whether to pipeline a step, and how: stages, microbatches, schedule.

The shapes that a pipeline may have are listed and bounded from below (`pipeline_shapes.py`). The
one with the least bound gets a closer bound or, where there is none, a plan (`stage_planning.py`),
until no bound is below the best plan, or some shapes have been planned. The least bound of all that
was listed is the bound of the plan: nothing that the search ranges over is faster.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from autopar.core.constraints import NO_PIPELINE, Constraints, PipelinePin, assign_mesh
from autopar.core.graph import TracedModel
from autopar.core.plan import Plan
from autopar.core.schedule import Kind, actions
from autopar.core.stages import block_order
from autopar.core.units import format_bytes, format_seconds
from autopar.cost_model import Cluster
from autopar.cost_model.pipeline import simulate_pipeline
from autopar.cost_model.stages import action_seconds
from autopar.errors import AutoparError, ConstraintError, InfeasiblePlanError
from autopar.pipeline_shapes import Shapes
from autopar.pipeline_stages import Stopped
from autopar.scheduling import scheduled
from autopar.solver.fit import UNLIMITED
from autopar.solver.offers import Offers
from autopar.solver.pipeline_shape import PipelineShape
from autopar.solver.solve import solve
from autopar.stage_planning import StagePlanner

__all__ = ["plan_step"]

_GAIN = 0.05  # what a pipeline must save unasked: stage programs overlap less than others
_SCHEDULE_GAIN = 0.01  # what a schedule other than 1F1B must promise to be planned
_MOST = 2  # shapes that are planned unasked
_LARGE = 4  # shapes that turn out not to fit, before no more are tried
_PROVED = 0.01  # shapes whose bounds are nearer to the best plan are not planned


def plan_step(
    traced: TracedModel,
    cluster: Cluster,
    *,
    constraints: Constraints,
    memory_limit: int | None = None,
    optimizer: object = "adamw",
) -> Plan:
    """The fastest plan of a step that was found, in microbatches and with a pipeline or without.

    Args:
        traced: the step on the whole batch, folded or not.
        cluster: all devices.
        constraints: what is pinned, of the pipeline and inside its stages.
        memory_limit: bytes per device; default: the device's memory.
        optimizer: whose states count in memory.

    Raises:
        ConstraintError: a pinned pipeline is not possible, or other pins cannot hold.
        InfeasiblePlanError: nothing fits.
    """
    search = _Search(traced, cluster, constraints, memory_limit, optimizer)
    if constraints.pipeline is None:
        return search.unasked()
    return search.asked(constraints.pipeline)


class _Search:
    def __init__(
        self,
        traced: TracedModel,
        cluster: Cluster,
        constraints: Constraints,
        memory_limit: int | None,
        optimizer: object,
    ) -> None:
        self.traced = traced
        self.cluster = cluster
        self.constraints = constraints
        self.limit = cluster.memory_bytes if memory_limit is None else int(memory_limit)
        self.optimizer = optimizer
        self.refused: AutoparError | None = None
        self.large: list[PipelineShape] = []  # that do not fit as they are
        self.offers = Offers(cluster)
        self._planner: StagePlanner | None = None

    @property
    def planner(self) -> StagePlanner:
        if self._planner is None:
            self._planner = StagePlanner(
                self.traced,
                self.cluster,
                self.constraints,
                self.limit,
                self.optimizer,
                self.offers,
            )
        return self._planner

    # --- which plan ----------------------------------------------------------------------------
    def unasked(self) -> Plan:
        """The best plan in one piece, unless microbatches or a pipeline are faster."""
        if not self._may_pipeline():
            return self._plain()
        free = self._plain(UNLIMITED)
        fits = free.predicted.peak_memory_bytes <= self.limit
        plain = replace(free, memory_limit_bytes=self.limit) if fits else None
        shapes = Shapes(self.planner, PipelinePin(), short=not fits)
        for shape in shapes.known:
            if shape.size == 1:  # more turns, and else the same
                shapes.raised(shape, free.solver.bound)
        if plain is not None and shapes.open(_limit(plain)):
            plain = scheduled(plain, self.traced)
        found = self._climb(shapes, _limit(plain))
        if not fits and (found is None or _seconds(found) >= free.solver.bound * (1 - _GAIN)):
            return self._against_limited(found, shapes)
        return self._reported(_or_raise(found or plain, None), shapes, free.solver.bound)

    def _against_limited(self, found: Plan | None, shapes: Shapes) -> Plan:
        """A pipeline, or the plan in one piece that fits the limit."""
        try:
            plain = scheduled(self._plain(), self.traced)
        except InfeasiblePlanError as error:
            return self._reported(_or_raise(found, error), shapes, math.inf)
        best = found if found is not None and _seconds(found) < _limit(plain) else plain
        return self._reported(best, shapes, plain.solver.bound)

    def asked(self, pin: PipelinePin) -> Plan:
        """The best plan with what is pinned of a pipeline."""
        if pin == NO_PIPELINE:
            return self._plain()
        shapes = Shapes(self.planner, pin, short=True)
        self.refused = shapes.refused
        best: Plan | None = None
        while (shape := shapes.most_promising(_seconds(best))) is not None:
            found = self._planned(shape, shapes)
            if found is not None:
                found = self._with_schedule(shape, found, _seconds(best), shapes)
                self._noted(shape, found, shapes)
            best = _faster(best, found)
        return self._reported(_or_raise(best, self.refused or shapes.refused), shapes, math.inf)

    def _plain(self, memory_limit: int | None = None) -> Plan:
        """The plan in one piece."""
        found = solve(
            self.traced,
            self.cluster,
            constraints=replace(self.constraints, pipeline=None),
            memory_limit=memory_limit or self.limit,
            optimizer=self.optimizer,
            offers=self.offers,
        )
        return replace(found, constraints=self.constraints.to_dict())

    def _may_pipeline(self) -> bool:
        """A training step, and devices that no pin speaks of."""
        if not self.traced.training or self.traced.loss_index is None:
            return False
        if self.constraints.params or self.constraints.pins_blocks:
            return False
        roles = assign_mesh(self.constraints, self.cluster.mesh_shape)
        return any(r.name == "free" for r in roles) and bool(block_order(self.traced))

    def _climb(self, shapes: Shapes, limit_s: float) -> Plan | None:
        """Plans the most promising shapes, while that may help; None above the limit."""
        best: Plan | None = None
        here: PipelineShape | None = None
        planned = 0
        while planned < _MOST and len(self.large) < _LARGE:
            below_s = min(limit_s, _seconds(best) * (1 - _PROVED))
            shape = shapes.most_promising(below_s)
            if shape is None:
                break
            found = self._fitting(shape, shapes, min(limit_s, _seconds(best)))
            planned += shape not in self.large  # also one that is given up
            if found is not None:
                self._noted(shape, found, shapes)
            if _seconds(found) < _seconds(best):
                here, best = shape, found
        if best is None:
            best = self._limited(shapes)
        elif here is not None:
            best = self._with_schedule(here, best, limit_s, shapes)
            self._noted(here, best, shapes)
        shapes.close_least(min(limit_s, _seconds(best) * (1 - _PROVED)))
        return best if _seconds(best) < limit_s else None

    def _with_schedule(
        self, shape: PipelineShape, first: Plan, limit_s: float, shapes: Shapes
    ) -> Plan:
        """The plan of a shape, or that with the schedule that promises most, if that is faster."""
        others = list(shapes.schedules(shape))
        if first.pipeline is None or not others:
            return first
        promised = {s: _on_the_clock(s, first) for s in (shape, *others)}
        (now_s,) = (t for s, t in promised.items() if s.schedule == first.pipeline.schedule)
        least = min(promised, key=promised.__getitem__)
        hoped_s = _seconds(first) - (now_s - promised[least])
        if hoped_s >= min(limit_s, _seconds(first) * (1 - _SCHEDULE_GAIN)):
            return first
        try:
            found = self.planner.plan(least, free=shapes.pin == PipelinePin())
        except (ConstraintError, InfeasiblePlanError):
            return first
        fits = found.predicted.peak_memory_bytes <= self.limit
        return found if fits and _seconds(found) < _seconds(first) else first

    def _fitting(self, shape: PipelineShape, shapes: Shapes, below_s: float) -> Plan | None:
        """The plan of a shape without recomputation; None where it does not fit, or is slower.

        Zero-bubble first: it waits least, and the stages are those of 1F1B, which holds less.
        """
        waits_least = (s for s in shapes.schedules(shape) if s.schedule == "zero-bubble")
        peak_bytes = 0
        for each in (*waits_least, shape):
            try:
                found = self.planner.plan(each, free=True, below_s=below_s)
                peak_bytes = found.predicted.peak_memory_bytes
                if peak_bytes <= self.limit:
                    return found
            except Stopped as stopped:
                if not stopped.peak_bytes:
                    shapes.settle(shape, f"takes {format_seconds(stopped.least_s)} at least")
                    return None
                peak_bytes = stopped.peak_bytes
            except (ConstraintError, InfeasiblePlanError) as error:
                shapes.impossible(shape, error)
                return None
        self._too_large(shape, peak_bytes, shapes)
        return None

    def _too_large(self, shape: PipelineShape, peak_bytes: int, shapes: Shapes) -> None:
        """Note a shape that does not fit, and those whose microbatches are larger yet."""
        self.large.append(shape)
        need = f"needs {format_bytes(peak_bytes)}"
        shapes.settle(shape, f"{need} without recomputation")
        for other in shapes.known:
            if other.size == shape.size and other.microbatches < shape.microbatches:
                shapes.settle(other, f"with {shape.microbatches} microbatches it {need}")

    def _limited(self, shapes: Shapes) -> Plan | None:
        """The plan with recomputation of the smallest shape that is too large without."""
        peaks: dict[PipelineShape, int] = {}
        for shape in self.large:
            peaks[shape] = self.planner.plan(shape, free=True).predicted.peak_memory_bytes
        for shape in sorted(peaks, key=peaks.__getitem__):
            found = self._planned(shape, shapes)
            if found is not None:
                self._noted(shape, found, shapes)
                return found
        return None

    def _planned(self, shape: PipelineShape, shapes: Shapes) -> Plan | None:
        """The plan of a shape within the limit."""
        try:
            whole = shape.size == 1 and shape.microbatches == 1
            return self._plain() if whole else self.planner.plan(shape)
        except ConstraintError as error:
            shapes.impossible(shape, error)
            self.refused = self.refused or error
        except InfeasiblePlanError as error:
            shapes.settle(shape, f"needs {format_bytes(error.required_bytes or 0)}")
            self.refused = self.refused or error
        return None

    def _noted(self, shape: PipelineShape, found: Plan, shapes: Shapes) -> None:
        step_s = _seconds(found)
        shapes.settle(shape, f"takes {format_seconds(step_s)}", step_s)
        if shape.size == 1:
            shapes.raised(shape, found.solver.bound)

    def _reported(self, plan: Plan, shapes: Shapes, plain_bound_s: float) -> Plan:
        """The plan with its bound, and with what it was preferred to."""
        p, report = plan.pipeline, plan.solver
        chosen = (p.size, p.microbatches) if p is not None else (1, 1)
        if p is None and shapes.pin == PipelinePin():
            # a pipeline must save more: those that do not are no rivals
            step_s, gained = plan.predicted.step_time_s, 1 - _GAIN
            rival_s = shapes.least_s() / gained
            bound_s = report.bound if rival_s >= step_s else min(report.bound, rival_s)
            limit_s = _limit(plan)
        else:
            bound_s = min(shapes.least_s(), plain_bound_s, report.objective)
            limit_s = _seconds(plan)
        gap = max(0.0, 1 - bound_s / report.objective) if report.objective else 0.0
        report = replace(report, bound=bound_s, gap=gap)
        return replace(plan, solver=report, considered=shapes.considered(chosen, limit_s))


def _on_the_clock(shape: PipelineShape, plan: Plan) -> float:
    """What the stages of a plan promise to take in another schedule, halved for two chunks."""
    assert plan.pipeline is not None
    seconds: list[Mapping[Kind, float]] = []
    for _ in range(shape.chunks):
        for stage in plan.pipeline.stages:
            seconds.append({k: s / shape.chunks for k, s in action_seconds(stage).items()})
    orders = actions(shape.schedule, shape.size, shape.microbatches, shape.chunks)
    return simulate_pipeline(orders, seconds).step_s


def _seconds(plan: Plan | None) -> float:
    return math.inf if plan is None else plan.predicted.step_time_s


def _limit(plain: Plan | None) -> float:
    """Seconds that a pipeline must stay below."""
    return _seconds(plain) * (1 - _GAIN)


def _faster(a: Plan | None, b: Plan | None) -> Plan | None:
    return b if _seconds(b) < _seconds(a) else a


def _or_raise(plan: Plan | None, error: AutoparError | None) -> Plan:
    if plan is None:
        assert error is not None
        raise error
    return plan
