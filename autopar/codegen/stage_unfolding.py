"""From a plan of a folded graph to one of the whole graph, its pipeline's stages included."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.codegen.stages import Staged, staged_as_planned
from autopar.core.blocks import Block, Blocks, block_of, renumbered
from autopar.core.folding import every_piece, stand_in, stand_ins, unfolded
from autopar.core.graph import InputSpec, OutputSpec, TracedModel
from autopar.core.made_for import check_made_for
from autopar.core.placement import Layout
from autopar.core.plan import Plan
from autopar.core.recompute import recomputed
from autopar.core.strategy import op_call
from autopar.errors import PlanMismatchError

__all__ = ["unfolded_plan"]


def unfolded_plan(plan: Plan, folded: TracedModel, whole: TracedModel) -> Plan:
    """As `core.folding.unfolded`, for plans with or without a pipeline.

    Args:
        plan: of the folded graph.
        folded: that graph.
        whole: the graph of the same model and input, not folded.

    Raises:
        PlanMismatchError: the plan is of another graph, or the whole graph does not consist of the
            blocks that the folded one holds.
    """
    given = plan.pipeline
    if given is None:
        return unfolded(plan, folded, whole)
    check_made_for(plan, folded)
    twins = stand_ins(folded, whole)
    time = {mine: given.time[twin] for mine, twin in twins.items() if twin in given.time}
    made, real = (
        staged_as_planned(folded, given),
        staged_as_planned(whole, replace(given, time=time)),
    )
    stages = [_stage(stage, number, made, real) for number, stage in enumerate(given.stages)]
    return replace(
        plan,
        fingerprint=whole.fingerprint(),
        repeats=(),
        pipeline=replace(given, time=time, stages=tuple(stages)),
    )


def _stage(plan: Plan, number: int, made: Staged, real: Staged) -> Plan:
    """The plan of one stage."""
    folded, whole = made.model(number), real.model(number)
    shift = made.shifts[number]
    own = made.named(number, plan, back=True).checkpoint
    theirs, ours = recomputed(folded, own), recomputed(whole, plan.checkpoint)
    twins = stand_ins(theirs, ours, shift)
    ends = _ends(folded, whole, shift, _given(theirs, ours, twins))
    return replace(
        plan,
        fingerprint=whole.fingerprint(),
        nodes={mine: plan.nodes[twin] for mine, twin in twins.items() if twin in plan.nodes},
        pieces=every_piece(plan.pieces, twins),
        inputs=_inputs_of(plan, ends),
        repeats=(),
    )


def _inputs_of(plan: Plan, ends: Mapping[str, str]) -> dict[str, Layout]:
    """Layouts by the names in the whole graph; ports of shared parameters have one name in both."""
    same = {name: x for name, x in plan.inputs.items() if name not in set(ends.values())}
    return same | {mine: plan.inputs[twin] for mine, twin in ends.items() if twin in plan.inputs}


def _given(folded: TracedModel, whole: TracedModel, twins: Mapping[str, str]) -> dict[str, str]:
    """Inputs of the folded graph, by those of the whole one that an equal op reads in their place.

    What blocks compute of the batch, before its microbatches, is an input for each block.
    """
    nodes, other = whole.nodes(), folded.nodes()
    names = {spec.node for spec in whole.inputs if spec.kind == "input"}
    pairs = (
        pair
        for mine, twin in twins.items()
        for pair in zip(op_call(nodes[mine], 1).nodes, op_call(other[twin], 1).nodes, strict=True)
    )
    return {mine.name: its.name for mine, its in pairs if mine.name in names}


def _ends(
    folded: TracedModel, whole: TracedModel, shift: int, given: Mapping[str, str]
) -> dict[str, str]:
    """Names of inputs and ports in the folded graph of a stage, by those in the whole one.

    A buffer of a block is that of its stand-in, and so is what ops read of the batch (`given`). All
    else follows each other in the same order.
    """
    buffers = _buffers(folded, whole, shift)
    found = {mine.node: twin.node for mine, twin in buffers} | dict(given)
    paired = set(found.values())
    for theirs, ours in (
        ([s for s in _inputs(folded) if s.node not in paired],
         [s for s in _inputs(whole) if s.node not in found]),
        (_sent(folded), _sent(whole)),
    ):  # fmt: skip
        if [_shape(s) for s in theirs] != [_shape(s) for s in ours]:
            raise PlanMismatchError(
                "a stage of the pipeline takes or sends other values than the plan says: blocks "
                "that looked alike compute different things"
            )
        found.update(zip(map(_name, ours), map(_name, theirs), strict=True))
    return found


def _buffers(
    folded: TracedModel, whole: TracedModel, shift: int
) -> list[tuple[InputSpec, InputSpec]]:
    """Each buffer of a block of the whole stage, with that of the block that stands for it."""
    blocks = Blocks(folded)
    held = {(s.target, _shape(s)): s for s in folded.inputs if s.kind == "buffer"}
    found = []
    for spec in whole.inputs:
        block = block_of(spec.target, whole.nested)
        if spec.kind != "buffer" or block is None:
            continue
        twin = stand_in(blocks, Block(block.container, block.number - shift))
        name = renumbered(spec.target, block.container, twin.number - block.number)
        if (name, _shape(spec)) in held:  # else one that blocks of several stages share
            found.append((spec, held[name, _shape(spec)]))
    return found


def _inputs(stage: TracedModel) -> list[InputSpec]:
    return [s for s in stage.inputs if s.kind != "parameter"]


def _sent(stage: TracedModel) -> list[OutputSpec]:
    return [s for s in stage.outputs if s.kind == "sent" and not s.accumulated]


def _name(spec: InputSpec | OutputSpec) -> str:
    return spec.node if isinstance(spec, InputSpec) else spec.port


def _shape(spec: InputSpec | OutputSpec) -> object:
    return (spec.kind, spec.shape, spec.dtype) if isinstance(spec, InputSpec) else spec.kind
