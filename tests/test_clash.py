"""A step whose ops no combination of placements connects: the error says at which op."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.core.placement import Partial
from autopar.core.strategy import AxisStrategy, OpCall
from autopar.cost_model import Cluster
from autopar.errors import ConstraintError
from autopar.solver.rules import registry

CLUSTER = Cluster.from_profile("h100-sxm", devices_per_node=2)


class Chain(nn.Module):
    """Products and ops of which `erf` is the one that cannot follow those before it."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.before = nn.Sequential(*(nn.Linear(8, 8) for _ in range(depth)))
        self.after = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x).relu()
        h = torch.erf(h)  # here
        return self.after(h).square().sum()


@pytest.mark.parametrize("depth", [1, 5])
def test_the_op_that_nothing_connects_is_named(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def of_sums_alone(call: OpCall) -> list[AxisStrategy]:
        return [AxisStrategy((Partial(),), (Partial(),))]

    monkeypatch.setitem(registry._RULES, torch.ops.aten.erf.default, of_sums_alone)
    with pytest.raises(ConstraintError) as raised:
        autopar.plan(
            Chain(depth), CLUSTER, (torch.randn(4, 8),), constraints={"data": 2}, cache=False
        )
    told = str(raised.value)
    assert "data 2 on mesh" in told
    assert "aten.erf.default" in told
    assert "[4, 8]" in told
    assert "test_clash.py" in told
