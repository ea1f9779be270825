"""Tensor parallelism in blocks that hold a depthwise convolution: by its channels."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar


class Mixer(nn.Module):
    """Blocks that widen, convolve each channel along the sequence, gate and narrow."""

    def __init__(self, width: int = 8, blocks: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "up": nn.Linear(width, 2 * width),
                    "mix": nn.Conv1d(2 * width, 2 * width, 3, padding=1, groups=2 * width),
                    "down": nn.Linear(2 * width, width),
                }
            )
            for _ in range(blocks)
        )

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            wide = layer["mix"](layer["up"](x).transpose(1, 2)).transpose(1, 2)
            x = x + layer["down"](F.silu(wide))
        return F.mse_loss(x, target)


def test_a_depthwise_convolution_is_split_by_channels() -> None:
    torch.manual_seed(0)
    model = Mixer().double()
    inputs = tuple(torch.randn(4, 6, 8, dtype=torch.float64) for _ in range(2))
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    constraints = {"tensor": {"mode": "1d"}, "params": {"*.mix.weight": "S0"}}
    plan = autopar.plan(model, cluster, inputs, constraints=constraints)
    assert autopar.verify(plan, model, inputs).worst[1] < 1e-9
    # channels stay with their rank between the two linears
    assert "all_to_all" not in {c.kind for c in plan.predicted.comm_bytes}
