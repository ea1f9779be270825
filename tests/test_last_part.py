"""Gradients of a step in microbatches are reduced beside the last backward."""

from __future__ import annotations

import operator
from collections.abc import Collection
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.codegen.accumulate import PREFIX, add_up
from autopar.codegen.builder import Builder
from autopar.codegen.parts import Cutter, Parts
from autopar.codegen.passes import PASSES
from autopar.codegen.passes.overlap import begin_early
from autopar.codegen.passes.sends import is_start, is_wait
from autopar.codegen.stage_program import StageProgram, emit_stage
from autopar.core.constraints import Constraints
from autopar.core.graph import TracedModel
from autopar.core.plan import Plan
from autopar.cost_model import Cluster
from autopar.runtime.stage_values import stages_at_turns
from autopar.search.pipelining import plan_step
from autopar.search.scheduling import scheduled
from autopar.tracer.trace import trace
from autopar.verification import verify
from tests import zoo

TURNS = {"pipeline": {"size": 1, "microbatches": 2}}
PLANS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "one axis": ((2,), {**TURNS, "data": 2, "zero": 0}),
    "two axes": (
        (2, 2),
        {**TURNS, "data": 2, "zero": 1, "params": {"layers.*.weight": ["S0", "S1"]}},
    ),
    "gpipe": ((4,), {"pipeline": {"size": 2, "microbatches": 4, "schedule": "gpipe"}, "data": 2}),
    "zero-bubble": (
        (4,),
        {"pipeline": {"size": 2, "microbatches": 4, "schedule": "zero-bubble"}, "data": 2,
         "zero": 1},
    ),
    "interleaved": (
        (4,),
        {"pipeline": {"size": 2, "microbatches": 2, "chunks": 2, "schedule": "interleaved"},
         "data": 2, "zero": 0, "checkpoint": "full"},
    ),
}  # fmt: skip


class Wide(nn.Module):
    """Four linears with biases: gradients that fill buckets, and some that share them."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


@cache
def built(name: str) -> tuple[nn.Module, dict[str, Any], TracedModel]:
    torch.manual_seed(0)
    if name == "gpt2":  # whose embedding and head are one tensor in two stages
        model, inputs = zoo.gpt2(layers=4)
        inputs = {key: value.repeat(8, 1) for key, value in inputs.items()}
        inputs["labels"][0, 3:] = -100
    else:
        model, inputs = Wide(), {"x": torch.randn(512, 32, dtype=torch.float64)}
    model = model.double().train()
    return model, inputs, trace(model, inputs)


@cache
def planned(name: str, case: str) -> Plan:
    shape, constraints = PLANS[case]
    return plan_step(built(name)[2], cluster_of(shape), constraints=Constraints.parse(constraints))


def cluster_of(shape: tuple[int, ...]) -> Cluster:
    nodes = shape[0] if len(shape) > 1 else 1
    return Cluster.from_profile(
        "h100-sxm", nodes=nodes, devices_per_node=shape[-1], mesh_shape=shape
    )


def emitted(name: str, case: str, stage: int = 0, passes: Any = None) -> StageProgram:
    plan = planned(name, case)
    assert plan.pipeline is not None
    models = [t.stages.models[stage] for t in stages_at_turns(built(name)[2], plan.pipeline)]
    return emit_stage(
        models, plan.pipeline.stages[stage], [0] * len(plan.mesh_shape), passes=passes
    )


@pytest.mark.parametrize(
    ("name", "case"),
    [("wide", case) for case in PLANS] + [("gpt2", case) for case in ("gpipe", "zero-bubble")],
)
def test_gradients_are_those_of_one_device(name: str, case: str) -> None:
    model, inputs, traced = built(name)
    plan = planned(name, case)
    assert plan.pipeline is not None
    for stage in range(len(plan.pipeline.stages)):
        assert "last" in emitted(name, case, stage).parts
    result = verify(plan, model, inputs, traced=traced)
    assert len(result.gradients) == len({id(p) for p in model.parameters()})
    # the loss of GPT-2 is computed in float32
    assert result.worst[1] <= (1e-9 if name == "wide" else 1e-6), result.worst


def test_there_is_none_without_the_pass() -> None:
    model, inputs, traced = built("wide")
    without = tuple(name for name in PASSES if name != "early")
    assert "last" not in emitted("wide", "one axis", passes=without).parts
    result = verify(planned("wide", "one axis"), model, inputs, traced=traced, passes=without)
    assert result.worst[1] <= 1e-9, result.worst


def _nodes(program: StageProgram, part: str = "last") -> list[fx.Node]:
    return [n for n in program.parts[part].module.graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize("case", ["one axis", "two axes", "zero-bubble"])
def test_reductions_begin_beside_the_backward_and_are_waited_for_behind_it(case: str) -> None:
    program = emitted("wide", case, passes=("early", "late", "in_place"))
    nodes = _nodes(program)
    place = {node: i for i, node in enumerate(nodes)}
    sums = [node for node in nodes if node.target is add_up]
    starts = [node for node in nodes if is_start(node)]
    assert len(sums) == len(program.sums)
    assert {n for n in program.parts["last"].reads if n.startswith(PREFIX)} == {
        PREFIX + name for name in program.sums
    }
    assert len(starts) == sum(map(is_start, _nodes(program, "finish")))
    ends = [place[node] for node in sums]
    assert min(place[node] for node in starts) < max(ends)
    assert sum(place[node] < max(ends) for node in starts) >= len(starts) // 2
    # what nothing is made of but a result is waited for behind the last sum
    for node in filter(is_wait, nodes):
        if not any(is_start(user) for user in _readers(node)):
            assert place[node] > max(ends)


def _readers(node: fx.Node) -> set[fx.Node]:
    """What reads a value or a view of it."""
    found: set[fx.Node] = set()
    stack = [node]
    while stack:
        for user in stack.pop().users:
            if user not in found:
                found.add(user)
                stack += [user] if not is_start(user) and user.target is not operator.add else []
    return found


def test_over_two_axes_the_second_begins_behind_the_next_gradients_first() -> None:
    graph = fx.Graph()
    with FakeTensorMode() as mode:
        builder = Builder(
            graph,
            mesh_shape=(2, 2),
            coords=(0, 0),
            group_names=("a", "b"),
            fake_mode=mode,
            device=torch.device("cpu"),
        )
        given = [graph.placeholder(f"x{i}") for i in range(3)]
        for node in given:
            node.meta["val"] = torch.empty(4, 4)
    builder.phase = "backward"
    builder.call(torch.ops.aten.cat.default, given * 9)  # the peak: behind it is room for all
    base = [builder.call(torch.ops.aten.sin.default, node) for node in given]
    builder.phase = "finish"
    finish = []
    for node in base:
        partial = builder.all_reduce(node, 0)
        finish.append(builder.all_reduce(partial, 1))
    graph.output(tuple(finish))
    calls = [n for n in graph.nodes if n.op == "call_function"]
    begin_early(
        graph,
        [n for n in calls if n.meta["phase"] == "backward"],
        [n for n in calls if n.meta["phase"] == "finish"],
    )
    order = [
        (base.index(_source(node)), node.args[-1]) if is_start(node) else "sin"
        for node in graph.nodes
        if node in base or is_start(node)
    ]
    begun = ["sin", (0, "a"), "sin", (1, "a"), "sin", (0, "b"), (2, "a"), (1, "b")]
    assert order == [*begun, (2, "b")]


def _source(node: fx.Node) -> fx.Node:
    while is_start(node) or is_wait(node):
        node = node.all_input_nodes[0]
    return node


def test_nothing_begins_early_where_memory_binds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any room, all is in the order of the backward and the part behind it."""
    import autopar.codegen.passes.overlap as overlap

    class Full(overlap.Lifetimes):
        def earliest(self, node: fx.Node, first: int, num_bytes: int, budget: int) -> int:
            return super().earliest(node, first, num_bytes, 0 if num_bytes else budget)

    monkeypatch.setattr(overlap, "Lifetimes", Full)
    nodes = _nodes(emitted("wide", "one axis", passes=("bucket", "early")))
    place = {node: i for i, node in enumerate(nodes)}
    sums = [place[node] for node in nodes if node.target is add_up]
    assert all(place[node] > max(sums) for node in nodes if is_start(node))


class Behind(Parts):
    """Parts without the last."""

    def __init__(self, cutter: Cutter, graph: fx.Graph, passes: Collection[str]) -> None:
        super().__init__(cutter, graph, [name for name in passes if name != "early"])


def test_a_step_is_predicted_faster_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model, x = Wide(4096), torch.empty(4096, 4096)
    traced = trace(model, {"x": x})
    constraints = Constraints.parse({**TURNS, "data": 8, "zero": 0})
    plan = plan_step(traced, cluster_of((8,)), constraints=constraints)
    beside = scheduled(plan, traced).predicted
    monkeypatch.setattr("autopar.codegen.stage_program.Parts", Behind)
    alone = scheduled(plan, traced).predicted
    assert beside.phases["finish"] < 0.9 * alone.phases["finish"]
    saved_s = alone.phases["finish"] - beside.phases["finish"]
    assert alone.step_time_s - beside.step_time_s == pytest.approx(saved_s, rel=0.05)
    assert beside.hidden_time_s <= beside.compute_time_s
