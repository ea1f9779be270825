"""What a forward computes and drops is left out of the program."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar


class Model(nn.Module):
    def __init__(self, beside: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 4)
        self.beside = beside

    def forward(self, x: Tensor, y: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        out = self.inner(x)
        F.cross_entropy(out, y)
        return (out, y) if self.beside else out


@pytest.mark.parametrize("beside", [False, True])
def test_a_dropped_loss_of_what_is_returned(beside: bool) -> None:
    model = Model(beside).double()
    inputs = (torch.randn(8, 16, dtype=torch.float64), torch.randint(0, 4, (8,)))
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    plan = autopar.plan(model, cluster, inputs, constraints={"data": 2}, cache=False)
    assert not any("nll" in op.name or "entropy" in op.name for op in plan.predicted.timeline.ops)
    found = autopar.verify(plan, model, inputs)
    assert found.worst[1] < 1e-12, found.worst
