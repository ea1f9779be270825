"""`plan_step`: chooses whether to pipeline a step, and how: stages, microbatches, schedule.

Shapes of pipelines are listed, bounded from below, and planned from the most promising on until
no bound is below the best plan (`stage_planning.py` plans one shape). With block work ``t_s`` of
stage s as in `solver/ideal.py`, m microbatches and stages s = r, r + p, … on rank r,

    step >= max_r [ m * sum_(s on r) t_s + sum_(s < r) (t_s + 2 * hop) ]

as rank r waits for the first microbatch to come through the stages before it, and these for the
last one to come back; a hop is the latency of a transfer. A zero-bubble schedule fills the way
back, so only the way there counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from autopar.core.constraints import Constraints, PipelinePin, assign_mesh
from autopar.core.graph import TracedModel
from autopar.core.plan import Plan
from autopar.core.schedule import actions
from autopar.core.stages import block_order
from autopar.cost_model import Cluster, CollectiveKind
from autopar.errors import AutoparError, ConstraintError, InfeasiblePlanError
from autopar.pipeline_stages import Stopped
from autopar.scheduling import scheduled
from autopar.solver.fit import UNLIMITED
from autopar.solver.offers import Offers
from autopar.solver.pipeline_shape import PipelineShape, balanced_cuts, stage_mesh
from autopar.solver.problem import Array
from autopar.solver.solve import solve
from autopar.stage_planning import StagePlanner

__all__ = ["plan_step"]

_GAIN = 0.05  # what a pipeline must save unasked: stage programs overlap less than others
_SCHEDULE_GAIN = 0.01  # what a schedule other than 1F1B must promise to be planned
_TURNS_PER_RANK = (1, 2, 4)  # microbatches for each pipeline rank, where they are not pinned
_IDLE = 0.15  # share of the step in which ranks wait: above, more microbatches are tried first
_MOST = 3  # shapes that are planned unasked


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
        shapes = self._below(self._shapes(PipelinePin(), short=not fits), _limit(plain))
        if shapes and plain is not None:
            plain = scheduled(plain, self.traced)
            shapes = {s: bound for s, bound in shapes.items() if bound < _limit(plain)}
        found = self._climb(shapes, _limit(plain))
        if fits or (found is not None and _seconds(found) < free.solver.bound * (1 - _GAIN)):
            return _or_raise(found or plain, None)
        return self._against_limited(found)

    def _against_limited(self, found: Plan | None) -> Plan:
        """A pipeline, or the plan in one piece that fits the limit."""
        try:
            plain = scheduled(self._plain(), self.traced)
        except InfeasiblePlanError as error:
            return _or_raise(found, error)
        return found if found is not None and _seconds(found) < _limit(plain) else plain

    def asked(self, pin: PipelinePin) -> Plan:
        """The best plan with what is pinned of a pipeline."""
        best: Plan | None = None
        shapes = self._below(self._shapes(pin, short=True), math.inf)
        for shape in sorted(shapes, key=shapes.__getitem__):
            if shapes[shape] < _seconds(best):
                found = self._planned(shape)
                if found is not None:
                    found = self._with_schedule(shape, found, _seconds(best), pin)
                best = _faster(best, found)
        return _or_raise(best, self.refused)

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

    def _climb(self, shapes: dict[PipelineShape, float], limit_s: float) -> Plan | None:
        """Plans a shape, then those beside the best, while that helps; None above the limit."""
        tried: dict[PipelineShape, Plan | None] = {}
        above: list[float] = []  # how many times their bounds plans take, at least
        best: Plan | None = None
        here: PipelineShape | None = None
        while len(tried) < _MOST:
            beside = [s for s in shapes if s not in tried and (here is None or _beside(here, s))]
            # no shape is taken to come nearer to its bound than those that were planned
            over = min(above, default=1.0)
            beside = [s for s in beside if over * shapes[s] < min(limit_s, _seconds(best))]
            if not beside:
                break
            shape = _next(here, best, beside, shapes)
            tried[shape], least_s = self._fitting(shape, _seconds(best))
            if least_s and shapes[shape]:
                above.append(least_s / shapes[shape])
            if here is None or _seconds(tried[shape]) < _seconds(tried[here]):
                here = shape
            best = _faster(best, tried[shape])
        if best is None:
            best = self._limited()
        elif here is not None:
            best = self._with_schedule(here, best, limit_s, PipelinePin())
        return best if _seconds(best) < limit_s else None

    def _with_schedule(
        self, shape: PipelineShape, first: Plan, limit_s: float, pin: PipelinePin
    ) -> Plan:
        """The plan of a shape, or that with the schedule that promises most, if that is faster."""
        if first.pipeline is None or pin.schedule or shape.schedule != "1f1b":
            return first
        stages = [p.predicted.phases for p in first.pipeline.stages]
        forward = np.array([p["forward"] for p in stages])
        backward = np.array([p["input"] + p["weight"] for p in stages])
        promised = {shape: _least_seconds(shape, forward, backward)}
        for other in self._other_schedules(shape, pin):
            split = [np.tile(x / other.chunks, other.chunks) for x in (forward, backward)]
            promised[other] = _least_seconds(other, split[0], split[1])
        least = min(promised, key=promised.__getitem__)
        hoped_s = _seconds(first) - (promised[shape] - promised[least])
        if hoped_s >= min(limit_s, _seconds(first) * (1 - _SCHEDULE_GAIN)):
            return first
        found = self._planned(least) if pin != PipelinePin() else self._fitting(least)[0]
        return found if found is not None and _seconds(found) < _seconds(first) else first

    def _other_schedules(self, shape: PipelineShape, pin: PipelinePin) -> Iterator[PipelineShape]:
        if shape.size == 1:
            return
        if shape.microbatches >= shape.size:
            yield replace(shape, schedule="zero-bubble")
        deep = len(self.planner.work.names) >= 2 * shape.size
        if deep and pin.chunks is None and shape.cuts is None:
            if shape.microbatches % shape.size == 0:
                yield replace(shape, schedule="interleaved", chunks=2)

    def _fitting(
        self, shape: PipelineShape, below_s: float = math.inf
    ) -> tuple[Plan | None, float]:
        """The plan of a shape without recomputation, and seconds that it takes at least.

        None where it does not fit, which is noted, or takes longer than `below_s`; the seconds are
        0 where they are not known.
        """
        try:
            found = self._planned(shape, free=True, below_s=below_s)
        except Stopped as stopped:
            if stopped.is_large:
                self.large.append(shape)
            return None, stopped.least_s
        if found is not None and found.predicted.peak_memory_bytes > self.limit:
            self.large.append(shape)
            return None, 0.0
        return found, 0.0 if found is None else _seconds(found)

    def _limited(self) -> Plan | None:
        """The plan with recomputation of the smallest shape that is too large without."""
        free = {shape: self._planned(shape, free=True) for shape in self.large}
        peaks = {s: p.predicted.peak_memory_bytes for s, p in free.items() if p is not None}
        for shape in sorted(peaks, key=peaks.__getitem__):
            found = self._planned(shape)
            if found is not None:
                return found
        return None

    def _planned(
        self, shape: PipelineShape, free: bool = False, below_s: float | None = None
    ) -> Plan | None:
        try:
            if shape.size == 1 and shape.microbatches == 1:
                return self._plain()
            return self.planner.plan(shape, free=free, below_s=below_s)
        except (ConstraintError, InfeasiblePlanError) as error:
            self.refused = self.refused or error
            return None

    # --- shapes --------------------------------------------------------------------------------
    def _shapes(self, pin: PipelinePin, short: bool) -> Iterator[PipelineShape]:
        """Shapes that a pin leaves open; without one, of one rank only if memory is short."""
        unasked = pin == PipelinePin()
        devices, blocks = self.cluster.num_devices, len(self.planner.work.names)
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
            for turns in [pin.microbatches] if pin.microbatches else self._turns(size, unasked):
                yield PipelineShape(
                    size=size,
                    microbatches=turns,
                    schedule=schedule,
                    chunks=chunks,
                    cuts=pin.cuts,
                )

    def _turns(self, size: int, unasked: bool) -> list[int]:
        """Numbers of microbatches to try."""
        if not unasked:
            return [size * n for n in _TURNS_PER_RANK]
        batch = max((s.shape[0] for s in self.traced.inputs if s.kind == "input" and s.shape),
                    default=1)  # fmt: skip
        most = max(_TURNS_PER_RANK) * max(size, 4)
        return [n for n in range(max(size, 2), min(batch, most) + 1) if batch % n == 0]

    def _below(self, shapes: Iterable[PipelineShape], limit_s: float) -> dict[PipelineShape, float]:
        """Bounds of the shapes that may stay below the limit."""
        found: dict[PipelineShape, float] = {}
        for shape in shapes:
            try:
                bound_s = self._bound(shape)
            except ConstraintError as error:
                self.refused = self.refused or error
                continue
            if bound_s < limit_s:
                found[shape] = bound_s
        return found

    def _bound(self, shape: PipelineShape) -> float:
        """Seconds that no plan of a shape can beat, with any schedule if 1F1B is not pinned.

        Raises:
            ConstraintError: the shape does not fit the devices, the blocks or its schedule.
        """
        actions(shape.schedule, shape.size, shape.microbatches, shape.chunks)
        mesh = stage_mesh(self.cluster.mesh_shape, shape.size)
        assign_mesh(replace(self.constraints, pipeline=None), mesh)
        work = self.planner.work
        cuts = shape.cuts or (balanced_cuts(work, shape) if shape.num_stages > 1 else ())
        stages = work.of_stages(cuts, math.prod(mesh), shape.microbatches)
        if stages is None or len(stages[0]) != shape.num_stages:
            return 0.0  # bad cuts: planning says what is wrong
        forward, backward = stages
        line = replace(
            self.cluster,
            mesh_shape=(shape.size, *mesh),
            axis_names=("pipeline", *(f"axis{i}" for i in range(len(mesh)))),
        )
        hop_s = line.collective_seconds(CollectiveKind("send_recv"), 1, 0)
        any_schedule = replace(shape, schedule="zero-bubble")
        return _least_seconds(any_schedule, forward, backward, hop_s)


def _least_seconds(
    shape: PipelineShape, forward: Array, backward: Array, hop_s: float = 0.0
) -> float:
    """The module's bound, for stages that take these seconds at each turn."""
    there = np.concatenate([[0.0], np.cumsum(forward + hop_s)])
    back = np.concatenate([[0.0], np.cumsum(backward + hop_s)])
    if shape.schedule == "zero-bubble":
        back = 0 * back
    busy = (forward + backward).reshape(shape.chunks, shape.size).sum(axis=0)
    ranks = np.arange(shape.size)
    return float((shape.microbatches * busy + there[ranks] + back[ranks]).max())


def _next(
    here: PipelineShape | None,
    best: Plan | None,
    beside: list[PipelineShape],
    bounds: Mapping[PipelineShape, float],
) -> PipelineShape:
    """Which to plan: one of middle size; then more turns where ranks stand idle, or by bound."""
    if here is None:
        sizes = sorted({s.size for s in beside if s.size > 1}) or [1]
        middle = [s for s in beside if s.size == sizes[(len(sizes) - 1) // 2]]
        return min(middle, key=bounds.__getitem__)
    size, turns = here.size, here.microbatches
    idle = best is not None and best.pipeline is not None and best.pipeline.bubble > _IDLE

    def order(shape: PipelineShape) -> tuple[bool, float]:
        return not (idle and shape.size == size and shape.microbatches > turns), bounds[shape]

    return min(beside, key=order)


def _beside(a: PipelineShape, b: PipelineShape) -> bool:
    """At most a factor of two between sizes, and of four between microbatches."""
    sizes = sorted((a.size, b.size))
    turns = sorted((a.microbatches, b.microbatches))
    return sizes[1] <= 2 * sizes[0] and turns[1] <= 4 * turns[0]


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
