"""Explanations: the runner-up is the best of all other plans, and what binds is what binds."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

import autopar
from autopar.core.constraints import Constraints
from autopar.core.plan import NodePlan, Plan
from autopar.errors import AutoparError, ConstraintError, PlanMismatchError
from autopar.explanation import explain, render_explanation
from autopar.report.differences import render_differences, render_price_of
from autopar.solver.build import build_problem
from autopar.solver.discrete.ilp import Infeasible, solve_problem
from autopar.solver.discrete.problem import ChoiceProblem
from autopar.solver.overlap import EXPOSED, Weights
from autopar.solver.pins import Pins
from autopar.solver.read_step import build_step
from autopar.tracer.trace import trace
from tests import handwritten as hw
from tests.folding import cluster
from tests.test_folding import TEXT, llama

MESH = (2, 2)
UP = "layers.0.0.weight"


@pytest.fixture(scope="module")
def pinned() -> Plan:
    return autopar.plan(
        hw.Mlp(), cluster(*MESH), hw.vectors(), constraints={"data": 2}, fusion=False
    )


def rivals(name: str, pins: dict[str, Any]) -> dict[str, float]:
    """Seconds of the best plan for each state of a node, every one solved by itself."""
    from autopar.core.constraints import assign_mesh

    wanted = Constraints.parse(pins)
    traced = trace(hw.Mlp(), hw.vectors())
    # compute hides what may hide: the sum at t = 0 is what is searched
    step = replace(build_step(traced), weights=Weights(hideable=EXPOSED))
    roles = assign_mesh(wanted, MESH)
    built = build_problem(step, cluster(*MESH), Pins(wanted, roles, traced, step), "adamw")
    by_target = {spec.target: node for node, spec in step.parameters.items()}
    owner = built.classes[by_target.get(name, name)]
    found: dict[str, float] = {}
    states: Any = built.candidates.get(owner) or built.storages[owner]
    for index, state in enumerate(states):
        costs = built.problem.costs[owner].copy()
        costs[[i for i in range(len(costs)) if i != index]] = math.inf
        problem = ChoiceProblem({**built.problem.costs, owner: costs}, dict(built.problem.edges))
        try:
            seconds = solve_problem(problem).objective
        except Infeasible:
            continue
        key = str((state.inputs, state.outputs, state.variants) if name in step.ops else state)
        found[key] = seconds
    return found


def key_of(choice: Any) -> str:
    if isinstance(choice, NodePlan):
        return str((choice.inputs, choice.outputs, choice.variants))
    return str(choice)


@pytest.mark.parametrize("subject", ["einsum_1", "gelu", UP, "head.bias"])
def test_the_runner_up_is_the_best_of_all_others(subject: str, pinned: Plan) -> None:
    by_kind = {"node": subject} if subject in pinned.nodes else {"param": subject}
    found = explain(pinned, model=hw.Mlp(), example_inputs=hw.vectors(), **by_kind)
    costs = rivals(subject, {"data": 2})
    mine = key_of(found.choice)
    assert costs[mine] == pytest.approx(pinned.solver.objective, rel=1e-6)
    best = min(seconds for key, seconds in costs.items() if key != mine)
    assert found.runner_up is not None and found.runner_up.plan is not None
    assert found.runner_up.plan.solver.objective == pytest.approx(best, rel=1e-6)
    assert key_of(found.runner_up.choice) != mine
    assert found.alternative is not None
    # changing this alone is one of the plans without the choice
    alone_s = pinned.solver.objective + found.alternative.more_s
    assert best <= alone_s * (1 + 1e-9)
    text = render_explanation(found, 300)
    assert "runner-up" in text and "solved again without the choice" in text


def test_pins_and_limits_that_bind(pinned: Plan) -> None:
    model, inputs = hw.Mlp(), hw.vectors()
    found = explain(pinned, param=UP, model=model, example_inputs=inputs)
    free = autopar.plan(model, cluster(*MESH), inputs, fusion=False)
    assert found.unpinned is not None and found.unpinned.plan is not None
    assert found.unpinned.plan.solver.objective == pytest.approx(free.solver.objective)
    assert free.solver.objective < pinned.solver.objective
    text = render_explanation(found, 300)
    assert "memory limit  does not bind" in text
    assert "pins          bind: without the pins" in text

    limit = int(0.75 * free.predicted.peak_memory_bytes)
    tight = autopar.plan(model, cluster(*MESH), inputs, memory_limit=limit, fusion=False)
    text = render_explanation(explain(tight, param=UP, model=model, example_inputs=inputs), 300)
    assert "memory limit  binds: without the limit" in text
    assert "\npins" not in text


def test_without_the_model_only_the_bound_is_told(pinned: Plan) -> None:
    found = explain(pinned, node="gelu")
    assert found.runner_up is None and found.alternative is not None
    text = render_explanation(found, 300)
    assert "at most" in text and "--model" in text


def test_a_block_that_is_not_in_the_graph() -> None:
    plan = autopar.plan(llama(9), cluster(4), TEXT, constraints={"data": 4, "zero": 3})
    name = "model.layers.5.mlp.up_proj.weight"
    assert not any(name in op.operands for op in plan.predicted.timeline.ops)
    found = explain(plan, param=name)
    assert found.asked == name and found.name != name
    assert found.moves and found.choice == plan.parameters[name]
    text = render_explanation(found, 300)
    assert f"planned as {found.name}" in text
    assert "all_gather on" in text


def test_a_pinned_block_that_is_not_in_the_graph() -> None:
    name = "model.layers.5.mlp.up_proj.weight"
    pins = {"params": {"*.up_proj.weight": ["S0"]}}
    plan = autopar.plan(llama(9), cluster(4), TEXT, constraints=pins)
    found = explain(plan, param=name)
    assert found.alternative is None
    assert found.name != name and plan.parameters[found.name] == found.choice
    assert f"planned as {found.name}" in render_explanation(found, 300)


def test_what_cannot_be_explained(pinned: Plan) -> None:
    with pytest.raises(AutoparError, match=r"no op 'gelo'.*'gelu'"):
        explain(pinned, node="gelo")
    with pytest.raises(AutoparError, match=r"no parameter 'layers\.0\.0\.weihgt'.*'layers"):
        explain(pinned, param="layers.0.0.weihgt")
    with pytest.raises(AutoparError, match="either"):
        explain(pinned, node="gelu", param=UP)
    with pytest.raises(PlanMismatchError, match="inputs that it was made for"):
        explain(pinned, node="gelu", model=hw.Mlp(layers=3), example_inputs=hw.vectors())


def test_an_only_choice_has_no_runner_up() -> None:
    model, inputs = hw.Mlp(), hw.vectors()
    pins = {"params": {UP: ["S0", "R"]}}
    plan = autopar.plan(model, cluster(*MESH), inputs, constraints=pins)
    found = explain(plan, param=UP, model=model, example_inputs=inputs)
    assert found.runner_up is not None and found.runner_up.plan is None
    assert "no other choice" in render_explanation(found, 300)
    assert found.alternative is None


def test_differences(pinned: Plan) -> None:
    free = autopar.plan(hw.Mlp(), cluster(*MESH), hw.vectors())
    text = render_differences(free, pinned, 200)
    assert "step time" in text and "+" in text
    assert "Parameters that differ" in text or "stored and used alike" in text
    same = render_differences(free, free, 200)
    assert "the same" in same and "0 of" in same and "stored and used alike" in same
    other = replace(pinned, fingerprint="another")
    assert "different graphs" in render_differences(free, other, 200)
    assert max(map(len, render_differences(free, pinned, 80).splitlines())) <= 80


def test_the_price_of_a_pin_is_one_line(pinned: Plan) -> None:
    free = autopar.plan(hw.Mlp(), cluster(*MESH), hw.vectors())
    text = render_price_of({"head.*": ("S0", "R")}, pinned, free)
    assert "\n" not in text
    more = pinned.predicted.step_time_s / free.predicted.step_time_s - 1
    assert f"({more:+.2%})" in text


def test_nothing_is_left_without_the_choice() -> None:
    from autopar.solver.exclude import Excluded
    from autopar.solver.solve import solve

    traced = trace(hw.Mlp(), hw.vectors())
    plan = solve(traced, cluster(*MESH))
    gone = Excluded(name="no_such_op", choice=plan.nodes["gelu"])
    with pytest.raises(ConstraintError, match="the step has no no_such_op"):
        solve(traced, cluster(*MESH), without=gone)
