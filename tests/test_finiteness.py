"""Branches on whether all values are finite: traced as if they were, where others are clamped."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.tracer import checks

Layer = Callable[["Model", Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self, self.inner(x)).square().mean()


def _detr(model: Model, x: Tensor) -> Tensor:
    if model.training:
        if not torch.isfinite(x).all():
            largest = torch.finfo(x.dtype).max - 1000
            x = torch.clamp(x, min=-largest, max=largest)
    return x.tanh()


def _either(model: Model, x: Tensor) -> Tensor:
    if torch.isinf(x).any() or x.isnan().any():
        x = x.nan_to_num(0.0)
    return x.tanh()


def _otherwise(model: Model, x: Tensor) -> Tensor:
    if x.dtype.is_floating_point and x.isfinite().all():
        x = x * 2
    else:
        x.clamp_(-1.0, 1.0)
    return x.tanh()


@pytest.mark.parametrize("layer", [_detr, _either, _otherwise])
def test_the_step_is_that_of_one_device(layer: Layer) -> None:
    torch.manual_seed(0)
    model = Model(layer).double()
    inputs = (torch.randn(8, 8, dtype=torch.float64),)
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    checks._warned.clear()
    with pytest.warns(autopar.UncheckedWarning, match="asks whether values are finite"):
        plan = autopar.plan(model, cluster, inputs, constraints={"data": 2})
    found = autopar.verify(plan, model, inputs)
    assert found.worst[1] < 1e-12, found.worst


def _leaves_out(model: Model, x: Tensor) -> Tensor:
    if not torch.isfinite(x).all():
        x = torch.zeros_like(x)
    return x.tanh()


def _clamps_another(model: Model, x: Tensor) -> Tensor:
    y = x.sin()
    if torch.isinf(x).any():
        y = y.clamp(-0.5, 0.5)
    return y


def _of_another(model: Model, x: Tensor) -> Tensor:
    y = x.sin()
    if torch.isinf(x).any():
        x = y.clamp(x)
    return x


def _sets_what_is_read(model: Model, x: Tensor) -> Tensor:
    factor = 1.0
    if torch.isinf(x).any():
        factor = torch.finfo(x.dtype).eps
        x = x.clamp(-1.0, 1.0)
    return x * factor


def _returns(model: Model, x: Tensor) -> Tensor:
    if torch.isfinite(x).all():
        return x.tanh()
    else:  # noqa: RET505
        x = x.clamp(-1.0, 1.0)
    return x.sin()


def _does_more(model: Model, x: Tensor) -> Tensor:
    if torch.isnan(x).any():
        x = x.nan_to_num()
        model.layer = _detr
    return x


def _skips(model: Model, x: Tensor) -> Tensor:
    if torch.isfinite(x).all():
        x = x.tanh()
    return x


@pytest.mark.parametrize(
    "layer",
    [_leaves_out, _clamps_another, _of_another, _sets_what_is_read, _returns, _does_more, _skips],
)
def test_a_branch_that_does_more_than_to_clamp_is_refused(layer: Layer) -> None:
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    with pytest.raises(autopar.TraceError, match=f"in {layer.__name__}"):
        autopar.plan(Model(layer), cluster, (torch.randn(8, 8),))
