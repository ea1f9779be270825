"""An explanation as text: the choice, its cost, the runner-up, and what binds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rich.table import Table

from autopar.core.placement import Layout, format_layout, local_shape
from autopar.core.plan import NodePlan, PipelinePlan, Plan
from autopar.core.timeline import Alternative, PlannedMove, PlannedOp
from autopar.core.units import format_bytes, format_seconds
from autopar.cost_model.memory import dtype_bytes
from autopar.report.tables import render

__all__ = ["Explanation", "Resolved", "render_explanation"]

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
        plan: that is explained; of a step in microbatches, that of the stage, whose parameters
            have the names of its graph.
        name: node or FQN, as it stands in the plan's graph.
        asked: as the user named it.
        choice: its layouts.
        op: the op, with seconds and collectives; None for a parameter.
        moves: seconds and executions of the collectives that bring a parameter to its readers and
            its gradient back, `(of which op, move)`.
        alternative: best other choice if nothing else changed; the runner-up costs no more, about.
        runner_up: best plan without the choice; None without the model.
        unlimited: best plan without the memory limit; None without the model.
        unpinned: best plan without the pins; None without the model or without pins.
        pipeline: of a step in microbatches; `runner_up`, `unlimited` and `unpinned` are of the
            stage then, while the others, the cuts and what goes between them stay.
        stage: of these, which; None without them.
        stages: that hold the op or parameter.
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
    pipeline: PipelinePlan | None = None
    stage: int | None = None
    stages: tuple[int, ...] = ()

    @property
    def per(self) -> str:
        """What seconds are counted for, in words."""
        several = self.pipeline is not None and len(self.pipeline.stages) > 1
        whose = f" of stage {self.stage}" if several else ""
        return f"per step{whose} as the search counts"


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
    is_op = found.op is not None or found.name in plan.nodes
    yield ("op" if is_op else "parameter"), _title(found)
    if found.pipeline is not None:
        yield _stage_lines(found, found.pipeline)
    yield "choice", _choice_text(found.choice, plan.modes.get(found.name, ""))
    yield "cost", _cost_text(found)
    step_s = plan.solver.objective
    if found.runner_up is not None:
        yield "runner-up", _runner_up_text(found.runner_up, found)
    elif found.alternative is not None:
        yield (
            "runner-up",
            f"about {format_seconds(step_s + found.alternative.more_s)} at most {found.per}, where "
            f"this takes {format_seconds(step_s)}; the model (--model) is needed to find it",
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


def _stage_lines(found: Explanation, p: PipelinePlan) -> tuple[str, str]:
    """Which stage is explained, and what is not asked about."""
    if len(p.stages) == 1:
        return "turns", f"{p.microbatches} microbatches, as planned, in all that follows"
    assert found.stage is not None
    others = [str(stage) for stage in found.stages if stage != found.stage]
    also = f" (also in {', '.join(others)}: see --stage)" if others else ""
    return (
        "stage",
        f"{found.stage} of 0 to {len(p.stages) - 1}, on pipeline rank {found.stage % p.size}"
        f"{also}: all that follows is of this stage, with its {p.microbatches} microbatches; the "
        "other stages, the cuts and what is sent between them stay as planned",
    )


def _title(found: Explanation) -> str:
    plan, op = found.plan, found.op
    if isinstance(found.choice, NodePlan) and op is None:
        return found.asked
    if op is None:
        shape = list(plan.shapes[found.name]) if found.name in plan.shapes else ""
        also = f" (planned as {found.name})" if found.name != found.asked else ""
        return f"{found.asked} {shape} {plan.dtypes.get(found.name, '')}{also}"
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
        share = math.prod(local_shape(plan.shapes[found.name], plan.parameters[found.name],
                                      plan.mesh_shape))  # fmt: skip
        parts.append(f"{format_bytes(share * dtype_bytes(plan.dtypes[found.name]))} per device")
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


def _runner_up_text(other: Resolved, found: Explanation) -> str:
    if other.plan is None:
        return f"none: {other.reason}"
    now_s, solver = found.plan.solver.objective, other.plan.solver
    peak = format_bytes(other.plan.predicted.peak_memory_bytes)
    return (
        f"{_choice_text(other.choice)}: {format_seconds(solver.objective)} {found.per}, "
        f"{_more(solver.objective - now_s, now_s)}, peak {peak}; solved again without the choice "
        f"({solver.status}; none is below {format_seconds(solver.bound)})"
    )


def _more(seconds: float, step_s: float) -> str:
    """`+1.2 ms (+3.40%)`."""
    if abs(seconds) <= _SAME * step_s:
        return "no slower"
    sign = "+" if seconds > 0 else "−"
    share = f" ({sign}{abs(seconds) / step_s:.2%})" if step_s else ""
    return f"{sign}{format_seconds(abs(seconds))}{share}"


def _binds_text(other: Resolved, found: Explanation, what: str, verb: str, negation: str) -> str:
    """Whether what was left out in solving again is what the plan owes its time to."""
    if other.plan is None:
        return f"there is no plan without {what}: {other.reason}"
    now, then = found.plan.solver.objective, other.plan.solver.objective
    if then >= now * (1 - _SAME):
        return f"{negation} bind: {format_seconds(then)} {found.per} without {what}"
    same = other.choice == found.choice
    choice = "the choice is the same" if same else f"the choice is {_choice_text(other.choice)}"
    return (
        f"{verb}: without {what} it takes {format_seconds(then)} {found.per} "
        f"(−{format_seconds(now - then)}), and {choice}"
    )
