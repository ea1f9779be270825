"""What random programs (`tests.program_sweep`) have found: small models, compared with eager."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar
from tests.test_handwritten import plan_for


class Counting(nn.Module):
    """Copies numbers of another shape and dtype into its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("peak", torch.zeros(2))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("low", torch.zeros(8, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        with torch.no_grad():
            self.peak.copy_(y.amax())
            self.seen.copy_(y.gt(0).sum().double())
            self.low.copy_(y.mean((0, 1)))
        return y.square().mean()


class Wave(nn.Module):
    """Its parameter does not reach what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sin(x)


class Penalised(nn.Module):
    """Blocks of which only a penalty reads the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Wave() for _ in range(6))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        penalty = sum((block.weight.square().sum() for block in self.blocks), x.new_zeros(()))
        return self.head(x).square().mean() + penalty


def test_a_buffer_keeps_its_shape_and_dtype() -> None:
    torch.manual_seed(0)
    model = Counting()
    model.linear.double()
    model.peak = model.peak.double()
    inputs = {"x": torch.randn(4, 6, 8, dtype=torch.float64)}
    found = autopar.verify(plan_for(model, inputs, (2,), {"data": 2}), model, inputs)
    assert set(found.buffers) == {"peak", "seen", "low"}
    assert found.worst[1] < 1e-7, found.worst  # one is float32


def test_blocks_that_run_before_the_microbatches() -> None:
    torch.manual_seed(0)
    model = Penalised().double()
    inputs = {"x": torch.randn(4, 6, 8, dtype=torch.float64)}
    pins = {"pipeline": {"size": 1, "microbatches": 2}}
    found = autopar.verify(plan_for(model, inputs, (2,), pins), model, inputs)
    assert found.worst[1] < 1e-9, found.worst
    with pytest.raises(autopar.ConstraintError, match="nothing to run"):
        plan_for(model, inputs, (2,), {"pipeline": {"size": 2, "microbatches": 2}})
