"""A trace brought to other sizes is the trace of a model of these sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.fx.node import map_aggregate

from autopar.core.graph import TracedModel
from benchmarks import published_trace
from benchmarks.published_models import Shape
from benchmarks.published_trace import Traces, traced

GPT = Shape(
    kind="gpt", layers=2, hidden=96, heads=4, kv_heads=4, ffn=384, vocab=640,
    fused_attention=False, masked_softmax=False, dropout=0.1,
)  # fmt: skip
LLAMA = Shape(
    kind="llama", layers=2, hidden=128, heads=8, kv_heads=2, ffn=320, vocab=512,
    fused_attention=True,
)  # fmt: skip


def described(found: TracedModel) -> dict[str, Any]:
    """All of a trace but its fractions, which follow from sizes and price nothing."""

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return str((tuple(value.shape), value.stride(), value.dtype))
        return None if isinstance(value, float) else value

    nodes = [
        (
            node.name,
            node.target,
            str(map_aggregate(node.args, plain)),
            str(map_aggregate(node.kwargs, plain)),
            str(map_aggregate(node.meta.get("val"), plain)),
        )
        for node in found.graph.nodes
    ]
    return {"nodes": nodes, "inputs": found.inputs, "outputs": found.outputs, "info": found.info}


@pytest.mark.parametrize(
    ("shape", "length", "micro", "dtype"),
    [
        (GPT, 48, 2, "float16"),
        (replace(GPT, hidden=100, dropout=0.0), 33, 1, "float16"),  # 25 numbers a head
        (replace(GPT, hidden=24, heads=1, kv_heads=1, fused_attention=True), 24, 5, "bfloat16"),
        (replace(GPT, masked_softmax=True, ffn=640), 640, 1, "float32"),
        (LLAMA, 64, 3, "bfloat16"),
        (replace(LLAMA, kv_heads=1, joint_gate=True), 16, 1, "bfloat16"),
        (replace(LLAMA, kv_heads=8, fused_attention=False, hidden=16), 2, 2, "bfloat16"),
    ],
)
def test_a_trace_of_primes_becomes_that_of_a_model(shape, length, micro, dtype):
    direct = traced(shape, length, micro, dtype)
    resized = Traces().of(shape, length, micro, dtype)
    assert described(resized) == described(direct)
    assert resized.fingerprint() == direct.fingerprint()


def test_models_that_differ_in_sizes_alone_are_traced_once(monkeypatch):
    done = []

    def counted(*given: Any) -> TracedModel:
        done.append(given)
        return traced(*given)

    monkeypatch.setattr(published_trace, "traced", counted)
    traces = Traces()
    for length, micro in ((64, 2), (32, 3), (48, 2)):
        traces.of(LLAMA, length, micro, "bfloat16")
        traces.of(replace(LLAMA, vocab=length, heads=4), length, micro, "bfloat16")
    assert len(done) == 1
    traces.of(LLAMA, 64, 1, "bfloat16")  # a dim of one sequence is broadcast and not split
    assert len(done) == 2
