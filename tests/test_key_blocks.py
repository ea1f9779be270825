"""Attention over shards of the sequence is priced as it runs: block by block."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import fx

from autopar.codegen.fusion import fuse
from autopar.codegen.passes.lifetimes import Lifetimes
from autopar.core.attention import tokens_first
from autopar.core.placement import Replicate, Shard, shard_factor
from autopar.core.strategy import OpCall, op_call
from autopar.cost_model import Cluster
from autopar.cost_model.emitted_ops import node_seconds
from autopar.solver.candidates import Candidate, Pricer, expand, scratch_bytes
from tests.bruteforce import Captured, Sample, capture, distribute, emit, rows_of
from tests.test_fused_prices import ALL

autopar = torch.ops.autopar
LENGTH, HEADS, WIDTH = 512, 4, 64
Mesh = tuple[int, ...]


def captured_of(
    backward: bool, causal: bool, masked: bool, dtype: torch.dtype
) -> tuple[Captured, tuple[torch.Tensor, ...]]:
    q, k, v = (torch.randn(1, HEADS, LENGTH, WIDTH).to(dtype) for _ in range(3))
    mask = (torch.rand(1, 1, LENGTH, LENGTH) > 0.1,) if masked else ()

    def forward(q: Any, k: Any, v: Any, *given: Any) -> Any:
        return autopar.attention.default(q, k, v, given[0] if given else None, causal, 0.1)

    def derived(grad: Any, q: Any, k: Any, v: Any, *given: Any) -> Any:
        *masks, out, lse = given
        return autopar.attention_backward.default(
            grad, q, k, v, masks[0] if masks else None, out, lse, causal, 0.1
        )

    out, lse = forward(q, k, v, *mask)
    inputs = (torch.randn_like(q), q, k, v, *mask, out, lse) if backward else (q, k, v, *mask)
    return capture(Sample("", derived if backward else forward, lambda: inputs)), inputs


def emitted(
    captured: Captured, inputs: tuple[torch.Tensor, ...], chosen: Candidate, mesh: Mesh
) -> fx.Graph:
    """Of the last rank, which has as much to do as any."""
    rows = [
        next(
            row
            for row in rows_of(captured, size)
            if row.variant == chosen.variants[axis]
            and row.inputs == tuple(x[axis] for x in chosen.inputs)
        )
        for axis, size in enumerate(mesh)
    ]
    rank = math.prod(mesh) - 1
    parts = [distribute(x, at, mesh)[rank] for x, at in zip(inputs, chosen.inputs, strict=True)]
    # as projections leave them
    parts = [tokens_first(x) if x.shape[-1] == WIDTH else x for x in parts]
    return emit(captured, tuple(rows), mesh, rank, parts)


def seconds_of(graph: fx.Graph, cluster: Cluster) -> float:
    calls = [n for n in graph.nodes if n.op == "call_function"]
    ops = (n for n in calls if getattr(n.target, "namespace", "") != "_c10d_functional")
    return sum(node_seconds(n, cluster.device) for n in ops)


def cluster_of(profile: str, mesh: Mesh) -> Cluster:
    return Cluster.from_profile(profile, nodes=1, devices_per_node=math.prod(mesh), mesh_shape=mesh)


def in_rows(call: OpCall, mesh: Mesh) -> list[Candidate]:
    """Candidates that shard the queries' rows."""
    first = 1 if "backward" in str(call.target) else 0
    return [c for c in expand(call, mesh) if Shard(2) in c.inputs[first]]


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("kind", ["causal", "all", "masked", "both"])
@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2)], ids=str)
@pytest.mark.parametrize(
    ("profile", "dtype"), [("cpu-gloo", torch.float32), ("h100-sxm", torch.bfloat16)]
)
def test_as_emitted(
    profile: str, dtype: torch.dtype, mesh: Mesh, kind: str, backward: bool
) -> None:
    torch.manual_seed(0)
    captured, inputs = captured_of(
        backward, kind in ("causal", "both"), kind in ("masked", "both"), dtype
    )
    cluster, call = cluster_of(profile, mesh), op_call(captured.node, mesh[0])
    found = in_rows(call, mesh)
    kinds = {v for c in found for v in c.variants}
    assert "ring" in kinds and ("zigzag" in kinds) == (kind == "causal")
    seconds, scratch = Pricer(cluster).compute(call, found), scratch_bytes(call, found, mesh)
    for candidate, priced_s, more in zip(found, seconds, scratch, strict=True):
        graph = emitted(captured, inputs, candidate, mesh)
        assert priced_s == pytest.approx(seconds_of(graph, cluster), rel=0.06), candidate.variants
        outputs = sum(
            spec.num_bytes / shard_factor(layout, mesh)
            for spec, layout in zip(call.outputs, candidate.outputs, strict=True)
        )
        needed = Lifetimes(graph).peak_bytes - outputs
        assert needed * 0.97 <= more <= needed * 1.3, candidate.variants


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2)], ids=str)
def test_as_fused(mesh: Mesh, causal: bool, backward: bool) -> None:
    torch.manual_seed(0)
    captured, inputs = captured_of(backward, causal, False, torch.bfloat16)
    cluster, call = cluster_of("h100-sxm", mesh), op_call(captured.node, mesh[0])
    found = in_rows(call, mesh)
    for candidate, priced_s in zip(
        found, Pricer(cluster, fuses=True).compute(call, found), strict=True
    ):
        graph = emitted(captured, inputs, candidate, mesh)
        fuse(graph, ALL, next(iter(graph.nodes)).meta["val"].fake_mode)
        assert priced_s == pytest.approx(seconds_of(graph, cluster), rel=0.1), candidate.variants


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_some_rank_needs_all_blocks_of_a_causal_call(backward: bool) -> None:
    """Of long sequences: shards of heads, rows that are exchanged, and rows as they are."""
    captured, _ = captured_of(backward, True, False, torch.bfloat16)
    plain = op_call(captured.node, 4)
    operands, outputs = (
        tuple(s._replace(shape=(1, 64, 1 << 16, *s.shape[3:])) for s in specs)
        for specs in (plain.operands, plain.outputs)
    )
    call = OpCall(plain.target, plain.args, plain.kwargs, operands, outputs, 4, plain.nodes)
    cluster = cluster_of("h100-sxm", (4,))
    found = expand(call, (4,))
    seconds = Pricer(cluster, fuses=True).compute(call, found)
    first = int(backward)
    by = {c.variants[0]: s for c, s in zip(found, seconds, strict=True) if c.variants[0]}
    heads = next(s for c, s in zip(found, seconds, strict=True) if c.inputs[first] == (Shard(1),))
    whole = next(
        s for c, s in zip(found, seconds, strict=True) if c.inputs[first] == (Replicate(),)
    )
    assert heads == pytest.approx(whole / 4, rel=0.02)
    assert by["zigzag"] == pytest.approx(heads, rel=0.1)
    assert by["ring"] == pytest.approx(heads * 7 / 4, rel=0.1)
    assert by["causal_rows"] == pytest.approx(heads * 2, rel=0.1)
