"""The simulator of streams: by hand, as laws over random programs, and on emitted programs."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

import autopar
from autopar.codegen.emit import emit
from autopar.core.work import is_view
from autopar.cost_model import Cluster, CollectiveKind, kernel_seconds
from autopar.cost_model.emitted_ops import node_seconds
from autopar.cost_model.opdb import OpDatabase
from autopar.cost_model.simulator import optimizer_seconds, simulate
from autopar.solver.read_step import build_step
from autopar.tracer.trace import trace
from tests import zoo

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
CLUSTER = Cluster.from_profile("h100-sxm", mesh_shape=(2, 4))
MIB = 1 << 20


class Script:
    """Writes a program node by node; values are meta tensors."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.x = self.graph.placeholder("x")
        self.x.meta["val"] = torch.empty(1024, 1024, device="meta")

    def compute(self) -> fx.Node:
        node = self.graph.call_function(aten.relu.default, (self.x,))
        node.meta["val"] = torch.empty(1024, 1024, device="meta")
        return node

    def send(self, num_bytes: int, axis: int = 0) -> fx.Node:
        node = self.graph.call_function(c10d.all_reduce.default, (self.x, "sum", str(axis)))
        node.meta.update(val=self.x.meta["val"], collective=("all_reduce", axis, num_bytes, 1))
        return node

    def wait(self, sent: fx.Node) -> fx.Node:
        node = self.graph.call_function(c10d.wait_tensor.default, (sent,))
        node.meta["val"] = sent.meta["val"]
        return node


OP_S = node_seconds(Script().compute(), CLUSTER.device)


def sent_seconds(num_bytes: int, axis: int = 0) -> float:
    return CLUSTER.collective_seconds(CollectiveKind.ALL_REDUCE, num_bytes, axis)


def test_a_collective_hides_behind_what_runs_until_its_wait() -> None:
    script = Script()
    script.compute()
    sent = script.send(64 * MIB)
    script.compute()
    script.compute()
    script.wait(sent)
    script.compute()
    found = simulate(script.graph, CLUSTER)
    comm = sent_seconds(64 * MIB)
    assert comm > 2 * OP_S
    assert found.step_s == pytest.approx(2 * OP_S + comm)
    assert found.hidden_s[0] == pytest.approx(2 * OP_S)
    assert found.exposed_s == pytest.approx((comm - 2 * OP_S, 0.0))
    assert found.compute_s == pytest.approx(4 * OP_S)


def _taking(share: float) -> Cluster:
    """The cluster, with collectives inside a node that take a share of compute."""
    return replace(CLUSTER, intra=replace(CLUSTER.intra, compute_share=share))


@pytest.mark.parametrize("share", [0.25, 0.75, 1.0])
def test_what_a_collective_takes_of_compute_is_exposed(share: float) -> None:
    script = Script()
    sent = script.send(8 * MIB)
    for _ in range(40):
        script.compute()
    script.wait(sent)
    found = simulate(script.graph, _taking(share))
    comm = sent_seconds(8 * MIB)
    assert comm < 10 * OP_S
    assert found.exposed_s[0] == pytest.approx(share * comm)
    assert found.step_s == pytest.approx(40 * OP_S + share * comm)


def test_a_long_collective_hides_as_much_as_gets_done_beside_it() -> None:
    script = Script()
    sent = script.send(64 * MIB)
    script.compute()
    script.wait(sent)
    found = simulate(script.graph, _taking(0.5))
    assert sent_seconds(64 * MIB) > 2 * OP_S
    assert found.hidden_s[0] == pytest.approx(OP_S)
    assert found.step_s == pytest.approx(sent_seconds(64 * MIB))


def test_a_share_counts_on_the_links_that_have_it() -> None:
    between = replace(CLUSTER, inter=replace(CLUSTER.inter, compute_share=0.3), devices_per_node=4)
    assert [between.compute_share(axis) for axis in (0, 1)] == [0.3, 0.0]


def test_the_communication_stream_is_one_queue() -> None:
    """Two collectives do not run side by side, and each second of waiting has one owner."""
    script = Script()
    first, second = script.send(64 * MIB, 0), script.send(32 * MIB, 1)
    script.compute()
    script.wait(second)
    script.wait(first)
    found = simulate(script.graph, CLUSTER)
    a, b = sent_seconds(64 * MIB, 0), sent_seconds(32 * MIB, 1)
    assert found.step_s == pytest.approx(a + b)
    assert found.exposed_s == pytest.approx((a - OP_S, b))
    assert found.hidden_s == pytest.approx((OP_S, 0.0))


def test_links_inside_nodes_and_between_them_send_at_once() -> None:
    """Groups of an axis have a stream of their own: only what is on one link queues."""
    script = Script()
    far = script.send(64 * MIB, axis=0)
    near = script.send(MIB, axis=1)
    script.wait(near)
    for _ in range(199):
        script.compute()
    script.wait(far)
    two_nodes = Cluster.from_profile("h100-sxm", nodes=2, devices_per_node=4, mesh_shape=(2, 4))
    far_s, near_s = (
        two_nodes.collective_seconds(CollectiveKind.ALL_REDUCE, n * MIB, axis)
        for n, axis in ((64, 0), (1, 1))
    )
    assert [two_nodes.link(axis) for axis in (0, 1)] == ["inter", "intra"]
    assert near_s < far_s < 199 * OP_S
    found = simulate(script.graph, two_nodes)
    assert found.exposed_s == pytest.approx((0.0, near_s))
    one_node = simulate(script.graph, CLUSTER)
    assert [CLUSTER.link(axis) for axis in (0, 1)] == ["intra", "intra"]
    assert one_node.exposed_s == pytest.approx((sent_seconds(64 * MIB), sent_seconds(MIB, 1)))


def test_a_collective_that_nobody_waits_for_still_ends_within_the_step() -> None:
    script = Script()
    script.send(64 * MIB)
    assert simulate(script.graph, CLUSTER).step_s == pytest.approx(sent_seconds(64 * MIB))


_steps = st.lists(
    st.one_of(
        st.just("compute"),
        st.tuples(st.integers(1, 1 << 28), st.integers(0, 1)),
        st.integers(0, 5),
    ),
    max_size=25,
)


@settings(max_examples=200)
@given(steps=_steps, share=st.sampled_from([0.0, 0.4, 1.0]))
def test_hidden_communication_never_exceeds_compute(steps: list[Any], share: float) -> None:
    script = Script()
    sent: list[fx.Node] = []
    for step in steps:
        if step == "compute":
            script.compute()
        elif isinstance(step, tuple):
            sent.append(script.send(*step))
        elif sent:
            script.wait(sent.pop(step % len(sent)))
    for node in sent:
        script.wait(node)
    cluster = replace(_taking(share), inter=replace(CLUSTER.inter, compute_share=share))
    found = simulate(script.graph, cluster)
    assert found.step_s == pytest.approx(found.compute_s + sum(found.exposed_s))
    assert sum(found.hidden_s) <= (1 - share) * sum(found.comm_s) + 1e-12
    assert -1e-12 <= sum(found.hidden_s) <= found.compute_s + 1e-12
    for comm, exposed in zip(found.comm_s, found.exposed_s, strict=True):
        assert -1e-12 <= exposed <= comm + 1e-12
    assert found.step_s >= max(found.compute_s, sum(found.comm_s)) - 1e-12
    assert found.step_s <= found.compute_s + sum(found.comm_s) + 1e-12


@settings(max_examples=50)
@given(steps=_steps)
def test_waiting_at_once_hides_nothing(steps: list[Any]) -> None:
    script = Script()
    for step in steps:
        if isinstance(step, tuple):
            script.wait(script.send(*step))
        else:
            script.compute()
    found = simulate(script.graph, CLUSTER)
    assert found.step_s == pytest.approx(found.compute_s + sum(found.comm_s))
    assert found.hidden_s == pytest.approx((0.0, 0.0))


# --- emitted programs


def planned(name: str, constraints: Any) -> tuple[Any, Any, Any, autopar.Plan]:
    model, inputs = zoo.MODELS[name]()
    cluster = Cluster.from_profile("h100-sxm", devices_per_node=4)
    traced = trace(model.train(), inputs)
    from autopar.core.constraints import Constraints
    from autopar.solver.solve import solve

    plan = solve(traced, cluster, constraints=Constraints.parse(constraints))
    return model, inputs, traced, plan


@pytest.mark.parametrize(
    "constraints",
    [{"data": 4, "zero": 0}, {"data": 2, "tensor": {"mode": "1d", "size": 2}, "zero": 3}],
    ids=["data", "tensor and zero"],
)
def test_emitted_program_costs_what_the_solver_adds_up_to(constraints: Any) -> None:
    """Without passes: each collective is alone and is waited for at once."""
    model, inputs, traced, plan = planned("llama", constraints)
    late = autopar.simulate(plan, model, inputs, traced=traced)
    graph = emit(traced, plan, [0] * len(plan.mesh_shape), passes=()).joint.graph
    cluster = Cluster.from_dict(plan.cluster)
    found = simulate(graph, cluster)
    assert found.step_s == pytest.approx(found.compute_s + sum(found.comm_s), rel=1e-9)
    assert found.exposed_s == pytest.approx(found.comm_s)
    # of what may go in buckets, the solver prices a part of the latency
    closing = build_step(traced).closing
    sent = [s for s in found.spans if isinstance(s.stream, int)]
    shared = [s for s in sent if not alone(s.members, plan, closing)]
    moves = [move for op in plan.predicted.timeline.ops for move in op.moves]
    whole = sum(cluster.collective_seconds(m.kind, m.num_bytes, m.axis) * m.times for m in moves)
    assert sum(found.comm_s) == pytest.approx(whole, rel=1e-9)
    saved = whole - plan.predicted.comm_time_s
    latencies = sum(cluster.alpha_beta(s.kind, s.stream)[0] for s in shared)
    assert 0 < saved < latencies
    # views are free; the program has copies beside the plan's ops, which pack and unpack shards
    assert found.compute_s > 0.95 * plan.predicted.compute_time_s
    assert late.compute_s >= found.compute_s * (1 - 1e-9)
    assert sum(late.comm_s) < sum(found.comm_s)
    assert late.step_s == pytest.approx(late.compute_s + sum(late.exposed_s))
    assert sum(late.hidden_s) > 0
    assert sum(late.hidden_s) <= late.compute_s
    assert late.total_s == late.step_s + late.optimizer_s > late.step_s
    assert sum(late.by_phase().values()) == pytest.approx(late.total_s)


def alone(members: Any, plan: autopar.Plan, closing: Collection[str]) -> bool:
    """False for a gradient, and for what an op gathers of a parameter.

    `closing` are ops that only cast or rearrange a gradient, behind its reduction.
    """
    ((origin, _),) = members
    if origin in closing:
        return False
    ops = {op.name: op for op in plan.predicted.timeline.ops}
    if origin not in ops:
        return not origin.startswith("gradient of ")
    names = list(ops[origin].operands)
    while any(n in ops and ops[n].op_class == "view" for n in names):
        names = [m for n in names for m in (ops[n].operands if n in ops else [n])]
    return not any(name in plan.parameters for name in names)


def test_reductions_of_gradients_run_beside_the_backward() -> None:
    _, _, traced, plan = planned("gpt2", {"data": 4, "zero": 0})
    graph = emit(traced, plan, [0], passes=["late"]).joint.graph
    order = {node: i for i, node in enumerate(graph.nodes)}
    output = next(iter(reversed(graph.nodes)))
    last = max(order[n] for n in graph.nodes if n.target is torch.ops.autopar.einsum.default)
    ends = [n for n in graph.nodes if list(n.users) == [output]]
    sources = [n.args[0] if is_view(n.target) else n for n in ends]
    waits = [
        n for n in sources
        if n.target is c10d.wait_tensor.default and n.args[0].meta["collective"][0] == "all_reduce"
    ]  # fmt: skip
    assert len(waits) > 5
    assert all(order[wait] > last for wait in waits[1:])  # the first is the loss
    assert sum(order[wait.args[0]] < last for wait in waits) > len(waits) // 2


def test_update_reads_and_writes_states_once() -> None:
    device = CLUSTER.device
    one = 4 * 1024 * 1024
    for optimizer, passes in (("adamw", 7), ("sgd", 3)):
        moved, none = np.array(float(passes * one)), np.zeros(())
        expected = kernel_seconds(device, "pointwise", "float32", moved, launches=none)
        got = optimizer_seconds(device, [(one, "float32")] * 3, optimizer)
        assert got == pytest.approx(3 * float(expected))
    assert optimizer_seconds(device, [(one, "float32")], None) == 0


def test_op_database_measures_each_op_once(tmp_path: Any) -> None:
    _, _, traced, plan = planned("gpt2", {"data": 4})
    graph = emit(traced, plan, [0]).joint.graph
    database = OpDatabase(tmp_path / "ops.sqlite", rounds=1)
    first = simulate(graph, CLUSTER.with_mesh_shape((8,)), times=database)
    assert 0 < database.measured < len(graph.nodes)
    again = OpDatabase(tmp_path / "ops.sqlite", rounds=1)
    second = simulate(graph, CLUSTER.with_mesh_shape((8,)), times=again)
    assert again.measured == 0
    assert math.isclose(first.step_s, second.step_s)
    shared = OpDatabase(tmp_path / "ops.sqlite", share=2.0)
    node = next(n for n in graph.nodes if n.target is torch.ops.autopar.einsum.default)
    assert shared.seconds(node) == 2 * (database.seconds(node) or 0) > 0
    other = next(
        n for n in graph.nodes
        if n.target is node.target and database.key(n) != database.key(node)
    )  # fmt: skip
    assert database.key(other) != database.key(node)
