"""Why a plan places a tensor as it does: the choice, its cost, the runner-up, what binds.

The runner-up is found by solving again with the choice forbidden, under the same limit and pins.
Solving without the limit, and without the pins, tells which of them the choice owes itself to.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table
from torch import nn

from autopar.codegen.fusion import Fusion
from autopar.codegen.shares import fused_shares
from autopar.core.apart import split_repeats
from autopar.core.block_kinds import kinds_of
from autopar.core.blocks import Block
from autopar.core.constraints import Constraints
from autopar.core.folding import every_instance
from autopar.core.graph import TracedModel
from autopar.core.placement import Layout, format_layout, local_shape
from autopar.core.plan import NodePlan, Plan
from autopar.core.timeline import Alternative, PlannedMove, PlannedOp
from autopar.core.units import format_bytes, format_seconds
from autopar.cost_model import Cluster, dtype_bytes
from autopar.errors import AutoparError, ConstraintError, InfeasiblePlanError, PlanMismatchError
from autopar.planning import traced_for
from autopar.report.tables import render

__all__ = ["Explanation", "Resolved", "explain", "render_explanation"]

_UNLIMITED = 1 << 62
_SAME = 1e-6  # relative


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """What solving again under other terms gave.

    Attributes:
        plan: the plan; None where there is none.
        choice: what it does with the subject; None where it has no such op.
        reason: why there is no plan.
    """

    plan: Plan | None = None
    choice: NodePlan | Layout | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why one op or parameter is placed as it is.

    Attributes:
        plan: that is explained.
        name: node or FQN, as it stands in the plan's graph.
        asked: as the user named it.
        choice: its layouts.
        op: the op, with seconds and collectives; None for a parameter.
        moves: seconds and executions of the collectives that bring a parameter to its readers and
            its gradient back, `(of which op, move)`.
        alternative: best other choice if nothing else changed, an upper bound of the runner-up.
        runner_up: best plan without the choice; None without the model.
        unlimited: best plan without the memory limit; None without the model.
        unpinned: best plan without the pins; None without the model or without pins.
    """

    plan: Plan
    name: str
    asked: str
    choice: NodePlan | Layout
    op: PlannedOp | None
    moves: tuple[tuple[str, PlannedMove], ...]
    alternative: Alternative | None
    runner_up: Resolved | None = None
    unlimited: Resolved | None = None
    unpinned: Resolved | None = None


def explain(
    plan: Plan,
    *,
    node: str | None = None,
    param: str | None = None,
    model: nn.Module | None = None,
    example_inputs: Any = None,
    loss_fn: Callable[..., Any] | None = None,
) -> Explanation:
    """Explain one choice of a plan.

    Args:
        plan: from `autopar.plan`, with its timeline.
        node: name of an op, as `autopar show` and the report name it; or
        param: FQN of a parameter.
        model, example_inputs, loss_fn: as for `autopar.plan`; with them the problem is solved
            again, and the runner-up is exact. Without, only the stored upper bound is known.

    Raises:
        AutoparError: there is no such op or parameter.
        PlanMismatchError: the plan is of another model or input.
    """
    if (node is None) == (param is None):
        raise AutoparError("explain one thing: give either node= or param=")
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
    if traced.fingerprint() != plan.fingerprint:
        raise PlanMismatchError(
            f"the plan is for graph {plan.fingerprint}, this model and input trace to "
            f"{traced.fingerprint()}: give the model and inputs that it was made for"
        )
    return _resolved(found, traced)


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
        repeats = split_repeats(repeats, kinds_of(plan.checkpoint, blocks))
    for name in (*timeline.alternatives, *planned):
        held |= dict.fromkeys(every_instance({name: name}, repeats), name)
    return held[param]


def _resolved(found: Explanation, traced: TracedModel) -> Explanation:
    from autopar.solver.exclude import Excluded
    from autopar.solver.offers import Offers
    from autopar.solver.solve import solve

    plan = found.plan
    cluster = Cluster.from_dict(plan.cluster)
    offers = Offers(cluster, fused_shares(traced, Fusion.of(plan)))

    def again(constraints: Any, limit: int, without: Excluded | None = None) -> Resolved:
        try:
            other = solve(
                traced,
                cluster,
                constraints=Constraints.parse(constraints),
                memory_limit=limit,
                optimizer=plan.optimizer,
                without=without,
                offers=offers,
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
        unlimited=again(plan.constraints, _UNLIMITED),
        unpinned=again({}, limit) if plan.constraints else None,
    )


def render_explanation(found: Explanation, width: int | None = None) -> str:
    """An explanation as plain text."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, text in _lines(found):
        grid.add_row(name, text)
    return render([grid], width)


def _lines(found: Explanation) -> Iterator[tuple[str, str]]:
    plan = found.plan
    yield (
        ("op" if found.op is not None or found.asked in plan.nodes else "parameter"),
        _title(found),
    )
    yield "choice", _choice_text(found.choice, plan.modes.get(found.asked, ""))
    yield "cost", _cost_text(found)
    step_s = plan.predicted.serial_time_s
    if found.runner_up is not None:
        yield "runner-up", _runner_up_text(found.runner_up, plan)
    elif found.alternative is not None:
        yield (
            "runner-up",
            f"at most {format_seconds(step_s + found.alternative.more_s)} per step; the model "
            "(--model) is needed to find it",
        )
    if found.alternative is not None:
        other: NodePlan | Layout = found.alternative.outputs[0]
        if not isinstance(found.choice, tuple):
            other = NodePlan(
                inputs=found.alternative.inputs, outputs=found.alternative.outputs, variants=()
            )
        yield (
            "this alone",
            f"{_choice_text(other)}: {_more(found.alternative.more_s, step_s)} if nothing else "
            "changed (memory not looked at)",
        )
    elif found.op is not None:
        yield "this alone", "no other choice is possible while the rest stays as it is"
    if found.unlimited is not None:
        yield "memory limit", _binds_text(found.unlimited, found, "the limit", "binds", "does not")
    if found.unpinned is not None:
        yield "pins", _binds_text(found.unpinned, found, "the pins", "bind", "do not")


def _title(found: Explanation) -> str:
    plan, op = found.plan, found.op
    if isinstance(found.choice, NodePlan) and op is None:
        return found.asked
    if op is None:
        shape = list(plan.shapes[found.asked]) if found.asked in plan.shapes else ""
        also = f" (planned as {found.name})" if found.name != found.asked else ""
        return f"{found.asked} {shape} {plan.dtypes.get(found.asked, '')}{also}"
    where = ", ".join(part for part in (op.module, op.source) if part)
    times = f", {op.times} times a step" if op.times > 1 else ""
    return f"{op.name}: {op.op}, {op.phase}{times}" + (f", in {where}" if where else "")


def _choice_text(choice: NodePlan | Layout | None, mode: str = "") -> str:
    if choice is None:
        return "has no such op"
    if isinstance(choice, tuple):
        return format_layout(choice) + (f", {mode}" if mode else "")
    given = " × ".join(format_layout(x) for x in choice.inputs) or "nothing"
    variants = [v for v in dict.fromkeys(choice.variants) if v]
    how = f", as {' and '.join(variants)}" if variants else ""
    return f"{given} → {', '.join(format_layout(x) for x in choice.outputs)}{how}"


def _cost_text(found: Explanation) -> str:
    plan, op = found.plan, found.op
    parts: list[str] = []
    if op is not None:
        parts.append(f"compute {format_seconds(op.compute_s * op.times)}")
    else:
        share = math.prod(local_shape(plan.shapes[found.asked], plan.parameters[found.asked],
                                      plan.mesh_shape))  # fmt: skip
        parts.append(f"{format_bytes(share * dtype_bytes(plan.dtypes[found.asked]))} per device")
    for owner, move in found.moves:
        axis = plan.axis_names[move.axis]
        what = (
            f" of {move.of}" if op is not None and move.of else f" at {owner}" if op is None else ""
        )
        times = f" × {move.times}" if move.times > 1 else ""
        parts.append(
            f"{move.kind} on {axis}{what} {format_bytes(move.num_bytes)}{times} "
            f"{format_seconds(move.seconds * move.times)}"
        )
    if len(parts) == 1 and op is None:
        parts.append("no communication")
    return "; ".join(parts) + " (per step)"


def _runner_up_text(other: Resolved, plan: Plan) -> str:
    if other.plan is None:
        return f"none: {other.reason}"
    p, q, solver = plan.predicted, other.plan.predicted, other.plan.solver
    return (
        f"{_choice_text(other.choice)}: {format_seconds(q.serial_time_s)} per step, "
        f"{_more(q.serial_time_s - p.serial_time_s, p.serial_time_s)}, "
        f"peak {format_bytes(q.peak_memory_bytes)}; solved again without the choice "
        f"({solver.status}; none is below {format_seconds(solver.bound)})"
    )


def _more(seconds: float, step_s: float) -> str:
    """`+1.2 ms (+3.40%)`."""
    if abs(seconds) <= _SAME * step_s:
        return "no slower"
    sign = "+" if seconds > 0 else "−"
    share = f" ({seconds / step_s:+.2%})" if step_s else ""
    return f"{sign}{format_seconds(abs(seconds))}{share}"


def _binds_text(other: Resolved, found: Explanation, what: str, verb: str, negation: str) -> str:
    """Whether what was left out in solving again is what the plan owes its time to."""
    if other.plan is None:
        return f"there is no plan without {what}: {other.reason}"
    now, then = found.plan.predicted.serial_time_s, other.plan.predicted.serial_time_s
    if then >= now * (1 - _SAME):
        return f"{negation} bind: {format_seconds(then)} per step without {what}"
    same = other.choice == found.choice
    choice = "the choice is the same" if same else f"the choice is {_choice_text(other.choice)}"
    return (
        f"{verb}: without {what} a step takes {format_seconds(then)} "
        f"(−{format_seconds(now - then)}), and {choice}"
    )
