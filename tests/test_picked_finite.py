"""Rows that were not picked may hold anything, and none may be picked: gradients are eager ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar

BATCH, LENGTH, WIDTH = 4, 6, 5
Head = Callable[["Model", Tensor, Tensor, Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, head: Head) -> None:
        super().__init__()
        self.table = nn.Embedding(8, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.head = head

    def forward(self, ids: Tensor, mask: Tensor, values: Tensor) -> Tensor:
        found = self.head(self, self.table(ids), mask, values)
        # one device leaves out the gradients of what no picked row has met
        return found + sum(p.square().sum() for p in self.parameters())


def batch(picked: str) -> tuple[Tensor, Tensor, Tensor]:
    """Values are nan where they are not picked, as labels are that nobody knows."""
    torch.manual_seed(0)
    ids, mask = torch.randint(0, 8, (BATCH, LENGTH)), torch.randint(0, 2, (BATCH, LENGTH)) > 0
    if picked != "some":
        mask = torch.full_like(mask, picked == "all")
    values = torch.rand(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    return ids, mask, values.where(mask[..., None], torch.nan)


def _labels(m: Model, x: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    known = ~torch.isnan(values)
    return F.mse_loss(m.inner(x)[known], values[known], reduction="sum")


def _by_hand(m: Model, x: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    known = ~torch.isnan(values)
    return (m.inner(x)[known] - values[known]).square().sum() / known.sum().clamp(min=1)


def _features(m: Model, x: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    return m.inner(values[mask]).square().sum()


def _without_gradient(m: Model, x: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    with torch.no_grad():
        wanted = m.inner(values)
    other = F.linear(values, m.inner.weight.detach())
    return ((m.inner(x)[mask] - wanted[mask]) * other[mask] * m.inner(values).detach()[mask]).sum()


def _written(m: Model, x: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    out = torch.zeros_like(values)
    out[mask] = m.inner(values[mask])
    return out.square().sum()


def _shut_out(m: Model, x: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    """Rows whose scores are all -inf have no softmax."""
    scores = m.inner(x).masked_fill(~mask[..., None], -torch.inf)
    inner = m.inner(x)[mask].masked_fill(~mask[..., None].expand_as(x)[mask], -torch.inf)
    return ((scores.softmax(-1)[mask] + inner.softmax(-1)) * x[mask] * m.scale).sum()


def _logarithm(m: Model, x: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    """One minus any number that stands in for a picked one may be 0."""
    sure = torch.sigmoid(m.inner(x))[mask]
    return (m.scale * (sure.log() + (1 - sure).log())).sum()


def _quotient(m: Model, x: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    one, other = m.inner(x)[mask], values[mask]
    parts = torch.remainder((other * 8).long(), 1 + (other - 1).abs().ceil().long() * 2)
    return (m.scale * (one / other + parts)).sum()


def _centred(m: Model, x: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    """The mean of no rows is nan, which meets no rows."""
    rows = m.inner(x)[mask]
    return (rows - rows.mean(0, keepdim=True)).square().sum()


def _greater(m: Model, x: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    rows = torch.max(m.inner(x)[mask], m.inner.bias)
    return torch.min(rows, values[mask]).sum()


HEADS = [
    _labels,
    _by_hand,
    _features,
    _without_gradient,
    _written,
    _shut_out,
    _logarithm,
    _quotient,
    _centred,
    _greater,
]


@pytest.mark.parametrize("picked", ["some", "none", "all"])
@pytest.mark.parametrize("head", HEADS)
def test_gradients_are_those_of_picked_rows(head: Head, picked: str) -> None:
    torch.manual_seed(1)
    model, inputs = Model(head).double(), batch(picked)
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    plan = autopar.plan(model, cluster, inputs, constraints={"data": 2}, cache=False)
    found = autopar.verify(plan, model, inputs)
    assert found.worst[1] < 1e-12, found.worst
