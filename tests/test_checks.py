"""Checks of values in a forward: those that only raise are left out, with a warning.

PYTEST_DONT_REWRITE: pytest makes something else of an assert, here of those of models too.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.tracer import checks

CLASSES = 8
Head = Callable[["Model", Tensor, Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, head: Head) -> None:
        super().__init__()
        self.inner = nn.Linear(8, CLASSES)
        self.strict = True
        self.head = head

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.head(self, self.inner(x), labels)


def _maximum(model: Model, out: Tensor, labels: Tensor) -> Tensor:
    if labels is not None and labels.max() >= CLASSES:
        raise ValueError(f"labels must be below {CLASSES}")
    return F.cross_entropy(out, labels)


def _several(model: Model, out: Tensor, labels: Tensor) -> Tensor:
    assert (labels >= 0).all() and not (labels >= CLASSES).any(), "labels out of range"
    if model.strict and labels.max().item() >= CLASSES:
        raise IndexError
    if (
        labels is None
        or not 0 <= labels.min() < CLASSES
        or not torch.isfinite(out).all()
    ):  # fmt: skip
        text = "not finite"
        raise ValueError(text)
    if bool((labels < CLASSES).all()):
        out = out * 2
    else:
        raise ValueError
    torch._assert((labels < CLASSES).all(), "labels")
    return F.cross_entropy(out, labels)


def _gaussian(model: Model, out: Tensor, labels: Tensor) -> Tensor:
    """torch itself looks for negative variances."""
    return F.gaussian_nll_loss(out, out.detach() * 2, out.exp())


def _torch_checks(model: Model, out: Tensor, labels: Tensor) -> Tensor:
    """These leave assertions about unknown numbers and shapes in an exported graph."""
    torch._check_with(ValueError, labels.max().item() < CLASSES, lambda: "labels")
    rows = torch.unique_consecutive((labels >= 0).sum(0, keepdim=True))
    torch._check(rows.numel() == 1, lambda: "rows")
    return F.cross_entropy(out, labels)


def _caught_as_another(model: Model, out: Tensor, labels: Tensor) -> Tensor:
    try:
        return _maximum(model, out, labels)
    except KeyError:
        return out.mean()
    except ValueError as error:
        raise RuntimeError("bad batch") from error


def _of_each(model: Model, out: Tensor, labels: Tensor) -> Tensor:
    """A check of several values, each asked for by a function of Python's."""
    parts = labels.chunk(2)
    if not all(torch.equal(part, part.clamp(0, CLASSES - 1)) for part in parts):
        raise ValueError("labels")
    assert not any([part.max() >= CLASSES for part in parts])  # noqa: C419
    assert not torch.equal(labels, out)  # of another shape
    return F.cross_entropy(out, labels)


_MORE = [pytest.param(head, marks=pytest.mark.slow) for head in (_maximum, _gaussian)]


@pytest.mark.parametrize("head", [_several, _torch_checks, _caught_as_another, _of_each, *_MORE])
def test_the_step_is_that_of_one_device(head: Head) -> None:
    torch.manual_seed(0)
    model = Model(head).double()
    inputs = (torch.randn(8, 8, dtype=torch.float64), torch.randint(0, CLASSES, (8,)))
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    checks._warned.clear()
    with pytest.warns(autopar.UncheckedWarning, match=r"test_checks.py:\d+ in") as caught:
        plan = autopar.plan(model, cluster, inputs, constraints={"data": 2})
    lines = {str(w.message).splitlines()[0] for w in caught}
    assert len(lines) == len(caught)
    assert len(lines) >= 5 if head is _several else len(lines) == 1 + (head is _of_each)
    found = autopar.verify(plan, model, inputs)
    assert set(found.gradients) == {"inner.weight", "inner.bias"}
    assert found.worst[1] < 1e-9, found.worst
    if head not in (_gaussian, _torch_checks):
        with pytest.raises((AssertionError, RuntimeError, ValueError)):  # as ever, without a plan
            model(inputs[0], inputs[1] + CLASSES)


def _works(model: Model, out: Tensor, labels: Tensor) -> Tensor:
    if labels.max() >= CLASSES:
        out = out * 2
    return F.cross_entropy(out, labels)


def _caught(model: Model, out: Tensor, labels: Tensor) -> Tensor:
    try:
        return _maximum(model, out, labels)
    except (KeyError, ValueError):
        return out.mean()


def _suppressed(model: Model, out: Tensor, labels: Tensor) -> Tensor:
    with contextlib.suppress(ValueError):
        return _maximum(model, out, labels)
    return out.mean()


def _inside(model: Model, out: Tensor, labels: Tensor) -> Tensor:
    if (1 if labels.max() >= CLASSES else 2) == 1:
        raise ValueError
    return F.cross_entropy(out, labels)


def _one_of_two(model: Model, out: Tensor, labels: Tensor) -> Tensor:
    if labels.max() >= CLASSES:
        raise ValueError
    elif labels.min() > 0:  # noqa: RET506
        out = out * 2
    return F.cross_entropy(out, labels)


def _some(model: Model, out: Tensor, labels: Tensor) -> Tensor:
    if all(part.max() >= CLASSES for part in labels.chunk(2)):
        out = out * 2
    return F.cross_entropy(out, labels)


def _same(model: Model, out: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(out * 2 if torch.equal(labels, labels * 2) else out, labels)


@pytest.mark.parametrize("head", [_works, _caught, _suppressed, _inside, _one_of_two, _some, _same])
def test_a_branch_that_does_something_is_refused(head: Head) -> None:
    inputs: Any = (torch.randn(8, 8), torch.randint(0, CLASSES, (8,)))
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    with pytest.raises(autopar.TraceError, match=r"test_checks.py:\d+ in _") as caught:
        autopar.plan(Model(head), cluster, inputs, constraints={"data": 2})
    assert "if tensor: raise" in str(caught.value)


def test_truth_is_asked_as_before_once_the_model_is_traced() -> None:
    inputs: Any = (torch.randn(8, 8), torch.randint(0, CLASSES, (8,)))
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        autopar.plan(Model(_maximum), cluster, inputs, constraints={"data": 2})
    assert "__bool__" not in vars(torch.Tensor)
    assert torch.SymBool.__bool__.__module__ == "torch"
