"""The graphs of all stages of a pipeline plan, at one turn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import fx

from autopar.codegen.microbatch import Microbatch, localise
from autopar.core.block_kinds import (
    RECOMPUTATIONS,
    Checkpoint,
    as_checkpoint,
    kinds_of,
    moved_checkpoint,
)
from autopar.core.blocks import Block, Blocks, block_of, number_in, renumbered
from autopar.core.extended_fold import extended
from autopar.core.flights import Flight, flights, most
from autopar.core.graph import Repeat, TracedModel
from autopar.core.plan import NodePlan, PipelinePlan, Plan
from autopar.core.schedule import Orders
from autopar.core.stage_folding import outline
from autopar.core.stages import Stages, cut
from autopar.core.transfers import Transfer

__all__ = [
    "Staged",
    "batch_bytes",
    "cut_body",
    "flying",
    "moved_plan",
    "staged",
    "staged_as_planned",
]


T = TypeVar("T")
_STRENGTH: dict[str, int] = {kind: i for i, kind in enumerate(RECOMPUTATIONS)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A step cut into microbatches and stages.

    Attributes:
        microbatch: the prologue and the feeds of a microbatch.
        stages: graphs and transfers; of a folded graph, those of unlike stages.
        kinds: of each stage of the pipeline, the index of its graph.
        shifts: of each, by how much its block numbers exceed those in its graph.
    """

    microbatch: Microbatch
    stages: Stages
    kinds: tuple[int, ...]
    shifts: tuple[int, ...]

    def model(self, stage: int) -> TracedModel:
        """The graph of a stage of the pipeline, or of one that is equal to it."""
        return self.stages.models[self.kinds[stage]]

    def named(self, stage: int, plan: Plan, back: bool = False) -> Plan:
        """The plan of a stage's graph with the names of the stage's own parameters, or back."""
        by = -self.shifts[stage] if back else self.shifts[stage]
        if not by:
            return plan
        model = self.model(stage)
        blocks = {block_of(s.target, model.nested) for s in model.parameters()}
        (container,) = {b.container for b in blocks if b is not None}
        return moved_plan(plan, container, by)

    def checkpoint(self, plans: Sequence[Plan]) -> Checkpoint:
        """The kinds of all blocks, from the plans of the stages under their own names."""
        if len({str(plan.checkpoint) for plan in plans}) == 1:
            first = plans[0].checkpoint
            if isinstance(first, str):
                return first
        found: dict[Block, str] = {}
        for stage, plan in enumerate(plans):
            by = self.shifts[stage]  # of equal stages, all of whose blocks are of one container
            every = Blocks(self.model(stage)).every()
            blocks = [Block(b.container, b.number + by) for b in every]
            for block, kind in kinds_of(plan.checkpoint, blocks).items():
                # of a block that several stages share, the strongest kind
                found[block] = max(found.get(block, kind), kind, key=_STRENGTH.__getitem__)
        order = list(dict.fromkeys(b.container for b in found))
        blocks = sorted(found, key=lambda b: (order.index(b.container), b.number))
        return as_checkpoint({block: found[block] for block in blocks})

    def crossing(self, below: int, above: int, phase: str) -> list[Transfer]:
        """What goes over a cut of the graph, in one phase."""
        return [
            t
            for t in self.stages.transfers
            if t.phase == phase and (below, above) == tuple(sorted((t.source, t.target)))
        ]

    def crossings(self) -> list[Transfer]:
        """What goes over the cuts of the pipeline at each turn, as the receiving stage names it."""
        found: list[Transfer] = []
        for stage in range(1, len(self.kinds)):
            below, above = self.kinds[stage - 1], self.kinds[stage]
            up = self.crossing(above - 1, above, "forward")
            down = self.crossing(below, below + 1, "backward")
            found += [replace(t, source=stage - 1, target=stage) for t in up]
            found += [replace(t, source=stage, target=stage - 1) for t in down]
        return found


def moved_plan(plan: Plan, container: str, by: int) -> Plan:
    """A plan whose parameters have the names of those so many blocks further on."""

    def named(values: Mapping[str, T]) -> dict[str, T]:
        return {renumbered(name, container, by): value for name, value in values.items()}

    return replace(
        plan,
        checkpoint=moved_checkpoint(plan.checkpoint, container, by),
        parameters=named(plan.parameters),
        shapes=named(plan.shapes),
        dtypes=named(plan.dtypes),
        modes=named(plan.modes),
    )


def staged(
    traced: TracedModel,
    time: Mapping[str, NodePlan],
    cuts: Sequence[str],
    orders: Orders,
    *,
    microbatches: int,
    turn: int = 0,
) -> Staged:
    """Cut a step on the whole batch.

    Args:
        traced: the step.
        time: placement of every op over the microbatches.
        cuts: FQN of the block that each stage but the first begins with.
        orders: of each rank's work.
        microbatches: of the step.
        turn: which microbatch.

    Raises:
        ConstraintError: the cuts are no blocks.
    """
    held = flights(orders)
    micro = localise(traced, time, microbatches, turn)
    return flying(cut_body(micro, cuts), held, batch_bytes(traced, micro))


def cut_body(micro: Microbatch, cuts: Sequence[str]) -> Staged:
    """Cut the body of a microbatch; a folded one into folded stages, each kind of them once.

    Raises:
        ConstraintError: the cuts are no blocks, or stand inside blocks that repeat together.
    """
    if not micro.body.repeats:
        stages = cut(micro.body, cuts)
        count = len(stages.models)
        return Staged(
            microbatch=micro, stages=stages, kinds=tuple(range(count)), shifts=(0,) * count
        )
    plan = outline(micro.body, cuts)
    stages = cut(extended(micro.body, plan.periods), plan.starts)
    models = tuple(
        replace(model, repeats=(*repeats, *_held(model, plan.idle)))
        for model, repeats in zip(stages.models, plan.repeats, strict=True)
    )
    return Staged(
        microbatch=micro,
        stages=replace(stages, models=models),
        kinds=plan.kinds,
        shifts=plan.shifts,
    )


def _held(model: TracedModel, repeats: Sequence[Repeat]) -> list[Repeat]:
    """Those whose parameters a stage holds."""
    names = [spec.target for spec in model.parameters()]
    return [r for r in repeats if any(number_in(name, r.container) is not None for name in names)]


def flying(parts: Staged, held: Sequence[Flight], batch: int) -> Staged:
    """With the most that any stage of a kind holds, by stage, and the bytes of the batch."""
    turns = parts.microbatch.body.microbatches
    models = tuple(
        replace(
            model,
            flight=most(f for f, k in zip(held, parts.kinds, strict=True) if k == kind),
            microbatches=turns,
            batch_bytes=batch,
        )
        for kind, model in enumerate(parts.stages.models)
    )
    return replace(parts, stages=replace(parts.stages, models=models))


def staged_as_planned(traced: TracedModel, pipeline: PipelinePlan, turn: int = 0) -> Staged:
    """`staged` with what a plan says."""
    return staged(
        traced,
        pipeline.time,
        pipeline.cuts,
        pipeline.actions(),
        microbatches=pipeline.microbatches,
        turn=turn,
    )


def batch_bytes(traced: TracedModel, micro: Microbatch) -> int:
    """Bytes of the user's inputs, and of what is computed from them before the turns."""
    given = [s for s in traced.inputs if s.kind == "input"]
    total = sum(math.prod(s.shape) * s.dtype.itemsize for s in given)
    for node in micro.prologue.graph.output_node().all_input_nodes:
        if node.op != "placeholder":
            value = node.meta["val"] if "val" in node.meta else _item(node)
            total += value.numel() * value.element_size()
    return total


def _item(node: fx.Node) -> Any:
    source, index = node.args
    assert isinstance(source, fx.Node) and isinstance(index, int)
    return source.meta["val"][index]
