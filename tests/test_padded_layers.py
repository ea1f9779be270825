"""Encoder layers on padded batches, whose padding torch drops where there are no gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from tests.test_handwritten import plan_for

_LENGTHS = torch.tensor([6, 5, 4, 3, 6, 2, 6, 1])


class Encoder(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(8), **options)
        self.out = nn.Linear(8, 5)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        return self.out(self.layers(x, src_key_padding_mask=hidden))  # type: ignore[no-any-return]


class Pooled(Encoder):
    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        return super().forward(x, hidden).square().mean()


def _inputs(behind: bool) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.arange(6) >= _LENGTHS[:, None]
    return torch.randn(8, 6, 8).double(), hidden if behind else hidden.flip(1)


@pytest.mark.parametrize(
    ("options", "behind"),
    [
        ({}, True),
        ({}, False),
        ({"mask_check": False}, True),
        ({"enable_nested_tensor": False}, True),
    ],
)
def test_an_encoder_without_gradients_leaves_zeros(options: dict[str, Any], behind: bool) -> None:
    inputs, model = _inputs(behind), Encoder(**options).double().eval()
    plan = plan_for(model, inputs, (2,), {"data": 2}, training=False)
    result = autopar.verify(plan, model, inputs)
    assert result.worst[1] < 1e-9, result.worst


@pytest.mark.parametrize("frozen", [True, False])
def test_an_encoder_in_a_model_that_trains(frozen: bool) -> None:
    inputs, model = _inputs(True), Pooled().double()
    model.layers.eval().requires_grad_(not frozen)
    plan = plan_for(model, inputs, (2,), {"data": 2})
    result = autopar.verify(plan, model, inputs)
    assert result.worst[1] < 1e-9, result.worst
