"""The plan of a pipelined step, made of those of its stages and of what the clock says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from autopar.core.folding import every_instance
from autopar.core.placement import Layout
from autopar.core.plan import NodePlan, PipelinePlan, Plan, SolverReport
from autopar.core.schedule import kinds_of
from autopar.cost_model.stages import PipelinedTime

if TYPE_CHECKING:
    from autopar.search.pipeline_stages import Pipeliner

__all__ = ["plan_of_stages"]


def plan_of_stages(
    pipeliner: Pipeliner,
    time: Mapping[str, NodePlan],
    plans: Sequence[Plan],
    clock: PipelinedTime,
    peaks: tuple[int, ...],
) -> Plan:
    """The plan of a step.

    Args:
        pipeliner: that has planned the stages.
        time: placements of all ops over the microbatches.
        plans: of all stages, with microbatches in flight as their ranks have them.
        clock: what the step takes.
        peaks: bytes of each rank at its highest moment.
    """
    shape, traced, parts = pipeliner.shape, pipeliner.traced, pipeliner.parts
    slowest = max(plans, key=lambda p: p.predicted.step_time_s)
    held: dict[str, Layout] = {}
    for p in plans:
        held.update(p.parameters)
    names = every_instance({s.target: None for s in traced.parameters()}, traced.repeats)
    return replace(
        slowest,
        fingerprint=traced.fingerprint(),
        nodes={},
        inputs={},
        checkpoint=parts.checkpoint(plans),
        parameters={name: held[name] for name in names},
        shapes={k: v for p in plans for k, v in p.shapes.items()},
        dtypes={k: v for p in plans for k, v in p.dtypes.items()},
        modes={k: v for p in plans for k, v in p.modes.items()},
        constraints=pipeliner.planner.constraints.to_dict(),
        memory_limit_bytes=pipeliner.limit,
        repeats=traced.repeats,
        nested=traced.nested,
        predicted=clock.predicted,
        solver=_report(plans, slowest, clock.predicted.step_time_s),
        pipeline=PipelinePlan(
            size=shape.size,
            chunks=shape.chunks,
            microbatches=shape.microbatches,
            schedule=shape.schedule,
            cuts=pipeliner.cuts,
            time=time,
            stages=tuple(plans),
            bubble=clock.bubble,
            slots=clock.slots,
            peaks=peaks,
            orders=kinds_of(pipeliner.orders) if pipeliner.automatic else (),
        ),
    )


def _report(plans: Sequence[Plan], slowest: Plan, step_s: float) -> SolverReport:
    # of one stage; of several, those behind the first only hold for what it sends them
    bound = plans[0].solver.bound if len(plans) == 1 else 0.0
    unlike = list({p.fingerprint: p for p in plans}.values())
    return SolverReport(
        objective=step_s,
        bound=min(bound, step_s),
        gap=max(0.0, 1 - bound / step_s) if step_s else 0.0,
        seconds=sum(p.solver.seconds for p in unlike),
        variables=sum(p.solver.variables for p in unlike),
        constraints=sum(p.solver.constraints for p in unlike),
    )
