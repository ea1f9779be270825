"""What fused kernels keep out of memory: predictions against the emitted fused program."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import fx

from autopar.codegen.emit import emit
from autopar.codegen.fused_bytes import note_fused_bytes
from autopar.codegen.passes.lifetimes import FUSED_BYTES, Lifetimes
from autopar.codegen.shares import fused_shares
from autopar.core.constraints import Constraints
from autopar.core.host import ARRIVED, FROM_HOST
from autopar.core.plan import Plan
from autopar.solver.offers import Offers
from autopar.solver.read_step import build_step
from autopar.solver.solve import solve
from autopar.tracer.trace import trace
from tests import zoo
from tests.dist import run_ranks
from tests.test_fused_prices import ALL, gpus
from tests.test_memory_measured import peaks

ONE_D = {"tensor": {"mode": "1d", "size": 4}}
MIXED = {"data": 2, "tensor": {"mode": "1d", "size": 2}, "checkpoint": "selective"}


def in_the_program(plan: Plan) -> int:
    """The predicted bytes of what the program itself makes."""
    beside = ("parameters", "optimizer", "inputs")
    return plan.predicted.peak_memory_bytes - sum(plan.predicted.memory.get(k, 0) for k in beside)


@pytest.mark.parametrize(
    ("name", "mesh", "pins", "saves"),
    [
        ("gpt2", (1,), {}, 1.3),
        ("gpt2", (4,), ONE_D, 1.2),
        ("t5", (4,), {"data": 4, "zero": 3}, 1.1),  # passes keep to what the kernels hold
        ("gpt2", (1,), {"checkpoint": "full"}, 1.2),
        ("llama", (1,), {}, 1.1),
        ("llama", (4,), ONE_D, 1.05),  # norms of the backward are cut: the weight's part is summed
        ("llama", (2, 2), MIXED, 1.0),
        ("t5", (4,), {}, 1.05),
        ("t5", (2, 2), MIXED, 1.0),
        ("mixtral", (4,), ONE_D, 1.05),
        pytest.param("resnet", (4,), ONE_D, 0.85, marks=pytest.mark.slow),
        pytest.param("vit", (4,), {}, 0.95, marks=pytest.mark.slow),
        pytest.param("bert", (2, 2), MIXED, 0.95, marks=pytest.mark.slow),
    ],
)
def test_as_the_fused_program_holds(
    name: str, mesh: tuple[int, ...], pins: dict[str, Any], saves: float
) -> None:
    """Within the bounds of measured peaks; ops one by one hold `saves` times as much, or more."""
    model, inputs = zoo.MODELS[name]()
    traced, cluster = trace(model.train(), inputs), gpus(*mesh)
    offers = Offers(cluster, fused_shares(traced, ALL))
    plan = solve(traced, cluster, constraints=Constraints.parse(pins), offers=offers)
    held, alone = (
        Lifetimes(emit(traced, plan, [0] * len(mesh), fusion=fusion).joint.graph).peak_bytes
        for fusion in (ALL, False)
    )
    assert 0.98 * held <= in_the_program(plan) <= 1.05 * held
    assert alone >= saves * held


def test_an_operand_behind_what_is_computed_again() -> None:
    """The backward of GELU reads the bias and the product behind it, not what GELU was made of."""
    model, inputs = zoo.gpt2()
    traced = trace(model.train(), inputs)
    step = build_step(traced, fused_shares(traced, ALL))
    backward = (op for op in step.ops.values() if op.backward and op.name in step.shares)
    first = next(op for op in backward if any(len(w) > 2 for w in step.shares[op.name].held))
    made = {name for name, _ in step.held(first)}
    assert any(
        not step.ops[n].backward and not n.startswith("tanh") for n in made & step.ops.keys()
    )
    assert all(step.is_written(value) for value in step.held(first))
    inside = [op for op in step.ops.values() if op.call.target is torch.ops.aten.tanh.default]
    assert inside and not any(step.is_written((op.name, 0)) for op in inside)
    read = {value for op in step.ops.values() for value in step.held(op)}
    assert not any((op.name, 0) in read for op in inside)


@pytest.mark.parametrize(
    ("name", "world", "constraints"),
    [
        ("gpt2", 2, {"data": 2, "zero": 3}),
        ("gpt2", 2, {"pipeline": {"size": 2, "microbatches": 4, "schedule": "zero-bubble"}}),
        pytest.param("llama", 4, ONE_D, marks=pytest.mark.slow),
        pytest.param("llama", 4, MIXED, marks=pytest.mark.slow),
        pytest.param(
            "llama",
            4,
            {"pipeline": {"size": 2, "microbatches": 4, "schedule": "1f1b"}, "tensor": "1d"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_predicted_peak_is_true(name: str, world: int, constraints: dict[str, Any]) -> None:
    run = partial(peaks, fusion=True)
    for predicted, measured in run_ranks(run, world, world, name, constraints, timeout=300):
        assert 0.98 * measured <= predicted <= 1.05 * measured


def test_passes_keep_to_the_peak_of_the_fused_program() -> None:
    """They move collectives before kernels are made, and know what these will hold."""
    model, inputs = zoo.llama()
    traced, cluster = trace(model.train(), inputs), gpus(4)
    offers = Offers(cluster, fused_shares(traced, ALL))
    pins = Constraints.parse({"data": 4, "zero": 3})
    plan = solve(traced, cluster, constraints=pins, offers=offers)
    held, orders = [], []
    for passes in ((), ("late",), None):
        graph = emit(traced, plan, [0], fusion=ALL, passes=passes).joint.graph
        assert not any(FUSED_BYTES in node.meta for node in graph.nodes)
        held.append(Lifetimes(graph).peak_bytes)
        orders.append([node.name for node in graph.nodes])
    assert orders[0] != orders[1] and orders[0] != orders[2]
    assert max(held) == held[0]


def test_what_fusion_lets_go_of_at_a_node_is_there_in_front_of_it() -> None:
    """A collective that is moved up goes behind that node: in front there is no room yet."""
    graph = fx.Graph()
    nodes = [graph.placeholder("x")]
    for _ in range(4):
        nodes.append(graph.call_function(torch.ops.aten.relu.default, (nodes[-1],)))
    for node in nodes:
        node.meta["val"] = torch.empty(1024, device="meta")
    graph.output(nodes[-1])
    nodes[1].meta[FUSED_BYTES] = 1 << 20
    nodes[2].meta[FUSED_BYTES] = 0
    lifetimes = Lifetimes(graph)
    size = 4096  # bytes of each value, two of which are live at once
    assert lifetimes.live.tolist()[1:4] == [size + (1 << 20), 2 * size, 2 * size]
    assert lifetimes.earliest(nodes[4], 0, size, budget=4 * size) == 3
    assert lifetimes.earliest(nodes[4], 0, size, budget=1 << 21) == 0
    assert lifetimes.earliest(nodes[4], 0, size, budget=size) == 4


def test_what_comes_from_the_host_tells_nothing_of_kernels() -> None:
    """It may come while another block runs, where fusing changes something else."""
    model, inputs = zoo.llama()
    traced, cluster = trace(model.train(), inputs), gpus(4)
    pins = Constraints.parse({"data": 4, "zero": 3, "checkpoint": "host"})
    plan = solve(traced, cluster, constraints=pins)
    graph = emit(traced, plan, [0], passes=()).joint.graph
    come = [node for node in graph.nodes if node.target in (FROM_HOST, ARRIVED)]
    note_fused_bytes(graph, ALL, come[0].meta["val"].fake_mode)
    assert come and not any(FUSED_BYTES in node.meta for node in come)
    assert any(FUSED_BYTES in node.meta for node in graph.nodes)
