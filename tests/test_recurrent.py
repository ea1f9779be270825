"""Recurrent layers in float32, which oneDNN has kernels of its own for on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import TraceError
from autopar.tracer.trace import trace
from tests.test_handwritten import plan_for


class Recurrent(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)[0]
        return out.square().mean()


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp() if x.sum() > 0 else x


def _lstm(**options: Any) -> Recurrent:
    torch.manual_seed(0)
    return Recurrent(nn.LSTM(8, 16, batch_first=True, **options))


def _gru(**options: Any) -> Recurrent:
    torch.manual_seed(0)
    return Recurrent(nn.GRU(8, 16, batch_first=True, **options))


def _x(device: str = "cpu") -> Tensor:
    return torch.randn(8, 3, 8, generator=torch.Generator().manual_seed(1)).to(device)


@pytest.mark.parametrize("make", [_lstm, _gru])
@pytest.mark.parametrize("constraints", [{"data": 2}, {"tensor": {"mode": "1d", "size": 2}}])
def test_equals_the_plain_module_in_float32(make: Any, constraints: Any) -> None:
    model, x = make(bidirectional=True), _x()
    plan = plan_for(model, (x,), (2,), constraints)
    result = autopar.verify(plan, model, (x,))
    assert set(result.gradients) == {n for n, _ in model.named_parameters()}
    assert result.worst[1] < 1e-5, result.worst


@pytest.mark.parametrize(
    ("device", "training", "precision"),
    [("cpu", True, None), ("meta", True, None), ("cpu", False, None), ("meta", True, "bf16")],
)
def test_no_op_of_one_backend_is_in_the_graph(
    device: str, training: bool, precision: str | None
) -> None:
    model = _lstm(num_layers=2, dropout=0.1).to(device).train(training)
    graph = trace(model, (_x(device),), training=training, precision=precision).graph
    named = [str(n.target) for n in graph.nodes if n.op == "call_function"]
    assert not [n for n in named if "mkldnn" in n or "onednn" in n]


@pytest.mark.parametrize("enabled", [True, False])
def test_the_setting_of_the_caller_stays(enabled: bool) -> None:
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = enabled
    try:
        trace(_lstm(), (_x(),))
        assert torch.backends.mkldnn.enabled == enabled
        with pytest.raises(TraceError):
            trace(Branching(), (_x(),))
        assert torch.backends.mkldnn.enabled == enabled
    finally:
        torch.backends.mkldnn.enabled = before
