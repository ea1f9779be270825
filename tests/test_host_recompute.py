"""Blocks whose kept activations wait in host memory: the same numbers, and less on the device.

On these machines host and device are one memory: copies are made at once, and what is in host
memory is left out where live bytes are counted. The streams of an accelerator are stand-ins.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.codegen.emit import emit
from autopar.codegen.passes.lifetimes import Lifetimes
from autopar.core.block_kinds import as_checkpoint, kinds_of
from autopar.core.blocks import Block, Blocks
from autopar.core.constraints import Constraints
from autopar.core.folding import unfolded
from autopar.core.graph import TracedModel
from autopar.core.host import ARRIVED, FROM_HOST, TO_HOST
from autopar.core.plan import Plan
from autopar.core.recompute import recomputed
from autopar.cost_model import Cluster
from autopar.cost_model.simulator import simulate
from autopar.errors import ConstraintError, InfeasiblePlanError
from autopar.explanation import explain
from autopar.report.differences import render_differences
from autopar.report.page import render_page
from autopar.runtime.live import LiveBytes
from autopar.search.pipelining import plan_step
from autopar.search.scheduling import scheduled
from autopar.solver.solve import solve
from autopar.tracer.trace import trace
from benchmarks.memory import measure, predicted_of
from tests import zoo
from tests.dist import run_ranks
from tests.folding import cluster
from tests.test_block_recompute import errors
from tests.test_folding import CASES, TEXT
from tests.test_training_matrix import InFloat64

LINK = 1e10  # bytes/s
BATCH = {"input_ids": torch.arange(512).reshape(16, 32) % 32}
BATCH["labels"] = BATCH["input_ids"]


def devices(count: int, link: float = LINK) -> Cluster:
    """CPU processes with a link to a host of their own."""
    found = Cluster.from_profile("cpu-gloo", devices_per_node=count)
    device = replace(found.device, host_bandwidth=link, host_memory_bandwidth=link)
    return replace(found, device=device)


def wide(layers: int = 5, width: int = 16) -> nn.Module:
    """Activations weigh far more than parameters."""
    config = transformers.GPT2Config(
        vocab_size=32, n_embd=width, n_layer=layers, n_head=2, n_positions=32,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).train()


@lru_cache(maxsize=2)
def deep(fold: bool = True) -> TracedModel:
    return trace(wide(), BATCH, training=True, fold=fold)


def planned(traced: TracedModel, on: Cluster, limit: int | None = None, **pins: Any) -> Plan:
    """With an optimizer without states: nothing else can leave the device."""
    wanted = Constraints.parse(pins)
    return plan_step(traced, on, constraints=wanted, memory_limit=limit, optimizer="sgd")


# --- the same numbers ----------------------------------------------------------------------------
@lru_cache(maxsize=1)
def double(name: str, dropout: float) -> tuple[nn.Module, dict[str, Any], TracedModel]:
    torch.manual_seed(0)
    model, inputs = getattr(zoo, name)(dropout=dropout, layers=4)
    model = model.double().train()
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    with InFloat64():
        return model, inputs, trace(model, inputs)


MIXED = {"*.1": "none", "*.2": "full", "*": "host"}
ONE_F_ONE_B = {"size": 2, "microbatches": 4, "schedule": "1f1b"}
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "dropout", "pins"),
    [
        ("gpt2", 0.0, {"checkpoint": MIXED, "tensor": "1d"}),
        pytest.param("llama", 0.0, {"pipeline": ONE_F_ONE_B}, marks=slow),
        pytest.param("gpt2", 0.0, {"data": 2, "zero": 3}, marks=slow),
        pytest.param(
            "gpt2",
            0.1,
            {"pipeline": {"size": 1, "microbatches": 2}, "data": 2, "zero": 1},
            marks=slow,
        ),
        pytest.param("llama", 0.0, {"tensor": "1d"}, marks=slow),
        pytest.param("gpt2", 0.1, {"data": 2, "zero": 0}, marks=slow),
        pytest.param("gpt2", 0.1, {"checkpoint": MIXED}, marks=slow),
        pytest.param("gpt2", 0.0, {"pipeline": ONE_F_ONE_B, "checkpoint": MIXED}, marks=slow),
        pytest.param("llama", 0.0, {"pipeline": ONE_F_ONE_B, "checkpoint": MIXED}, marks=slow),
        pytest.param(
            "llama",
            0.1,
            {"pipeline": {"size": 2, "microbatches": 2, "schedule": "zero-bubble"}},
            marks=slow,
        ),
        pytest.param("llama", 0.0, {"tensor": "1d", "sequence": "megatron", "zero": 0}, marks=slow),
        pytest.param("vit", 0.0, {"data": 2, "zero": 3}, marks=slow),
    ],
)
def test_gradients_are_those_of_the_module(name: str, dropout: float, pins: dict[str, Any]) -> None:
    model, inputs, traced = double(name, dropout)
    plan = planned(traced, devices(2), **{"checkpoint": "host", **pins})
    assert plan.predicted.host_activation_bytes == plan.predicted.host_bytes > 0
    for fusion in (False, True):
        with InFloat64():
            found = autopar.verify(plan, model, inputs, traced=traced, fusion=fusion)
        assert len(found.gradients) == sum(p.requires_grad for p in model.parameters())
        assert found.worst[1] <= 1e-9, found.worst


@pytest.mark.slow
@pytest.mark.parametrize("pins", [{"data": 2, "zero": 3}, {"pipeline": ONE_F_ONE_B}])
def test_gradients_on_real_ranks(pins: dict[str, Any]) -> None:
    said = {"vit.layers.1": "none", "*": "host"}
    ranks = run_ranks(errors, 2, {**pins, "checkpoint": said})
    assert max(error for found in ranks for error in found.values()) <= 1e-9


# --- what leaves, and what stays -----------------------------------------------------------------
def kinds_in(plan: Plan) -> set[str]:
    """The kinds of recomputation that some block has."""
    checkpoint = plan.checkpoint
    return {checkpoint} if isinstance(checkpoint, str) else set(checkpoint.values())


def sent(traced: TracedModel, checkpoint: Any) -> list[str]:
    graph = recomputed(traced, checkpoint).graph
    return [n.all_input_nodes[0].name for n in graph.nodes if n.target is TO_HOST]


def test_what_each_block_alone_keeps_leaves_the_device() -> None:
    traced = trace(wide(4), BATCH)
    graph = recomputed(traced, "host").graph
    away = [n for n in graph.nodes if n.target is TO_HOST]
    assert len(away) == 4
    for node in away:
        (back,) = node.users
        assert back.target is FROM_HOST
        assert not any(
            recomputed(traced, "host").info[user.name].phase == "backward"
            for user in node.all_input_nodes[0].users
            if user is not node
        )
    # the block that saves what it reads keeps it; the others do as before
    kept = sent(traced, {"transformer.h.0-1": "host", "transformer.h.2": "none",
                         "transformer.h.3": "host"})  # fmt: skip
    names = sent(traced, "host")
    assert kept == [names[0], names[1], names[3]]
    assert sent(traced, "full") == []


def test_what_several_blocks_read_stays() -> None:
    """Tables of a rotary embedding, and the output of an encoder."""
    model, inputs = zoo.t5()
    traced = trace(model.train(), inputs)
    blocks = Blocks(traced)
    graph = recomputed(traced, "host").graph
    for node in graph.nodes:
        if node.target is TO_HOST:
            name = node.all_input_nodes[0].name
            value = next(n for n in traced.graph.nodes if n.name == name)
            readers = {blocks.place[u.name][0] for u in value.users if u.name in blocks.place}
            assert len(readers - {blocks.place.get(name, (None,))[0]}) == 1


@pytest.mark.parametrize("pins", [{"tensor": "1d"}, {"tensor": "1d", "sequence": "megatron"}])
def test_devices_send_nothing_from_host_memory(pins: dict[str, Any]) -> None:
    """Where a block reads its input whole, it is gathered behind the copy."""
    traced = trace(wide(3), BATCH)
    slow_link = devices(4, 1e7)
    plan = planned(traced, slow_link, checkpoint="host", pipeline="none", **pins)
    graph = emit(traced, plan, [0] * len(plan.mesh_shape)).joint.graph
    users = [user for node in graph.nodes if node.target is TO_HOST for user in node.users]
    assert len(users) == 3
    assert all(user.target is FROM_HOST for user in users)
    for node in plan.nodes:
        if node.startswith("from_host_of_"):
            (away,) = plan.nodes[node.replace("from_host", "to_host", 1)].outputs
            assert plan.nodes[node].inputs == (away,)


# --- memory --------------------------------------------------------------------------------------
def test_live_bytes_are_those_of_the_device() -> None:
    x = torch.ones(1000)
    live = LiveBytes()
    live.hold(x)
    with live:
        away = TO_HOST(x)
        assert live.peak_bytes == 4000
        back = ARRIVED(FROM_HOST(away, device=x.device))
        assert live.peak_bytes == 8000
    assert torch.equal(back, x)
    assert back.data_ptr() != x.data_ptr()


def test_a_program_counts_no_host_memory() -> None:
    traced = trace(wide(4), BATCH)
    plan = planned(traced, devices(1), checkpoint="host")
    graph = emit(traced, plan, [0]).joint.graph
    lifetimes = Lifetimes(graph)
    assert all(lifetimes.created(n) == 0 for n in graph.nodes if n.target in (TO_HOST, ARRIVED))
    assert all(lifetimes.created(n) > 0 for n in graph.nodes if n.target is FROM_HOST)


def peaks(rank: int, pins: dict[str, Any]) -> list[tuple[int, int]]:
    """Predicted and measured, with blocks that keep what they read, and with it on the host."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    found = []
    for kind in ("full", "host"):
        wanted = {**pins, "checkpoint": kind}
        parallel = autopar.parallelize(wide(8, 32), mesh, BATCH, constraints=wanted, cache=False)
        found.append((predicted_of(parallel), measure(parallel, BATCH)[1]))
    return found


@pytest.mark.parametrize(
    ("ranks", "pins"),
    [
        pytest.param(1, {}, marks=slow),
        pytest.param(1, {"pipeline": {"size": 1, "microbatches": 4}}, marks=slow),
        pytest.param(2, {"data": 2, "zero": 3}, marks=slow),
        pytest.param(2, {"pipeline": ONE_F_ONE_B}, marks=slow),
    ],
    ids=["one", "turns", "zero3", "1f1b"],
)
def test_the_predicted_peak_is_true_and_lower(ranks: int, pins: dict[str, Any]) -> None:
    for full, host in run_ranks(peaks, ranks, pins):
        assert host[0] < full[0] and host[1] < full[1]
        for predicted, measured in (full, host):
            assert 0.98 * measured <= predicted <= 1.05 * measured


@pytest.mark.parametrize(
    ("name", "mixed"),
    [("llama", True), *(pytest.param(n, m, marks=slow) for n in CASES for m in (True, False))],
)
def test_a_folded_plan_is_that_of_the_whole_graph(name: str, mixed: bool) -> None:
    model = CASES[name][0]()
    folded = trace(model, TEXT, training=True, fold=True)
    whole = trace(model, TEXT, training=True)
    blocks = Blocks(folded).every()
    third = len(blocks) // 3
    kinds = ["host"] * third + ["none"] * third + ["host"] * (len(blocks) - 2 * third)
    said = as_checkpoint(dict(zip(blocks, kinds, strict=True))) if mixed else "host"
    pins = Constraints(checkpoint=said)
    on = replace(cluster(2, 4), device=devices(1, 1e6).device)
    short, long = (solve(t, on, constraints=pins) for t in (folded, whole))
    for key in ("step_time_s", "copy_time_s", "exposed_copy_s"):
        mine, theirs = (getattr(plan.predicted, key) for plan in (short, long))
        assert mine == pytest.approx(theirs, rel=1e-9)
        assert mine > 0
    assert short.predicted.peak_memory_bytes == long.predicted.peak_memory_bytes
    assert short.predicted.host_bytes == long.predicted.host_bytes > 0
    assert set(unfolded(short, folded, whole).nodes) == set(long.nodes)


# --- the search ----------------------------------------------------------------------------------
@lru_cache(maxsize=1)
def uniform() -> dict[str, Plan]:
    kinds = ("none", "full", "host")
    return {kind: planned(deep(), devices(1), checkpoint=kind) for kind in kinds}


def test_it_is_chosen_where_nothing_else_fits() -> None:
    plans = uniform()
    full, host = (plans[kind].predicted.peak_memory_bytes for kind in ("full", "host"))
    limit = (full + host) // 2
    plan = planned(deep(), devices(1), limit, pipeline="none")
    assert "host" in kinds_in(plan)
    assert plan.predicted.peak_memory_bytes <= limit < full
    assert plan.predicted.host_bytes > 0
    # not where the host's memory is the device's, nor where nothing may leave the device
    alone = Cluster.from_profile("cpu-gloo", devices_per_node=1)
    for on, pins in ((alone, {}), (devices(1), {"offload": "none"})):
        with pytest.raises(InfeasiblePlanError):
            planned(deep(), on, limit, pipeline="none", **pins)
    # as a pin it is honoured all the same, like an offloaded optimizer
    pinned = planned(deep(), alone, limit, checkpoint="host")
    assert pinned.predicted.peak_memory_bytes == host


@pytest.mark.slow
def test_a_smaller_limit_is_never_faster() -> None:
    plans = uniform()
    most, least = (plans[kind].predicted.peak_memory_bytes for kind in ("none", "host"))
    slow_link = devices(1, 1e8)
    limits = [least + (most - least) * share // 4 for share in (4, 2, 0)]
    found = [planned(deep(), slow_link, limit, pipeline="none") for limit in limits]
    seconds = [plan.predicted.step_time_s for plan in found]
    assert seconds == sorted(seconds)
    assert "host" in kinds_in(found[-1])
    for limit, plan in zip(limits, found, strict=True):
        assert plan.predicted.peak_memory_bytes <= limit


def test_pins_are_read_and_refused() -> None:
    said = {"transformer.h.0-2": "host", "*": "none"}
    plan = planned(deep(), devices(1), checkpoint=said)
    blocks = Blocks(deep()).every()
    kinds = kinds_of(plan.checkpoint, blocks)
    assert [kinds[Block("transformer.h", n)] for n in (0, 2, 3, 4)] == ["host"] * 2 + ["none"] * 2
    with pytest.raises(ConstraintError, match="known are none, selective, full, host"):
        Constraints.parse({"checkpoint": "device"})
    with pytest.raises(ConstraintError, match="no such block"):
        planned(deep(), devices(1), checkpoint={"transformer.h.9": "host"})


# --- seconds -------------------------------------------------------------------------------------
def test_copies_hide_behind_a_block_and_the_rest_is_exposed() -> None:
    traced = deep(False)
    seconds = {}
    for link in (1e10, 1e6):
        plan = scheduled(planned(traced, devices(1, link), checkpoint="host"), traced)
        p = plan.predicted
        assert p.copy_time_s == pytest.approx(
            2 * 5 * (512 * 16 * 4 / link + devices(1).device.kernel_overhead_s)
        )
        exposed = sum(op.compute_s * op.times for op in p.timeline.ops if op.op_class == "host")
        assert p.exposed_copy_s == pytest.approx(exposed, rel=1e-6)
        assert p.step_time_s == pytest.approx(p.compute_time_s + p.exposed_copy_s + p.update_s)
        seconds[link] = p.exposed_copy_s, p.copy_time_s
    assert seconds[1e10][0] == 0.0
    # a link this slow is busy throughout: nearly all of both ways is waited for
    assert 0.9 * seconds[1e6][1] < seconds[1e6][0] < seconds[1e6][1]


@pytest.mark.parametrize("schedule", ["zero-bubble", pytest.param("1f1b", marks=slow)])
def test_the_parts_of_a_pipeline_wait_for_their_copies(schedule: str) -> None:
    traced = trace(wide(4), BATCH)
    pipeline = {"size": 2, "microbatches": 4, "schedule": schedule}
    fast, slow_ = (
        scheduled(planned(traced, devices(2, link), pipeline=pipeline, checkpoint="host"), traced)
        for link in (1e12, 1e6)
    )
    p, q = fast.predicted, slow_.predicted
    assert p.exposed_copy_s == 0.0 < q.exposed_copy_s
    assert q.step_time_s > p.step_time_s
    known = q.compute_time_s + q.exposed_time_s + q.exposed_copy_s + q.bubble_s + q.update_s
    assert q.step_time_s == pytest.approx(known)
    assert q.host_activation_bytes == max(
        stage.predicted.host_activation_bytes
        for stage in slow_.pipeline.stages  # type: ignore[union-attr]
    )


def test_a_copy_comes_back_while_the_block_before_runs() -> None:
    """Each begins behind the wait for the one before, as the memory of a plan counts on."""
    traced = trace(wide(4), BATCH)
    plan = planned(traced, devices(1), checkpoint="host")
    graphs = {p: emit(traced, plan, [0], passes=p).joint.graph for p in ((), ("prefetch",))}
    gaps = {}
    for passes, graph in graphs.items():
        order = {node: index for index, node in enumerate(graph.nodes)}
        copies = [node for node in graph.nodes if node.target is FROM_HOST]
        waits = [next(iter(node.users)) for node in copies]
        assert all(wait.target is ARRIVED for wait in waits)
        gaps[passes] = [order[w] - order[c] for c, w in zip(copies, waits, strict=True)]
        for wait, later in zip(waits, copies[1:], strict=False):
            assert order[wait] < order[later]
    assert gaps[()] == [1] * 4
    assert sum(gap > 20 for gap in gaps["prefetch",]) >= 3
    first, later = (Lifetimes(graph) for graph in graphs.values())
    copied = max(later.created(node) for node in later.nodes if node.target is FROM_HOST)
    assert later.peak_bytes <= first.peak_bytes + copied
    assert later.peak_bytes <= plan.predicted.peak_memory_bytes


def test_a_stop_is_the_copys_by_hand() -> None:
    """Two copies on one stream: the second is waited for longer, as the first is before it."""
    on, x = devices(1, 1e6), torch.empty(1000, device="meta")
    graph = torch.fx.Graph()
    given = graph.placeholder("x")
    given.meta["val"] = x
    copies = [graph.call_function(FROM_HOST, (given,), {"device": "cpu"}) for _ in range(2)]
    waits = [graph.call_function(ARRIVED, (copy,)) for copy in copies]
    for node in (*copies, *waits):
        node.meta = {"val": torch.empty_like(x), "phase": "backward"}
    found = simulate(graph, on)
    each = 4000 / 1e6 + on.device.kernel_overhead_s
    assert found.copy_s == found.exposed_copy_s == pytest.approx(2 * each)
    assert found.step_s == pytest.approx(2 * each)
    assert {span.stream for span in found.spans} == {"up"}


# --- what a user sees ----------------------------------------------------------------------------
def test_a_saved_plan_says_it_again_and_reports_it(tmp_path: Path) -> None:
    model = wide()
    plan = autopar.plan(
        model, devices(1), BATCH, constraints={"checkpoint": "host", "pipeline": "none"}
    )
    plan.save(tmp_path / "plan.json")
    again = autopar.load_plan(tmp_path / "plan.json")
    assert again.predicted == plan.predicted
    assert again.checkpoint == "host"
    text = " ".join(plan.summary().split())
    assert "activations, 160.00 KiB, on the host between forward and backward" in text
    found = explain(plan, node=next(name for name in plan.nodes if "to_host" in name))
    assert found.name
    assert "on the host between forward and backward" in render_page(plan)
    assert "host" in render_differences(plan, uniform()["full"], 200)


class Early(nn.Module):
    """What comes into a block is read when that is recomputed, and by nothing behind."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x.relu()).relu())


def test_a_plan_counts_what_comes_back_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Early() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x.square().mean()

    traced = trace(Stack(), (torch.randn(4096, 64),))
    plan = planned(traced, devices(1), checkpoint="host")
    programs = [emit(traced, plan, [0], passes=p).joint.graph for p in ((), ("prefetch",))]
    before, after = (Lifetimes(graph).peak_bytes for graph in programs)
    for module in ("buffers", "liveness"):
        monkeypatch.setattr(f"autopar.solver.{module}.fetched_ahead", lambda step, order: [])
    less = planned(traced, devices(1), checkpoint="host").predicted.peak_memory_bytes
    assert 0 < after - before <= plan.predicted.peak_memory_bytes - less
