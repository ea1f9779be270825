"""Picks and writes of as many rows as are known: exact, and an error where a mask has others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.runtime.lockstep import Strided
from autopar.tracer.trace import trace
from autopar.verification import whole_inputs

Way = Callable[[Tensor, Tensor, Tensor], Tensor]


def _put(x: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
    x[mask] = rows
    return x


def _add(x: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
    x[mask] += rows
    return x


def _put_elements(x: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
    x[mask.unsqueeze(-1).expand_as(x)] = rows.flatten()
    return x


def _put_at_places(x: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
    x[torch.where(mask)] = rows
    return x


def _copy_at_places(x: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
    return x.flatten(0, 1).index_copy(0, mask.flatten().nonzero().squeeze(-1), rows)


def _one_at_places(x: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
    x[torch.where(mask)] = rows[0]
    x[torch.where(mask)] += rows[1:2]
    return x


def _number_at_rows(x: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
    x[torch.where(mask & (mask.cumsum(1) == 1))[0]] = 0.5
    filled = x.flatten(0, 1).index_fill(0, mask.flatten().nonzero()[:, 0], 1.5)
    return filled * rows.mean()


def _joined(x: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
    return x[mask].sort(0).values * rows


def _looked_up(x: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
    sample, token = torch.where(mask)
    return x[sample, token] * rows + mask.nonzero()[:, 1:] * rows


def _selected(x: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
    return x.masked_select(mask.unsqueeze(-1)) * rows.flatten()


class Model(nn.Module):
    def __init__(self, way: Way) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(16, 8), nn.Linear(8, 8)
        self.way = way

    def forward(self, ids: Tensor, rows: Tensor) -> Tensor:
        found = self.way(self.table(ids).clone(), ids > 9, self.inner(rows))
        return found.tanh().square().sum()


COUNTED = [_put, _add, _put_elements, _put_at_places, _joined, _looked_up]
if torch.torch_version.TorchVersion(torch.__version__) >= "2.13":
    COUNTED.append(_copy_at_places)  # torch 2.11 and 2.12 cannot capture it
WAYS = (*COUNTED, _selected, _one_at_places, _number_at_rows)


def batch(count: int) -> tuple[Tensor, Tensor]:
    """Six rows, and ids of which a mask picks as many as asked."""
    ids = torch.tensor([[1, 2, 3, 10], [11, 2, 15, 0], [4, 5, 6, 7], [13, 14, 8, 9]])
    ids[0, : count - 5] = 12
    return ids, torch.randn(6, 8, dtype=torch.float64)


def model_of(way: Way) -> Model:
    torch.manual_seed(0)
    return Model(way).double()


@pytest.mark.parametrize("constraints", [{"tensor": "1d"}, {"data": 2}], ids=["tensor", "data"])
@pytest.mark.parametrize("way", WAYS)
def test_known_numbers_of_rows(way: Way, constraints: Any) -> None:
    model, inputs = model_of(way), batch(6)
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    plan = autopar.plan(model, cluster, inputs, constraints=constraints, cache=False)
    found = autopar.verify(plan, model, inputs)
    assert found.worst[1] < 1e-12, found.worst
    assert set(found.gradients) == {"table.weight", "inner.weight", "inner.bias"}


@pytest.mark.parametrize("count", [5, 7])
@pytest.mark.parametrize("way", COUNTED)
def test_another_number_of_rows_is_an_error(way: Way, count: int) -> None:
    model = model_of(way)
    with pytest.raises((IndexError, RuntimeError)):
        model(*batch(count))
    traced = trace(model, batch(6))
    whole = whole_inputs(traced, model, batch(count), seed=0)
    feed = [whole[n.name] for n in traced.graph.nodes if n.op == "placeholder"]
    with pytest.raises(IndexError, match=r"out of (range|bounds)"):
        Strided(traced.graph_module).run(*feed)
