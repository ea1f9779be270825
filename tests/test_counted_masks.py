"""Masks that select as many in each row, as models that restore masked patches take: by places."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import autopar
from autopar.tracer.trace import trace
from tests.dist import run_ranks


class Model(nn.Module):
    """Attends among visible patches, and restores the others."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, masked: Tensor) -> Tensor:
        seen = self.inner(x)[~masked].reshape(x.shape[0], -1, 8)
        if seen.shape[1] > 1:
            seen = F.scaled_dot_product_attention(seen, seen, seen)
        target = x[masked].reshape(x.shape[0], -1, 8)
        return F.mse_loss(self.outer(seen).mean(1, keepdim=True).expand_as(target), target)


X = torch.arange(96.0).sin().reshape(2, 6, 8)
MASKED = torch.tensor([[1, 0, 1, 0, 1, 1], [0, 1, 1, 1, 1, 0]]).bool()
UNEQUAL = torch.tensor([[1, 0, 1, 0, 1, 1], [0, 0, 1, 1, 1, 0]]).bool()


@pytest.mark.parametrize("constraints", [{"data": 2}, {"tensor": "1d"}])
def test_rows_are_found_by_places(constraints: Any) -> None:
    torch.manual_seed(0)
    model, inputs = Model().double(), (X.double(), MASKED)
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    with pytest.warns(autopar.errors.FrozenValueWarning, match="masks that select 4 of 12"):
        plan = autopar.plan(model, cluster, inputs, constraints=constraints, cache=False)
    found = autopar.verify(plan, model, inputs)
    assert found.worst[1] < 1e-12 and len(found.gradients) == 4, found.worst


def _other_masks(rank: int) -> tuple[list[float], int, str]:
    """How far steps for other masks are from one device; their number; of another count."""
    torch.manual_seed(0)
    single, x = Model().double(), X.double()
    parallel = autopar.parallelize(single, init_device_mesh("cpu", (2,)), (x, MASKED), cache=False)
    apart = []
    for masked in (MASKED, MASKED.flip(1), MASKED.roll(2, 1)):
        single.zero_grad()
        parallel.zero_grad()
        single(x, masked).backward()
        parallel(x, masked).backward()
        gradients = {n: p.grad.full_tensor() for n, p in parallel.named_parameters()}
        apart += [float(torch.dist(gradients[n], p.grad)) for n, p in single.named_parameters()]
    with pytest.raises(autopar.AutoparError) as caught:
        parallel(x, UNEQUAL)
    return apart, len(parallel._steps), str(caught.value)


def test_another_number_of_rows_is_an_error() -> None:
    for apart, steps, message in run_ranks(_other_masks, 2):
        assert max(apart) < 1e-12 and len(apart) == 12
        assert steps == 1
        assert "Give masks that select as many in each step" in message


@pytest.mark.parametrize("masked", [UNEQUAL, torch.zeros_like(MASKED), MASKED[:1]])
def test_numbers_that_change_with_each_batch_are_refused(masked: Tensor) -> None:
    with (
        warnings.catch_warnings(),
        pytest.raises(autopar.TraceError, match="The value of a tensor decides"),
    ):
        warnings.simplefilter("error", autopar.errors.FrozenValueWarning)
        trace(Model(), (X[: len(masked)], masked))
