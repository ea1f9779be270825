"""Attention masks that are constants: dropped, or said as `is_causal`; others stay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.tracer.trace import trace

LENGTH = 6
attention = torch.ops.autopar.attention.default


def _everything(positions: Tensor) -> Tensor:
    return (positions[:, None] >= 0).expand(2, 1, LENGTH, LENGTH)


def _causal(positions: Tensor) -> Tensor:
    return (positions[:, None] >= positions[None, :])[None, None].expand(2, 1, -1, -1)


def _window(positions: Tensor) -> Tensor:
    return (positions[:, None] - positions[None, :]).abs()[None, None] < 3


def _anticausal(positions: Tensor) -> Tensor:
    return positions[:, None] <= positions[None, :]


MASKS = {"everything": _everything, "causal": _causal, "window": _window, "anti": _anticausal}


class Attends(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.proj = nn.Linear(8, 8)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        mask = MASKS[self.kind](torch.arange(LENGTH, device=x.device))
        if lengths is not None:
            mask = mask & (torch.arange(LENGTH) < lengths[:, None])[:, None, None, :]
        heads = self.proj(x).view(2, LENGTH, 2, 4).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask).square().sum()


@pytest.mark.parametrize(
    ("kind", "masked", "causal"),
    [
        ("everything", False, False),
        ("causal", False, True),
        ("window", True, False),
        ("anti", True, False),
    ],
)
def test_a_constant_mask_is_said_in_arguments(kind: str, masked: bool, causal: bool) -> None:
    graph = trace(Attends(kind), (torch.randn(2, LENGTH, 8),)).graph
    (call,) = (node for node in graph.nodes if node.target is attention)
    assert (call.args[3] is not None, call.args[4]) == (masked, causal)
    if not masked:
        assert not any(node.target is torch.ops.aten.arange.default for node in graph.nodes)


def test_a_mask_of_an_input_stays() -> None:
    inputs = (torch.randn(2, LENGTH, 8), torch.tensor([6, 6]))
    graph = trace(Attends("causal"), inputs).graph
    (call,) = (node for node in graph.nodes if node.target is attention)
    assert call.args[3] is not None and call.args[4] is False
