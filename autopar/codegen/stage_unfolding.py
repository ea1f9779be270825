"""From a plan of a folded graph to one of the whole graph, its pipeline's stages included."""

from __future__ import annotations

from dataclasses import replace

from autopar.codegen.stages import Staged, staged_as_planned
from autopar.core.folding import every_piece, stand_ins, unfolded
from autopar.core.graph import InputSpec, OutputSpec, TracedModel
from autopar.core.made_for import check_made_for
from autopar.core.plan import Plan
from autopar.core.recompute import recomputed
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
    ends = _ends(folded, whole)
    own = made.named(number, plan, back=True).checkpoint
    twins = stand_ins(
        recomputed(folded, own), recomputed(whole, plan.checkpoint), made.shifts[number]
    )
    return replace(
        plan,
        fingerprint=whole.fingerprint(),
        nodes={mine: plan.nodes[twin] for mine, twin in twins.items() if twin in plan.nodes},
        pieces=every_piece(plan.pieces, twins),
        inputs={ends.get(name, name): layout for name, layout in plan.inputs.items()},
        repeats=(),
    )


def _ends(folded: TracedModel, whole: TracedModel) -> dict[str, str]:
    """Names of inputs and ports in the whole graph of a stage, by those in the folded one.

    They follow each other in the same order.
    """
    found: dict[str, str] = {}
    for theirs, ours in (
        (_inputs(folded), _inputs(whole)),
        (_sent(folded), _sent(whole)),
    ):
        if [_shape(s) for s in theirs] != [_shape(s) for s in ours]:
            raise PlanMismatchError(
                "a stage of the pipeline takes or sends other values than the plan says: blocks "
                "that looked alike compute different things"
            )
        found.update(zip(map(_name, theirs), map(_name, ours), strict=True))
    return found


def _inputs(stage: TracedModel) -> list[InputSpec]:
    return [s for s in stage.inputs if s.kind != "parameter"]


def _sent(stage: TracedModel) -> list[OutputSpec]:
    return [s for s in stage.outputs if s.kind == "sent" and not s.accumulated]


def _name(spec: InputSpec | OutputSpec) -> str:
    return spec.node if isinstance(spec, InputSpec) else spec.port


def _shape(spec: InputSpec | OutputSpec) -> object:
    return (spec.kind, spec.shape, spec.dtype) if isinstance(spec, InputSpec) else spec.kind
