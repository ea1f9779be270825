"""Losses that a script makes of some of a module's outputs, others in other steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from tests.dist import run_ranks


class Heads(nn.Module):
    """Two predictions from one body, and no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.first, self.second = nn.Linear(8, 4), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(x).tanh()
        return self.first(x), self.second(x)


def in_turn(rank: int, constraints: Any) -> tuple[list[set[str]], list[set[str]], float]:
    """Parameters without a gradient in each step, in parallel and alone; what weights differ by."""
    torch.manual_seed(0)
    single = Heads().double()
    x = torch.randn(8, 8, dtype=torch.float64)
    mesh = init_device_mesh("cpu", (2,))
    parallel = autopar.parallelize(copy.deepcopy(single), mesh, (x,), constraints=constraints)
    without: list[list[set[str]]] = []
    for model in (parallel, single):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        without.append([])
        for head in (1, 0, 1, 2):
            outputs = model(x)
            used = outputs[head : head + 1] if head < 2 else outputs
            sum(out.square().mean() for out in used).backward()
            without[-1].append({n for n, p in model.named_parameters() if p.grad is None})
            optimizer.step()
            optimizer.zero_grad()
    expected = dict(single.named_parameters())
    apart = max(
        float((p.full_tensor() - expected[n]).abs().max()) for n, p in parallel.named_parameters()
    )
    return without[0], without[1], apart


@pytest.mark.parametrize("constraints", [{"data": 2}, {"data": 2, "zero": 3}, {"tensor": "1d"}])
def test_parameters_behind_unused_outputs_have_no_gradient(constraints: Any) -> None:
    for found, expected, apart in run_ranks(in_turn, 2, constraints):
        assert found == expected
        assert expected[0] == {"first.weight", "first.bias"} and expected[3] == set()
        assert apart < 1e-12
