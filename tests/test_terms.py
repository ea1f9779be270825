"""Terms of a loss that no input reaches, in microbatches: each adds its share of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar

Term = Callable[["Model", Tensor], Tensor]


class Model(nn.Module):
    shift: Tensor

    def __init__(self, term: Term) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.log_variance = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("shift", torch.tensor(0.3))
        self.term = term

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.term(self, F.mse_loss(self.second(self.first(x).tanh()), target))


def _numbers(model: Model, loss: Tensor) -> Tensor:
    return 1 - (sum([loss * 0.5 + 0.1, loss]) - model.shift) * 2  # type: ignore[no-any-return]


def _penalty(model: Model, loss: Tensor) -> Tensor:
    """Of a weight that the loss reads too."""
    return loss + 0.01 * model.first.weight.square().sum()


def _uncertain(model: Model, loss: Tensor) -> Tensor:
    """A learned weight of the loss, whose gradient has a share that no input reaches."""
    return loss * torch.exp(-model.log_variance) + model.log_variance


def _apart(model: Model, loss: Tensor) -> Tensor:
    """A parameter that the data does not reach."""
    return loss + model.log_variance.square() + model.log_variance


@pytest.mark.parametrize(
    "constraints",
    [
        pytest.param({"pipeline": {"size": 1, "microbatches": 4}}, marks=pytest.mark.slow),
        {"pipeline": {"size": 2, "microbatches": 4, "cuts": ["second"]}},
        pytest.param(
            {"data": 2, "pipeline": {"size": 1, "microbatches": 2}}, marks=pytest.mark.slow
        ),
    ],
    ids=["turns", "pipeline", "data"],
)
@pytest.mark.parametrize("term", [_numbers, _penalty, _uncertain, _apart])
def test_terms_beside_a_mean(term: Term, constraints: Any) -> None:
    torch.manual_seed(0)
    model = Model(term).double()
    inputs = tuple(torch.randn(8, 8, dtype=torch.float64) for _ in range(2))
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    plan = autopar.plan(model, cluster, inputs, constraints=constraints)
    assert plan.pipeline is not None and plan.pipeline.microbatches > 1
    found = autopar.verify(plan, model, inputs)
    assert ("log_variance" in found.gradients) == (term in (_uncertain, _apart))
    assert found.worst[1] < 1e-12, found.worst


def test_a_term_that_is_no_sum_is_refused() -> None:
    """The square of a mean is not a sum over microbatches."""
    model = Model(lambda model, loss: (loss + model.shift).square())
    inputs = tuple(torch.randn(8, 8) for _ in range(2))
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    constraints = {"pipeline": {"size": 1, "microbatches": 4}}
    with pytest.raises(autopar.ConstraintError, match=r"whole batch: it reads aten\.add\.Tensor"):
        autopar.plan(model, cluster, inputs, constraints=constraints)
