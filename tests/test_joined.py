"""Heads that are concatenated onto the batch: split over ranks and microbatches all the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from tests.test_handwritten import plan_for


class Attending(nn.Module):
    """A block of a Set Transformer (Lee et al. 2019, arXiv 1810.00825), with a layer per head."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.mixed, self.out = nn.Linear(8 // heads, 8 // heads), nn.Linear(8, 8)
        self.width = 8 // heads

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = (
            torch.cat(part.split(self.width, 2), 0)
            for part in (self.query(x), self.key(y), self.value(y))
        )
        weights = torch.softmax(q.bmm(k.transpose(1, 2)) / 8**0.5, 2)
        heads = self.mixed(q + weights.bmm(v))
        joined = torch.cat(heads.split(x.size(0), 0), 2)
        return joined + F.relu(self.out(joined))


class Pooled(nn.Module):
    """Two blocks, the first with learned queries."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.inducing = nn.Parameter(torch.randn(1, 4, 8))
        self.first, self.second = Attending(heads), Attending(heads)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        hidden = self.first(self.inducing.repeat(x.size(0), 1, 1), x)
        return F.cross_entropy(self.head(self.second(x, hidden).mean(1)), target)


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize(
    ("mesh", "constraints"),
    [
        ((2,), {"data": 2}),
        ((2,), {"tensor": {"mode": "1d", "size": 2}}),
        ((1,), {"pipeline": {"size": 1, "microbatches": 4}}),
        ((2,), {"data": 2, "pipeline": {"size": 1, "microbatches": 2}}),
    ],
)
def test_heads_on_the_batch_are_split_with_it(
    heads: int, mesh: tuple[int, ...], constraints: Any
) -> None:
    torch.manual_seed(0)
    model = Pooled(heads).double()
    inputs = torch.randn(8, 6, 8, dtype=torch.float64), torch.randint(0, 3, (8,))
    plan = plan_for(model, inputs, mesh, constraints)
    found = autopar.verify(plan, model, inputs)
    assert found.worst[1] < 1e-9, found.worst
    if "tensor" not in constraints:  # gradients alone are sent, and the numbers of the loss
        activations = 8 * 6 * 8 * 8
        assert all(
            row.num_bytes < activations / 4
            for row in plan.predicted.comm_bytes
            if row.kind != "all_reduce"
        )


class Masked(nn.Module):
    """Heads on the batch beside an input that is joined alike, and beside positions in it."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        heads = torch.cat(self.read(x).split(4, -1), 0).tanh()
        masks = torch.cat([mask, 2 * mask + mask.mean()], 0)
        places = torch.linspace(0, 1, heads.size(0), dtype=x.dtype)
        return (heads * (masks + places)[:, None, None]).square().mean()


@pytest.mark.parametrize("devices", [1, 2])
def test_what_stands_beside_joined_heads_is_cut_as_they_are(devices: int) -> None:
    """Each microbatch takes its rows of every head: those in a row were taken."""
    torch.manual_seed(0)
    model = Masked().double()
    inputs = torch.randn(8, 3, 8, dtype=torch.float64), torch.rand(8, dtype=torch.float64)
    pins: dict[str, Any] = {"pipeline": {"size": 1, "microbatches": 2}}
    if devices > 1:
        pins["data"] = devices
    plan = plan_for(model, inputs, (devices,), pins)
    found = autopar.verify(plan, model, inputs)
    assert found.worst[1] < 1e-12, found.worst
