"""Numbers that a forward changes or draws are constants of the program, and a warning says so."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.tracer.trace import trace

X = torch.randn(4, 8)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.step, self.kept, self.name = 3, 2.5, "inner"
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        self.last = self.linear(x)
        self.also = self.last + 1
        return self.last * self.step


class Drawing(nn.Module):
    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.linear, self.draw = nn.Linear(8, 8), draw

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.draw()).square().mean()


def texts(model: nn.Module) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trace(model, (X,), training=True)
    return [str(w.message) for w in caught if w.category is autopar.FrozenValueWarning]


def test_a_number_that_changes_is_named_and_put_back() -> None:
    model = nn.Sequential(Inner(), nn.Linear(8, 8))
    (text,) = texts(model)
    assert "0.step (3 to 4)" in text and "register_buffer" in text
    inner = model[0]
    assert isinstance(inner, Inner)
    assert (inner.step, inner.kept, inner.name) == (3, 2.5, "inner")
    assert inner.last is None and not hasattr(inner, "also")  # no value of the trace stays
    assert texts(model) == [text]


def test_a_failed_trace_leaves_nothing_behind() -> None:
    class Failing(Inner):
        def forward(self, x: Tensor) -> Tensor:
            found = super().forward(x)
            return found if float(found.sum()) > 0 else -found

    model = Failing()
    with pytest.raises(autopar.TraceError):
        trace(model, (X,), training=True)
    assert model.step == 3 and model.last is None


@pytest.mark.parametrize(
    ("draw", "word"),
    [(random.random, "Python's random"), (lambda: float(np.random.rand()), "numpy.random")],
)
def test_random_numbers_of_others_are_named(draw: Any, word: str) -> None:
    (text,) = texts(Drawing(draw))
    assert word in text and "torch.rand" in text


def test_nothing_is_said_of_other_models() -> None:
    assert not texts(Drawing(lambda: 2.0))
    assert not texts(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.1)))
