"""The graphs of all stages of a pipeline plan, at one turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.codegen.microbatch import Microbatch, localise
from autopar.core.graph import TracedModel
from autopar.core.plan import NodePlan, PipelinePlan
from autopar.core.schedule import actions, in_flight
from autopar.core.stages import Stages, cut

__all__ = ["Staged", "staged", "staged_as_planned"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A step cut into microbatches and stages.

    Attributes:
        microbatch: the prologue and the feeds of a microbatch.
        stages: graphs and transfers.
    """

    microbatch: Microbatch
    stages: Stages


def staged(
    traced: TracedModel,
    time: Mapping[str, NodePlan],
    cuts: Sequence[str],
    *,
    size: int,
    microbatches: int,
    schedule: str,
    chunks: int,
    turn: int = 0,
) -> Staged:
    """Cut a step on the whole batch.

    Args:
        traced: the step.
        time: placement of every op over the microbatches.
        cuts: FQN of the block that each stage but the first begins with.
        size, microbatches, schedule, chunks: as in `PipelinePlan`.
        turn: which microbatch.

    Raises:
        ConstraintError: the cuts are no blocks, or the schedule does not take these numbers.
    """
    flights = in_flight(actions(schedule, size, microbatches, chunks)).stages
    micro = localise(traced, time, microbatches, turn)
    stages = cut(micro.body, cuts)
    models = tuple(
        replace(model, in_flight=flights[s], microbatches=microbatches)
        for s, model in enumerate(stages.models)
    )
    return Staged(microbatch=micro, stages=replace(stages, models=models))


def staged_as_planned(traced: TracedModel, pipeline: PipelinePlan, turn: int = 0) -> Staged:
    """`staged` with what a plan says."""
    return staged(
        traced,
        pipeline.time,
        pipeline.cuts,
        size=pipeline.size,
        microbatches=pipeline.microbatches,
        schedule=pipeline.schedule,
        chunks=pipeline.chunks,
        turn=turn,
    )
