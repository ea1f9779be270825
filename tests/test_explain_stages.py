"""Explanations of plans in microbatches and with pipelines: a stage is compared with itself."""

from __future__ import annotations

from typing import Any

import pytest

import autopar
from autopar.codegen.stages import Staged, staged_as_planned
from autopar.core.constraints import Constraints
from autopar.core.graph import TracedModel
from autopar.core.placement import Layout
from autopar.core.plan import Plan
from autopar.cost_model import Cluster
from autopar.errors import AutoparError, PlanMismatchError
from autopar.explanation import explain, render_explanation
from autopar.planning import traced_for
from autopar.search.stage_planning import port_names
from autopar.solver.solve import solve
from tests.folding import cluster
from tests.test_folding import TEXT, llama

LAYERS = 11
PINS = {"pipeline": {"size": 4, "microbatches": 4, "schedule": "1f1b"}}


@pytest.fixture(scope="module")
def piped() -> Plan:
    return autopar.plan(llama(LAYERS), cluster(8), TEXT, constraints=PINS, fusion=False)


@pytest.fixture(scope="module")
def stages_of(piped: Plan) -> Staged:
    """The graphs of the stages as they were planned."""
    assert piped.pipeline is not None
    wanted = Constraints.parse(piped.constraints)
    traced = traced_for(llama(LAYERS), TEXT, constraints=wanted, training=True, loss_fn=None)
    return staged_as_planned(traced, piped.pipeline)


def pinned_to(own: Plan, model: TracedModel, name: str, layout: Layout) -> float:
    """Seconds of a stage, the parameter stored so and what it exchanges as planned."""
    found = solve(
        model,
        Cluster.from_dict(own.cluster),
        constraints=Constraints.parse({"params": {name: [p.short for p in layout]}}),
        ports={port: own.inputs[port] for port in port_names(model) if port in own.inputs},
    )
    return found.solver.objective


def block_numbers(plan: Plan, stage: int) -> list[int]:
    assert plan.pipeline is not None
    names = plan.pipeline.stages[stage].parameters
    return sorted({int(name.split(".")[2]) for name in names if ".layers." in name})


def test_a_stage_is_solved_again_as_it_was_planned(piped: Plan, stages_of: Staged) -> None:
    assert piped.pipeline is not None
    stages = piped.pipeline.stages
    twin = next(i for i in range(4) if stages[i].fingerprint == stages[i - 1].fingerprint)
    for stage in (0, twin):
        name = f"model.layers.{block_numbers(piped, stage)[0]}.mlp.up_proj.weight"
        found = explain(piped, param=name, model=llama(LAYERS), example_inputs=TEXT)
        assert (found.stage, found.asked) == (stage, name)
        assert found.choice == piped.parameters[name]
        own_s = stages[stage].solver.objective
        assert found.unlimited is not None and found.unlimited.plan is not None
        assert found.unlimited.plan.solver.objective == pytest.approx(own_s, rel=1e-6)
        other = found.runner_up
        assert other is not None and other.plan is not None
        assert other.plan.solver.objective >= own_s * (1 - 1e-6)
        assert isinstance(other.choice, tuple) and other.choice != found.choice
        model = stages_of.model(stage)
        for layout, least in ((found.choice, own_s), (other.choice, other.plan.solver.objective)):
            assert isinstance(layout, tuple)
            seconds = pinned_to(stages[stage], model, found.name, layout)
            assert seconds == pytest.approx(least, rel=1e-6)
        text = render_explanation(found, 400)
        assert f"{stage} of 0 to 3, on pipeline rank {stage}" in text
        assert "does not bind" in text and "-" not in text.split("runner-up")[1].split("\n")[0]
    assert found.name != name and f"planned as {found.name}" in text  # of an equal stage before


def test_without_the_model_the_bound_is_of_the_stage(piped: Plan) -> None:
    name = f"model.layers.{block_numbers(piped, 2)[0]}.mlp.down_proj.weight"
    found = explain(piped, param=name)
    assert found.alternative is not None and found.alternative.more_s >= 0
    text = render_explanation(found, 400)
    assert "at most per step of stage 2 as the search counts, where this takes" in text


def test_ops_are_looked_for_in_the_stages(piped: Plan) -> None:
    assert piped.pipeline is not None and not piped.nodes
    stages = piped.pipeline.stages
    own = next(name for name in stages[3].nodes if name not in stages[0].nodes)
    found = explain(piped, node=own)
    assert found.stage in found.stages and 3 in found.stages and 0 not in found.stages
    assert found.choice == stages[found.stages[0]].nodes[own]
    everywhere = next(name for name in stages[0].nodes if all(name in s.nodes for s in stages))
    for stage in range(4):
        found = explain(piped, node=everywhere, stage=stage)
        assert found.choice == stages[stage].nodes[everywhere]
    assert "(also in 0, 1, 2: see --stage)" in render_explanation(found, 600)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"node": "no_such_op"}, r"no stage of the plan has the op"),
        ({"param": "model.norm.weihgt"}, r"no stage .* Did you mean 'model.norm.weight'"),
        ({"param": "model.norm.weight", "stage": 0}, r"stage 0 has no parameter .*\[3\]"),
        ({"param": "model.norm.weight", "stage": 4}, r"stages 0 to 3, and no 4"),
    ],
)
def test_what_no_stage_has(piped: Plan, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(AutoparError, match=message):
        explain(piped, **asked)


def test_stages_of_other_models(piped: Plan) -> None:
    name = "model.norm.weight"
    with pytest.raises(PlanMismatchError, match="inputs that it was made for"):
        explain(piped, param=name, model=llama(LAYERS + 2), example_inputs=TEXT)


def test_microbatches_without_a_pipeline() -> None:
    pins = {"pipeline": {"size": 1, "microbatches": 2}, "data": 2}
    plan = autopar.plan(llama(3), cluster(2), TEXT, constraints=pins, fusion=False)
    assert plan.pipeline is not None
    name = "model.layers.1.mlp.up_proj.weight"
    found = explain(plan, param=name, model=llama(3), example_inputs=TEXT)
    now_s = plan.pipeline.stages[0].solver.objective
    assert found.unlimited is not None and found.unlimited.plan is not None
    assert found.unlimited.plan.solver.objective == pytest.approx(now_s, rel=1e-6)
    assert found.runner_up is not None and found.runner_up.plan is not None
    assert found.runner_up.plan.solver.objective >= now_s * (1 - 1e-6)
    text = render_explanation(found, 400)
    assert "2 microbatches, as planned" in text and "of stage" not in text
    whole = autopar.plan(llama(3), cluster(2), TEXT, fusion=False)
    with pytest.raises(AutoparError, match="no stages"):
        explain(whole, param=name, stage=0)
