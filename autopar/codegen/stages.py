"""The graphs of all stages of a pipeline plan, at one turn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from autopar.codegen.microbatch import Microbatch, localise
from autopar.core.flights import flights
from autopar.core.graph import TracedModel
from autopar.core.plan import NodePlan, PipelinePlan
from autopar.core.schedule import actions
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
    held = flights(actions(schedule, size, microbatches, chunks))
    micro = localise(traced, time, microbatches, turn)
    stages = cut(micro.body, cuts)
    batch = _batch_bytes(traced, micro)
    models = tuple(
        replace(model, flight=held[s], microbatches=microbatches, batch_bytes=batch)
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


def _batch_bytes(traced: TracedModel, micro: Microbatch) -> int:
    """Bytes of the user's inputs, and of what is computed from them before the turns."""
    given = [s for s in traced.inputs if s.kind == "input"]
    total = sum(math.prod(s.shape) * s.dtype.itemsize for s in given)
    output = next(n for n in reversed(micro.prologue.graph.nodes) if n.op == "output")
    for node in output.all_input_nodes:
        if node.op != "placeholder":
            value = node.meta["val"] if "val" in node.meta else _item(node)
            total += value.numel() * value.element_size()
    return total


def _item(node: fx.Node) -> Any:
    source, index = node.args
    assert isinstance(source, fx.Node) and isinstance(index, int)
    return source.meta["val"][index]
