"""Norms and losses whose rows are split over ranks are priced as the ops that they become."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.codegen.fusion import fuse
from autopar.core.placement import Shard
from autopar.core.strategy import op_call
from autopar.cost_model import Cluster
from autopar.cost_model.emitted_ops import node_seconds
from autopar.solver.candidates import Pricer, expand
from tests import rule_samples_nn as _kernels  # noqa: F401  (registers one that torch has not)
from tests.bruteforce import Sample, capture, distribute, emit, rows_of
from tests.test_fused_prices import ALL

aten = torch.ops.aten
autopar = torch.ops.autopar
ROWS, WIDTH = 512, 1024


def _norm(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(ROWS, WIDTH).to(dtype)
    return x, torch.randn(WIDTH).to(dtype), torch.randn(WIDTH).to(dtype)


def _layer_norm(dtype: torch.dtype) -> Sample:
    return Sample(
        "", lambda *x: aten.native_layer_norm.default(x[0], [WIDTH], *x[1:], 1e-5),
        lambda: _norm(dtype),
    )  # fmt: skip


def _layer_norm_backward(dtype: torch.dtype) -> Sample:
    x, weight, bias = _norm(dtype)
    _, mean, rstd = aten.native_layer_norm.default(x, [WIDTH], weight, bias, 1e-5)

    def function(grad: Any, x: Any, mean: Any, rstd: Any, weight: Any, bias: Any) -> Any:
        return aten.native_layer_norm_backward.default(
            grad, x, [WIDTH], mean, rstd, weight, bias, [True, True, True]
        )

    return Sample("", function, lambda: (torch.randn_like(x), x, mean, rstd, weight, bias))


def _rms_norm(dtype: torch.dtype) -> Sample:
    return Sample(
        "", lambda x, w: aten._fused_rms_norm.default(x, [WIDTH], w, 1e-5),
        lambda: _norm(dtype)[:2],
    )  # fmt: skip


def _rms_norm_backward(dtype: torch.dtype) -> Sample:
    x, weight, _ = _norm(dtype)
    _, rstd = aten._fused_rms_norm.default(x, [WIDTH], weight, 1e-5)

    def function(grad: Any, x: Any, rstd: Any, weight: Any) -> Any:
        return aten._fused_rms_norm_backward.default(grad, x, [WIDTH], rstd, weight, [True, True])

    return Sample("", function, lambda: (torch.randn_like(x), x, rstd, weight))


def _token_nll(dtype: torch.dtype) -> Sample:
    logits, target = torch.randn(ROWS, WIDTH).to(dtype), torch.randint(WIDTH, (ROWS,))
    return Sample("", lambda x, y: autopar.token_nll.default(x, y, -100), lambda: (logits, target))


def _token_nll_backward(dtype: torch.dtype) -> Sample:
    logits, target = torch.randn(ROWS, WIDTH).to(dtype), torch.randint(WIDTH, (ROWS,))
    nll, lse = autopar.token_nll.default(logits, target, -100)

    def function(grad: Any, logits: Any, target: Any, lse: Any) -> Any:
        return autopar.token_nll_backward.default(grad, logits, target, lse, -100)

    return Sample("", function, lambda: (torch.randn_like(nll), logits, target, lse))


SAMPLES = {
    function.__name__[1:]: function
    for function in (
        _layer_norm, _layer_norm_backward, _rms_norm, _rms_norm_backward, _token_nll,
        _token_nll_backward,
    )
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("profile", "fuses"), [("cpu-gloo", False), ("h100-sxm", False), ("h100-sxm", True)]
)
def test_as_emitted(profile: str, dtype: torch.dtype, name: str, fuses: bool) -> None:
    torch.manual_seed(0)
    captured = capture(SAMPLES[name](dtype))
    call, mesh = op_call(captured.node, 2), (2,)
    cluster = Cluster.from_profile(profile, nodes=1, devices_per_node=2, mesh_shape=mesh)
    (chosen,) = (c for c in expand(call, mesh) if c.variants[0] in ("hidden", "vocab"))
    assert any(layout == (Shard(1),) for layout in chosen.inputs)
    (row,) = (row for row in rows_of(captured, 2) if row.variant == chosen.variants[0])
    parts = [
        distribute(x, layout, mesh)[1]
        for x, layout in zip(captured.operands, chosen.inputs, strict=True)
    ]
    graph = emit(captured, (row,), mesh, 1, parts)
    if fuses:
        fuse(graph, ALL, next(iter(graph.nodes)).meta["val"].fake_mode)
    ops = (n for n in graph.nodes if getattr(n.target, "namespace", "") != "_c10d_functional")
    emitted_s = sum(node_seconds(n, cluster.device) for n in ops if n.op == "call_function")
    (priced_s,) = Pricer(cluster, fuses=fuses).compute(call, [chosen])
    assert priced_s == pytest.approx(emitted_s, rel=0.1)
