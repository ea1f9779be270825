"""Why a plan places a tensor as it does: the choice, its cost, the runner-up, what binds.

The runner-up is found by solving again with the choice forbidden, under the same limit and pins.
Solving without the limit, and without the pins, tells which of them the choice owes itself to. Of a
step in microbatches or with a pipeline, the stage that holds the choice is solved again as it was
planned: with its microbatches and cuts, and with what it exchanges with other stages as it is.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from autopar.codegen.fusion import Fusion
from autopar.codegen.shares import fused_shares
from autopar.codegen.stages import moved_plan, staged_as_planned
from autopar.core.apart import split_repeats
from autopar.core.block_kinds import labels_of
from autopar.core.blocks import Block, block_of
from autopar.core.constraints import Constraints
from autopar.core.folding import every_instance
from autopar.core.graph import TracedModel, port_names
from autopar.core.made_for import check_made_for
from autopar.core.placement import Layout
from autopar.core.plan import Plan
from autopar.core.timeline import PlannedOp
from autopar.cost_model import Cluster
from autopar.errors import AutoparError, ConstraintError, InfeasiblePlanError, PlanMismatchError
from autopar.planning import traced_for
from autopar.report.explained import Explanation, Resolved, render_explanation

__all__ = ["Explanation", "Resolved", "explain", "render_explanation"]


def explain(
    plan: Plan,
    *,
    node: str | None = None,
    param: str | None = None,
    model: nn.Module | None = None,
    example_inputs: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    stage: int | None = None,
) -> Explanation:
    """Explain one choice of a plan.

    Args:
        plan: from `autopar.plan`, with its timeline.
        node: name of an op, as `autopar show` and the report name it; or
        param: FQN of a parameter.
        model, example_inputs, loss_fn: as for `autopar.plan`; with them the problem is solved
            again, and the runner-up is exact. Without, only the stored upper bound is known.
        stage: of a plan with a pipeline, which; default: the first that has the op or parameter.

    Raises:
        AutoparError: there is no such op, parameter or stage.
        PlanMismatchError: the plan is of another model or input.
    """
    if (node is None) == (param is None):
        raise AutoparError("explain one thing: give either node= or param=")
    if plan.pipeline is not None:
        found = _in_stage(plan, node, param, stage)
    elif stage is not None:
        raise AutoparError("the plan has no stages: leave out stage=")
    else:
        found = _subject(plan, node, param)
    if model is None:
        return found
    traced = traced_for(
        model,
        example_inputs,
        constraints=Constraints.parse(plan.constraints),
        training=plan.training,
        loss_fn=loss_fn,
        precision=plan.precision,
        reduce_dtype=plan.reduce_dtype,
    )
    check_made_for(plan, traced)
    return _resolved(found, plan, traced)


def _in_stage(plan: Plan, node: str | None, param: str | None, stage: int | None) -> Explanation:
    """`_subject` of the stage that holds an op or a parameter."""
    p = plan.pipeline
    assert p is not None
    if stage is not None and not 0 <= stage < len(p.stages):
        raise AutoparError(f"the plan has stages 0 to {len(p.stages) - 1}, and no {stage}")
    asked = node if node is not None else param
    assert asked is not None
    held = [s.nodes if node is not None else s.parameters for s in p.stages]
    holders = tuple(number for number, names in enumerate(held) if asked in names)
    kind = "op" if node is not None else "parameter"
    if not holders:
        near = _near(asked, dict.fromkeys(name for names in held for name in names))
        raise AutoparError(f"no stage of the plan has the {kind} {asked!r}{near}")
    if stage is not None and stage not in holders:
        raise AutoparError(f"stage {stage} has no {kind} {asked!r}: give one of {list(holders)}")
    number = holders[0] if stage is None else stage
    own = p.stages[number]
    first = next(s for s in p.stages if s.fingerprint == own.fingerprint)
    # equal stages share the graph of the first of them, and its names
    graph_names = dict(zip(own.parameters, first.parameters, strict=True))
    name = graph_names.get(asked, asked)
    found = _subject(_with_names(own, graph_names), node, None if node is not None else name)
    return replace(found, asked=asked, pipeline=p, stage=number, stages=holders)


def _with_names(stage: Plan, graph_names: Mapping[str, str]) -> Plan:
    """A stage's plan with the names of its graph, whose blocks are those of an equal stage."""
    for own, name in graph_names.items():
        block, twin = block_of(own, stage.nested), block_of(name, stage.nested)
        if block is not None and twin is not None and block != twin:
            return moved_plan(stage, block.container, twin.number - block.number)
    return stage


def _subject(plan: Plan, node: str | None, param: str | None) -> Explanation:
    ops = {op.name: op for op in plan.predicted.timeline.ops}
    if node is not None:
        if node not in plan.nodes:
            raise AutoparError(f"the plan has no op {node!r}{_near(node, plan.nodes)}")
        op = ops.get(node)
        return Explanation(
            plan=plan,
            name=node,
            asked=node,
            choice=plan.nodes[node],
            op=op,
            moves=tuple((node, m) for m in op.moves) if op is not None else (),
            alternative=op.alternative if op is not None else None,
        )
    assert param is not None
    if param not in plan.parameters:
        raise AutoparError(f"the plan has no parameter {param!r}{_near(param, plan.parameters)}")
    stand_in = _stand_in(plan, param)
    return Explanation(
        plan=plan,
        name=stand_in,
        asked=param,
        choice=plan.parameters[param],
        op=None,
        moves=tuple(
            (op.name, move)
            for op in ops.values()
            for move in op.moves
            if move.of == f"gradient of {stand_in}" or _behind_views(ops, move.of) == stand_in
        ),
        alternative=plan.predicted.timeline.alternatives.get(stand_in),
    )


def _behind_views(ops: Mapping[str, PlannedOp], name: str) -> str:
    """What a value is, seen through the views that show it."""
    while name in ops and ops[name].op_class == "view" and ops[name].operands:
        name = ops[name].operands[0]
    return name


def _near(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.4)
    return f". Did you mean {near[0]!r}?" if near else ""


def _stand_in(plan: Plan, param: str) -> str:
    """The parameter of the planned graph that stands for one of a repeated block."""
    timeline = plan.predicted.timeline
    planned = {name for op in timeline.ops for name in op.operands if name in plan.parameters}
    held = {name: name for name in plan.parameters}
    repeats = plan.repeats
    if not isinstance(plan.checkpoint, str) and plan.pipeline is None:
        blocks = (
            Block(r.container, n)
            for r in repeats
            for n in range(r.first - r.period, r.instances().stop)
        )
        repeats = split_repeats(repeats, labels_of(plan.checkpoint, blocks))
    for name in (*timeline.alternatives, *planned):
        held |= dict.fromkeys(every_instance({name: name}, repeats), name)
    return held[param]


def _resolved(found: Explanation, whole: Plan, traced: TracedModel) -> Explanation:
    from autopar.solver.exclude import Excluded
    from autopar.solver.fit import UNLIMITED
    from autopar.solver.offers import Offers
    from autopar.solver.solve import solve

    plan = found.plan
    cluster = Cluster.from_dict(plan.cluster)
    offers = Offers(cluster, fused_shares(traced, Fusion.of(whole)))
    model, ports = _stage_graph(found, traced) if found.pipeline is not None else (traced, None)

    def again(constraints: Any, limit: int, without: Excluded | None = None) -> Resolved:
        try:
            other = solve(
                model,
                cluster,
                constraints=Constraints.parse(constraints),
                memory_limit=limit,
                optimizer=plan.optimizer,
                without=without,
                ports=ports,
                offers=offers,
                exposed=plan.solver.exposed,
            )
        except (ConstraintError, InfeasiblePlanError) as error:
            return Resolved(reason=str(error))
        where: Any = other.nodes if found.op is not None else other.parameters
        return Resolved(plan=other, choice=where.get(found.name))

    limit = plan.memory_limit_bytes
    excluded = Excluded(name=found.name, choice=found.choice)
    pins = dict(plan.constraints)
    if not isinstance(plan.checkpoint, str):
        pins["checkpoint"] = plan.checkpoint  # ops of a mixture have names of its own
    return replace(
        found,
        runner_up=again(pins, limit, excluded),
        unlimited=again(plan.constraints, UNLIMITED),
        unpinned=again({}, limit) if plan.constraints else None,
    )


def _stage_graph(found: Explanation, traced: TracedModel) -> tuple[TracedModel, dict[str, Layout]]:
    """The graph of the stage, and the planned layouts of what it exchanges with others.

    Raises:
        PlanMismatchError: the stage was planned for another graph.
    """
    assert found.pipeline is not None and found.stage is not None
    model = staged_as_planned(traced, found.pipeline).model(found.stage)
    if model.fingerprint() != found.plan.fingerprint:
        raise PlanMismatchError(
            f"stage {found.stage} was planned for graph {found.plan.fingerprint}, the model's is "
            f"{model.fingerprint()}: plan again"
        )
    model = replace(model, flight=replace(model.flight, waits=found.plan.solver.waits))
    inputs = found.plan.inputs
    return model, {name: inputs[name] for name in port_names(model) if name in inputs}
