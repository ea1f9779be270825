"""Microbatches and pipeline stages on virtual ranks: loss and every gradient against one device.

Labels are ignored in unequal numbers, so a microbatch that counted for itself would be seen.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from autopar.core.cells import block_order
from autopar.core.constraints import Constraints
from autopar.core.graph import TracedModel
from autopar.core.plan import Plan
from autopar.core.stages import cut
from autopar.cost_model import Cluster
from autopar.errors import ConstraintError, InfeasiblePlanError
from autopar.search.pipelining import plan_step
from autopar.tracer.trace import trace
from autopar.verification import verify
from tests import zoo

BUILDERS = {
    "gpt2": lambda: zoo.gpt2(layers=4),
    "gpt2-dropout": lambda: zoo.gpt2(dropout=0.1, layers=2),
    "llama": lambda: zoo.llama(layers=4),
    "vit": lambda: zoo.vit(layers=4),
    "t5": zoo.t5,
    "mixtral": zoo.mixtral,
}

# float32 inside the loss, the norms or the rotary embedding; Mixtral is float32 throughout
BOUND = {"gpt2": 1e-6, "llama": 1e-6, "mixtral": 1e-4}

MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2": (2, {"pipeline": {"size": 2, "microbatches": 4, "schedule": "1f1b"}}),
    "gpipe": (2, {"pipeline": {"size": 2, "microbatches": 2, "schedule": "gpipe"}}),
    "interleaved": (2, {"pipeline": {"size": 2, "microbatches": 2, "chunks": 2}}),
    "zero-bubble": (2, {"pipeline": {"size": 2, "microbatches": 2, "schedule": "zero-bubble"}}),
    "pp2-tp2": (4, {"pipeline": {"size": 2, "microbatches": 2}, "tensor": "1d"}),
    "pp2-zero1": (4, {"pipeline": {"size": 2, "microbatches": 2}, "data": 2, "zero": 1}),
    "pp2-zero2": (4, {"pipeline": {"size": 2, "microbatches": 2}, "data": 2, "zero": 2}),
    "pp2-zero3": (4, {"pipeline": {"size": 2, "microbatches": 2}, "data": 2, "zero": 3}),
    "recompute": (2, {"pipeline": {"size": 2, "microbatches": 2}, "checkpoint": "full"}),
    "microbatches": (2, {"pipeline": {"microbatches": 4}}),
    "accumulate-zero1": (2, {"pipeline": {"microbatches": 2}, "data": 2, "zero": 1}),
}


@lru_cache(maxsize=1)
def traced_model(name: str) -> tuple[nn.Module, dict[str, Any], TracedModel]:
    torch.manual_seed(0)
    model, inputs = BUILDERS[name]()
    if name != "mixtral":
        model = model.double()
        inputs = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    if inputs["labels"].dim() == 2:
        inputs["labels"][0, 3:] = -100
    model.train()
    return model, inputs, trace(model, inputs)


def make_plan(name: str, ranks: int, constraints: dict[str, Any], limit: int | None = None) -> Plan:
    cluster = Cluster.from_profile("cpu-gloo", devices_per_node=ranks)
    parsed = Constraints.parse(constraints)
    traced = traced_model(name)[2]
    return plan_step(traced, cluster, constraints=parsed, memory_limit=limit)


def check(name: str, plan: Plan) -> None:
    model, inputs, traced = traced_model(name)
    result = verify(plan, model, inputs, traced=traced)
    assert len(result.gradients) == sum(p.requires_grad for p in model.parameters())
    worst, error = result.worst
    assert error <= BOUND.get(name, 1e-9), f"{worst}: {error:.3g}"


# what the others share with these is left to the slow run
_QUICK = {
    "gpt2": ("pp2", "zero-bubble", "pp2-zero3"),
    "gpt2-dropout": ("pp2-tp2",),
    "llama": ("pp2-zero2",),
    "vit": (
        "pp2",
        "interleaved",
        "zero-bubble",
        "pp2-tp2",
        "pp2-zero2",
        "recompute",
        "accumulate-zero1",
    ),
    "t5": ("pp2",),
    "mixtral": ("pp2", "pp2-zero3"),
}


def _cases() -> list[Any]:
    found = []
    for name in BUILDERS:
        for mode in MODES:
            if name in ("gpt2-dropout", "mixtral") and mode == "interleaved":
                continue  # two blocks make no four stages
            marks = [] if mode in _QUICK[name] else [pytest.mark.slow]
            found.append(pytest.param(name, mode, marks=marks))
    return found


@pytest.mark.parametrize(("name", "mode"), _cases())
def test_mode(name: str, mode: str) -> None:
    ranks, constraints = MODES[mode]
    plan = make_plan(name, ranks, constraints)
    assert plan.num_devices == ranks
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    check(name, plan)


def test_zero_stages_differ_in_when_gradients_are_reduced() -> None:
    plans = {z: make_plan("vit", 4, MODES[f"pp2-zero{z}"][1]) for z in (1, 2, 3)}

    def sent(zero: int, kind: str) -> int:
        stages = plans[zero].pipeline.stages  # type: ignore[union-attr]
        return sum(c.num_bytes for s in stages for c in s.predicted.comm_bytes if c.kind == kind)

    # two microbatches: stage 2 reduces weight gradients at each, stage 3 gathers weights at each
    assert sent(2, "reduce_scatter") > 1.5 * sent(1, "reduce_scatter")
    assert sent(3, "all_gather") > 1.5 * sent(1, "all_gather")


def test_a_model_that_needs_the_whole_batch_is_refused_with_its_op() -> None:
    model, inputs = zoo.resnet()
    traced = trace(model.train(), inputs)
    cluster = Cluster.from_profile("cpu-gloo", devices_per_node=2)
    wanted = Constraints.parse({"pipeline": {"microbatches": 2}})
    with pytest.raises(ConstraintError, match=r"normalization.*needs the whole batch"):
        plan_step(traced, cluster, constraints=wanted)


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        ({"size": 8, "microbatches": 2}, "does not divide the 4 devices"),
        ({"size": 4, "microbatches": 4, "chunks": 2}, "needs 8 blocks, the model has 4"),
        ({"size": 2, "microbatches": 3}, "3 does not divide"),
        ({"size": 2, "microbatches": 1, "chunks": 2}, "multiple"),
        ({"size": 2, "schedule": "2f2b"}, "unknown pipeline schedule"),
        ({"size": 2, "stages": 2}, "unknown pipeline setting 'stages'"),
        ({"size": 2, "microbatches": 2, "cuts": ["vit.layers.9"]}, "is no block"),
        ({"size": 2, "cuts": ["a", "b", "c", "d"], "chunks": 2}, "make 5 stages"),
    ],
)
def test_bad_pipelines_are_refused(pipeline: dict[str, Any], message: str) -> None:
    with pytest.raises(ConstraintError, match=message):
        make_plan("vit", 4, {"pipeline": pipeline})


def test_cuts_are_where_they_are_pinned() -> None:
    plan = make_plan(
        "vit", 2, {"pipeline": {"size": 2, "microbatches": 2, "cuts": ["vit.layers.3"]}}
    )
    assert plan.pipeline is not None
    first, second = plan.pipeline.stages
    assert "vit.layers.2.mlp.fc1.weight" in first.parameters
    assert "vit.layers.3.mlp.fc1.weight" in second.parameters
    assert not first.parameters.keys() & second.parameters.keys()


def test_a_tied_weight_is_held_once() -> None:
    plan = make_plan("gpt2", 2, MODES["pp2"][1])
    assert plan.pipeline is not None
    holders = [s for s in plan.pipeline.stages if "transformer.wte.weight" in s.parameters]
    assert len(holders) == 1


def test_more_microbatches_need_less_memory_and_a_limit_holds() -> None:
    peaks = [
        make_plan("vit", 1, {"pipeline": {"microbatches": m}}).predicted.peak_memory_bytes
        for m in (1, 2, 4)
    ]
    # one microbatch has no sums of gradients beside its activations
    assert max(peaks[0], peaks[1]) > peaks[2]
    free = make_plan("vit", 4, MODES["pp2-tp2"][1])
    limit = int(0.9 * free.predicted.peak_memory_bytes)
    tight = make_plan("vit", 4, {"pipeline": {"size": 2, "microbatches": 4}}, limit)
    assert tight.predicted.peak_memory_bytes <= limit
    check("vit", tight)
    with pytest.raises(InfeasiblePlanError, match="pipeline stage"):
        make_plan("vit", 4, {"pipeline": {"size": 2, "microbatches": 2}}, 1000)


class _Skips(nn.Module):
    """Blocks whose outputs are read again by later blocks, not by the next one only."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(16, 8) for _ in range(3))
        self.frozen = nn.Parameter(torch.randn(8), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        kept = []
        for layer in self.down:
            x = torch.tanh(layer(x)) + self.frozen
            kept.append(x)
        for layer in self.up:
            x = torch.tanh(layer(torch.cat([x, kept.pop()], -1)))
        return ((x - y) ** 2).mean()


@pytest.mark.parametrize("stages", [2, 3, 6])
def test_skip_connections_are_carried_over_stages(stages: int) -> None:
    torch.manual_seed(0)
    model = _Skips().double()
    inputs = {"x": torch.randn(6, 8).double(), "y": torch.randn(6, 8).double()}
    traced = trace(model.train(), inputs)
    cluster = Cluster.from_profile("cpu-gloo", devices_per_node=stages)
    wanted = Constraints.parse({"pipeline": {"size": stages, "microbatches": 3}})
    plan = plan_step(traced, cluster, constraints=wanted)
    result = verify(plan, model, inputs, traced=traced)
    assert result.worst[1] <= 1e-9, result.worst


def test_every_cut_of_a_model_gives_the_same_program_in_parts() -> None:
    """Each op of the graph stands in some stage, and no stage reads what it has not got."""
    traced = traced_model("t5")[2]
    from autopar.codegen.microbatch import localise
    from autopar.solver.microbatch import split_in_time

    cluster = Cluster.from_profile("cpu-gloo", devices_per_node=2)
    body = localise(traced, split_in_time(traced, cluster, 2), 2).body
    order = [f"{b.container}.{b.number}" for b in block_order(body)]
    assert order == ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"]
    for starts in (order[1:2], order[2:3], order[1:]):
        stages = cut(body, starts)
        computed = {n.name for m in stages.models for n in m.graph.nodes}
        assert {n.name for n in body.graph.nodes if n.op == "call_function"} <= computed | {
            n.name for n in body.graph.nodes if n.target is torch.ops.aten.add.Tensor
        } | {n.name for n in body.graph.nodes if n.target is torch.ops.aten.alias.default}
        named = body.nodes()
        for node in (n for m in stages.models for n in m.graph.nodes if n.op == "call_function"):
            # tables go by name: what a stage adds must not be called as something elsewhere
            twin = named.get(node.name)
            if twin is not None:
                names = [a.name for a in node.all_input_nodes]
                assert names == [a.name for a in twin.all_input_nodes], node
        for t in stages.transfers:
            if t.phase == "forward":
                assert t.target == t.source + 1
            if t.phase == "backward":
                assert t.target == t.source - 1


def test_a_config_with_mixed_attention_pipelines() -> None:
    """Alternating layers (local and global attention) are cut like any others."""
    config = hf.Gemma2Config(
        num_hidden_layers=4, hidden_size=32, intermediate_size=64, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, vocab_size=64, sliding_window=4,
        max_position_embeddings=32,
    )  # fmt: skip
    torch.manual_seed(0)
    model = hf.Gemma2ForCausalLM(config).double().train()
    ids = torch.randint(0, 64, (4, 8))
    inputs = {"input_ids": ids, "labels": ids.clone()}
    traced = trace(model, inputs)
    cluster = Cluster.from_profile("cpu-gloo", devices_per_node=2)
    wanted = Constraints.parse({"pipeline": {"size": 2, "microbatches": 2}})
    plan = plan_step(traced, cluster, constraints=wanted)
    assert verify(plan, model, inputs, traced=traced).worst[1] <= 1e-5
