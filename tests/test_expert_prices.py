"""What a rank does of a grouped matmul: its own groups' rows, and the copies that bring them up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import fx

from autopar.codegen.emit import emit
from autopar.core.constraints import Constraints
from autopar.core.placement import Partial, Shard
from autopar.core.strategy import OpCall, TensorSpec
from autopar.cost_model import Cluster, kernel_seconds
from autopar.cost_model.emitted_ops import node_seconds
from autopar.solver.candidates import Pricer, expand, scratch_bytes
from autopar.solver.solve import solve
from autopar.tracer.trace import trace

MESH = (4,)
CLUSTER = Cluster.from_profile("h100-sxm", devices_per_node=4, mesh_shape=MESH)
ROWS, WIDTH, WIDE, GROUPS = 65536, 1024, 4096, 8
GROUPED = torch.ops.aten._grouped_mm.default


def _call(shapes: list[tuple[int, ...]], made: tuple[int, ...]) -> OpCall:
    graph = fx.Graph()
    nodes = tuple(graph.placeholder(f"x{i}") for i in range(len(shapes)))
    dtypes = [torch.bfloat16, torch.bfloat16, torch.int32]
    specs = tuple(TensorSpec(s, d) for s, d in zip(shapes, dtypes, strict=True))
    return OpCall(GROUPED, nodes, {}, specs, (TensorSpec(made, torch.bfloat16),), MESH[0], nodes)


FORWARD = _call([(ROWS, WIDTH), (GROUPS, WIDTH, WIDE), (GROUPS,)], (ROWS, WIDE))
GRADIENT = _call([(WIDTH, ROWS), (ROWS, WIDE), (GROUPS,)], (GROUPS, WIDTH, WIDE))
X, Y = 2 * ROWS * WIDTH, 2 * ROWS * WIDE  # bytes


@pytest.mark.parametrize(
    ("call", "copied", "scratch"),
    [(FORWARD, [X, Y, Y], max(X, Y)), (GRADIENT, [X, Y], X + Y)],
)
def test_copies_around_some_experts_have_seconds_and_bytes(
    call: OpCall, copied: list[int], scratch: int
) -> None:
    """Rows are rolled to the front; of the results the others' are set to 0, and rolled back."""
    (found,) = (c for c in expand(call, MESH) if c.variants == ("expert",))
    pricer = Pricer(CLUSTER)
    seconds = pricer.compute(call, [found, found._replace(copied=())])
    moved = 2.0 * sum(copied)
    copies = kernel_seconds(CLUSTER.device, "memory", "bfloat16", moved, np.array(len(copied)))
    assert seconds[0] - seconds[1] == pytest.approx(float(copies))
    assert scratch_bytes(call, [found], MESH) == pytest.approx([scratch])


def test_what_needs_no_copy_has_no_scratch() -> None:
    others = [c for c in expand(FORWARD, MESH) if c.variants != ("expert",)]
    assert any(c.inputs[1] == (Shard(2),) for c in others)
    assert not scratch_bytes(FORWARD, others, MESH).any()
    assert any(c.outputs == ((Partial(),),) for c in others)


def test_a_program_knows_which_share_of_the_rows_a_rank_multiplies() -> None:
    """A rank multiplies the rows of its own experts, though it holds those of all."""
    config = hf.MixtralConfig(
        num_hidden_layers=1,
        hidden_size=1024,
        intermediate_size=4096,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=128,
        num_local_experts=8,
    )
    with torch.device("meta"):  # few tokens, whose rows are sooner sent than weights
        model, tokens = hf.MixtralForCausalLM(config), torch.zeros(4, 64, dtype=torch.int64)
    traced = trace(model.train(), {"input_ids": tokens, "labels": tokens})
    params = {"*experts.*": ["Shard(0)"]}
    plan = solve(traced, CLUSTER, constraints=Constraints.parse({"params": params}))
    shares: dict[str, Any] = {}
    for node in emit(traced, plan, [0]).joint.graph.nodes:
        if "grouped_mm" in str(node.target):
            shares[str(node.meta["origin"])] = node.meta.get("flops_share")
    some = {name for name in shares if plan.nodes[name].variants == ("expert",)}
    assert some and shares == {name: 0.25 if name in some else None for name in shares}


def test_a_share_of_the_flops_takes_a_share_of_the_seconds() -> None:
    graph = fx.Graph()
    x, weights = graph.placeholder("x"), graph.placeholder("weights")
    ends = graph.placeholder("ends")
    x.meta["val"] = torch.empty(ROWS, WIDE, dtype=torch.bfloat16, device="meta")
    weights.meta["val"] = torch.empty(GROUPS, WIDE, WIDE, dtype=torch.bfloat16, device="meta")
    ends.meta["val"] = torch.empty(GROUPS, dtype=torch.int32, device="meta")
    node = graph.call_function(GROUPED, (x, weights, ends))
    node.meta["val"] = torch.empty(ROWS, WIDE, dtype=torch.bfloat16, device="meta")
    whole_s = node_seconds(node, CLUSTER.device)
    node.meta["flops_share"] = 0.5
    assert node_seconds(node, CLUSTER.device) == pytest.approx(0.5 * whole_s, rel=0.05)
