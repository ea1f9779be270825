"""A folded program is simulated as the whole one runs: same order, same seconds, same exposure."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from autopar.codegen.emit import written
from autopar.core.constraints import Constraints
from autopar.core.folding import unfolded
from autopar.core.graph import TracedModel
from autopar.core.plan import Plan
from autopar.cost_model import Cluster
from autopar.cost_model.simulator import Simulation, simulate
from autopar.cost_model.unrolled import blocks_of, unrolled
from autopar.solver.solve import solve
from autopar.tracer.trace import trace

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


class Program:
    """Writes nodes with what they count for; an op takes a second."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.given = self.graph.placeholder("given")
        self.seconds: dict[fx.Node, float] = {}

    def _call(self, name: str, target: Any, source: fx.Node, times: int) -> fx.Node:
        node = self.graph.create_node("call_function", target, (source,), name=name)
        node.meta.update(times=times, phase="forward")
        return node

    def op(self, name: str, source: fx.Node, times: int = 1) -> fx.Node:
        node = self._call(name, aten.relu.default, source, times)
        self.seconds[node] = 1.0
        return node

    def send(self, name: str, source: fx.Node | None = None, times: int = 1) -> fx.Node:
        return self._call(name, c10d.all_reduce.default, source or self.given, times)

    def order(self) -> list[str]:
        nodes = [node for node in self.graph.nodes if node.op == "call_function"]
        return [
            f"{node.name}.{turn.number}"
            for turn in unrolled(nodes, self.seconds, blocks_of(nodes, self.seconds))
            for node in turn.nodes
        ]


def test_ops_of_a_block_repeat_and_others_run_once() -> None:
    program = Program()
    a = program.op("before", program.given)
    b = program.op("first", a, 3)
    c = program.op("second", b, 3)
    program.op("after", c)
    blocks = [f"{name}.{number}" for number in range(3) for name in ("first", "second")]
    assert program.order() == ["before.0", *blocks, "after.0"]


def test_a_gather_for_the_next_block_is_sent_beside_each() -> None:
    """Of the block that stands for others it is sent among the ops of the one in front of it."""
    program = Program()
    a = program.op("a", program.given)
    program.send("for_many", times=3)
    b = program.op("b", a)
    c = program.op("first", b, 3)
    program.send("for_after")
    d = program.op("second", c, 3)
    program.op("after", d)
    assert program.order() == [
        *"a.0 for_many.0 b.0 first.0 for_many.1 second.0 first.1".split(),
        *"for_many.2 second.1 first.2 for_after.0 second.2 after.0".split(),
    ]


def test_a_sum_that_is_sent_late_is_sent_among_the_ops_of_the_next_block() -> None:
    program = Program()
    a = program.op("a", program.given)
    b = program.op("first", a, 3)
    program.send("of_before", a)
    c = program.op("second", b, 3)
    d = program.op("after", c)
    program.send("of_many", b, times=3)
    program.op("end", d)
    assert program.order() == [
        *"a.0 first.0 of_before.0 second.0 first.1 of_many.0 second.1".split(),
        *"first.2 of_many.1 second.2 after.0 of_many.2 end.0".split(),
    ]


def test_two_stacks_of_equal_depth_are_apart() -> None:
    """An encoder's blocks all run before the decoder's first."""
    program = Program()
    x = program.op("a", program.given)
    x = program.op("encoder", x, 2)
    x = program.op("between", x)
    x = program.op("decoder", x, 2)
    assert program.order() == "a.0 encoder.0 encoder.1 between.0 decoder.0 decoder.1".split()


def test_what_runs_once_a_microbatch_is_no_block() -> None:
    program = Program()
    x = program.op("a", program.given, 4)
    program.op("b", x, 4)
    assert program.order() == ["a.0", "b.0"]


def test_sums_of_the_last_microbatch_are_sent_beside_the_blocks_that_make_them() -> None:
    program = Program()
    a = program.op("a", program.given, 4)
    b = program.op("block", a, 12)
    program.send("total", b, times=3).meta["phase"] = "finish"
    c = program.op("b", b, 4)
    program.send("total_of_a", c).meta["phase"] = "finish"
    blocks = [f"{name}.{number}" for number in range(3) for name in ("block", "total")]
    assert program.order() == ["a.0", *blocks, "b.0", "total_of_a.0"]


# --- against whole programs ---------------------------------------------------------------------
class Block(nn.Module):
    def __init__(self, width: int, grows: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, grows * width), nn.Linear(grows * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks of one kind, or of two in turn, twice over."""

    def __init__(self, kinds: Sequence[int], depth: int = 10, width: int = 1024) -> None:
        super().__init__()
        each = [kinds[i % len(kinds)] for i in range(depth)]
        self.below = nn.ModuleList(Block(width, grows) for grows in each)
        self.between = nn.Linear(width, width)
        self.above = nn.ModuleList(Block(width, grows) for grows in each)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.below:
            x = block(x)
        x = self.between(x)
        for block in self.above:
            x = block(x)
        return x.square().mean()


@functools.cache
def traces(*kinds: int) -> tuple[TracedModel, TracedModel]:
    with torch.device("meta"):
        model = Stack(kinds).to(torch.bfloat16)
        inputs = {"x": torch.empty(1 << 13, 1024, dtype=torch.bfloat16)}
    folded = trace(model, inputs, fold=True)
    assert len(folded.repeats) == 2
    return folded, trace(model, inputs)


def simulated(traced: TracedModel, plan: Plan, passes: Sequence[str]) -> Simulation:
    cluster = Cluster.from_dict(plan.cluster)
    program = written(traced, plan, [0] * len(plan.mesh_shape)).program(passes, {}, sizes={})
    return simulate(program.joint.graph, cluster)


@pytest.mark.parametrize(
    ("kinds", "constraints"),
    [
        ((2,), {"data": 16, "zero": 0}),
        ((2,), {"data": 16, "zero": 3}),
        ((2,), {"data": 4, "tensor": {"mode": "1d", "size": 4}, "zero": 1}),
        ((1, 3), {"params": {"*": ["R", "S0"]}}),
    ],
    ids=["summed", "gathered", "tensor", "two kinds on two axes"],
)
def test_a_folded_program_takes_what_the_whole_one_does(
    kinds: Sequence[int], constraints: Mapping[str, Any]
) -> None:
    """Links between nodes are slow: what is sent piles up over the blocks."""
    folded, whole = traces(*kinds)
    cluster = Cluster.from_profile("h100-sxm", nodes=4, devices_per_node=4, mesh_shape=(4, 4))
    plan = solve(folded, cluster, constraints=Constraints.parse(constraints))
    hidden = {}
    for passes in ((), ("early", "late")):
        found = simulated(folded, plan, passes)
        truth = simulated(whole, unfolded(plan, folded, whole), passes)
        assert found.step_s == pytest.approx(truth.step_s, rel=1e-6)
        assert found.comm_s == pytest.approx(truth.comm_s, rel=1e-6)
        assert found.exposed_s == pytest.approx(truth.exposed_s, rel=1e-3, abs=1e-6)
        hidden[passes] = sum(found.hidden_s)
    assert hidden["early", "late"] > 1.2 * hidden[()]


def test_small_gradients_of_several_blocks_share_a_bucket() -> None:
    """As they do in the whole program, so that latency counts once for all of them."""
    folded, whole = traces(2)
    cluster = Cluster.from_profile("h100-sxm", nodes=4, devices_per_node=4, mesh_shape=(4, 4))
    plan = solve(folded, cluster, constraints=Constraints.parse({"data": 16, "zero": 0}))
    sizes = {(0, "all_reduce"): 4 << 20}
    own = {}
    for name, traced in (("folded", folded), ("whole", whole)):
        there = plan if traced is folded else unfolded(plan, folded, whole)
        graph = written(traced, there, [0]).program(None, {}, sizes=sizes).joint.graph
        on = Cluster.from_dict(there.cluster)
        own[name] = simulate(graph, on)
        for node in graph.nodes:
            node.meta.pop("closes_at", None)
        own[name, "alone"] = simulate(graph, on)
    comm_s = {name: sum(found.comm_s) for name, found in own.items()}
    assert comm_s["whole", "alone"] == comm_s["whole"]
    too_much = comm_s["folded", "alone"] - comm_s["whole"]
    assert 0 <= comm_s["folded"] - comm_s["whole"] < 0.3 * too_much
    assert own["folded"].step_s == pytest.approx(own["whole"].step_s, rel=0.02)
