"""Parameters that a forward reads past their module are the model's, or are named."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.errors import TraceError
from autopar.tracer.trace import trace
from tests.test_handwritten import plan_for

HIDDEN = nn.Linear(8, 8).double()


class Reading(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(8, 8).double(), nn.Linear(8, 8).double()
        self.norm = nn.BatchNorm1d(8).double()
        self.how = how
        self.listed = [self.inner.weight, self.head.bias]
        self.detached = self.inner.weight.detach()
        self.by_name = {"weight": self.inner.weight.detach(), "mean": self.norm.running_mean}
        self.part = self.inner.weight.detach()[:4]
        self.hidden = [HIDDEN]

    def forward(self, x: Tensor) -> Tensor:
        rows = self.head(self.norm(self.inner(x)))
        return rows.square().mean() + getattr(self, self.how)(x)

    def a_list(self, x: Tensor) -> Any:
        return sum(w.square().sum() for w in self.listed)

    def an_attribute(self, x: Tensor) -> Any:
        return (F.linear(x, self.detached) * self.inner(x)).mean()

    def attribute_and_list(self, x: Tensor) -> Any:
        return self.a_list(x) + self.an_attribute(x)

    def a_buffer(self, x: Tensor) -> Any:
        return (self.inner(x) * self.by_name["mean"]).mean()

    def without_gradients(self, x: Tensor) -> Any:
        with torch.no_grad():
            target = F.linear(x, self.listed[0])
        return F.mse_loss(self.head(x), target)

    def both(self, x: Tensor) -> Any:
        return self.listed[0].square().sum() + (self.by_name["weight"] * self.inner.weight).sum()

    def a_part(self, x: Tensor) -> Any:
        return self.part.square().sum()

    def of_others(self, x: Tensor) -> Any:
        with torch.no_grad():
            target = self.hidden[0](x)
        return F.mse_loss(self.inner(x), target)


def texts(model: nn.Module, x: Tensor) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trace(model, (x,), training=True)
    return [str(w.message) for w in caught if w.category is autopar.FrozenValueWarning]


@pytest.mark.parametrize(
    "how", ["a_list", "an_attribute", "attribute_and_list", "a_buffer", "without_gradients"]
)
@pytest.mark.parametrize(
    "constraints", [{"data": 2, "zero": 3}, {"tensor": {"mode": "1d", "size": 2}}]
)
def test_what_is_read_past_a_module_is_its_parameter(how: str, constraints: Any) -> None:
    torch.manual_seed(0)
    model, given = Reading(how), (torch.randn(8, 8).double(),)
    plan = plan_for(model, given, (2,), constraints)
    traced = trace(model, given, training=True)
    with torch.no_grad():  # as an optimizer does between the steps
        for parameter in model.parameters():
            parameter.mul_(1.5)
    found = autopar.verify(plan, model, given, traced=traced)
    assert found.worst[1] < 1e-9, found.worst
    assert len(found.gradients) == 6 and texts(model, given[0]) == []


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("both", r"test_outside_tensors.*listed(.|\n)*inner\.weight is read both as a parameter"),
        ("a_part", r"shape \(4, 8\) was made of inner\.weight before the forward"),
    ],
)
def test_what_cannot_be_told_apart_is_refused(how: str, said: str) -> None:
    with pytest.raises(TraceError, match=said):
        trace(Reading(how), (torch.randn(8, 8).double(),), training=True)


def test_a_parameter_of_no_part_of_the_model_is_named() -> None:
    found = texts(Reading("of_others"), torch.randn(8, 8).double())
    assert len(found) == 2 and all("test_outside_tensors.py" in text for text in found)
    assert "shape (8, 8)" in found[0] and "nn.ModuleList" in found[0]


class Tied(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(8, 8), nn.Linear(8, 8, bias=False)
        if how == "data":
            self.head.weight.data = self.table.weight.data
        elif how == "buffer":
            self.register_buffer("average", self.head.weight.data)
        else:
            self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x)).square().mean()


def test_two_tensors_of_one_memory_are_refused() -> None:
    ids = torch.arange(8)
    with pytest.raises(TraceError, match=r"table\.weight and head\.weight share their memory"):
        trace(Tied("data"), (ids,), training=True)
    with pytest.raises(TraceError, match=r"head\.weight and average share.*clone"):
        trace(Tied("buffer"), (ids,), training=True)
    trace(Tied("one"), (ids,), training=True)
    with torch.device("meta"):
        trace(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), (torch.empty(8, 8),), training=True)
