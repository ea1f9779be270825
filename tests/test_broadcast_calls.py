"""Calls whose operands broadcast: the step has the numbers of one device, however it is split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar

Call = Callable[..., Tensor]


def _heads(x: Tensor, count: int = 2) -> Tensor:
    """(8, 4, 8) -> (8, heads, 4, 8 / heads)."""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def _keys_of_one_head(x: Tensor, values: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(_heads(x), _heads(x)[:, :1], values)


def _shared_keys(x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(_heads(x), keys, values)


def _shared_queries(x: Tensor, queries: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(queries, _heads(x), _heads(x))


def _grouped(x: Tensor, keys: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(_heads(x, 4), keys, keys, enable_gqa=True)


def _grouped_unlike(x: Tensor, keys: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(_heads(x, 4), keys[:, :1], keys, enable_gqa=True)


def _without_bias(x: Tensor, weight: Tensor) -> Tensor:
    nothing = torch.full((), float("nan"), dtype=x.dtype)
    return torch.addmm(nothing, x.flatten(0, 1), weight, beta=0)


def _solved(x: Tensor, right: Tensor) -> Tensor:
    return torch.linalg.solve(x[..., :4] + 9 * torch.eye(4, dtype=x.dtype), right)


# the call on (8, 4, 8), and the shapes of the parameters that it is given
CALLS: dict[str, tuple[Call, list[tuple[int, ...]]]] = {
    "keys of one head": (_keys_of_one_head, [(8, 2, 4, 4)]),
    "keys and values of one sample": (_shared_keys, [(1, 2, 6, 4), (1, 2, 6, 4)]),
    "values of one head": (_shared_keys, [(8, 2, 6, 4), (8, 1, 6, 4)]),
    "queries of one sample": (_shared_queries, [(1, 2, 3, 4)]),
    "queries of one head": (_shared_queries, [(8, 1, 3, 4)]),
    "queries without a batch": (_shared_queries, [(2, 3, 4)]),
    "groups with keys of one sample": (_grouped, [(1, 2, 3, 2)]),
    "groups with fewer keys than values": (_grouped_unlike, [(8, 2, 3, 2)]),
    "distances to one list": (torch.cdist, [(5, 8)]),
    "other distances to one list": (lambda x, y: torch.cdist(x, y, p=1.0), [(5, 8)]),
    "distances to three lists": (lambda x, y: torch.cdist(x.unsqueeze(1), y), [(3, 5, 8)]),
    "bias of products": (lambda x, b: torch.baddbmm(b, x, x.mT), [(4,)]),
    "no bias": (_without_bias, [(8, 5)]),
    "a vector for each matrix": (_solved, [(8, 4)]),
    "a mean of a number": (lambda x: x.sum().mean(-1) + x.mean().var(-1, correction=0), []),
}


class Net(nn.Module):
    def __init__(self, call: Call, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.call = call
        self.linear = nn.Linear(8, 8)
        self.given = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.linear(x), *self.given).square().mean()


@pytest.mark.parametrize("constraints", [{"data": 2}, {"tensor": {"mode": "1d", "size": 2}}])
@pytest.mark.parametrize("name", CALLS)
def test_broadcast_operands(name: str, constraints: Any) -> None:
    torch.manual_seed(0)
    model = Net(*CALLS[name]).double().train()
    inputs = (torch.randn(8, 4, 8, dtype=torch.float64),)
    cluster = autopar.Cluster.from_profile("cpu-gloo", nodes=1, devices_per_node=2)
    plan = autopar.plan(model, cluster, inputs, constraints=constraints, cache=False)
    assert autopar.verify(plan, model, inputs).worst[1] < 1e-9
