"""Derivatives that a forward takes itself: those of one device, and the derivatives of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.errors import TraceError
from autopar.tracer.trace import trace

Forward = Callable[[nn.Module, Tensor], Tensor]
grad = torch.autograd.grad


class Taking(nn.Module):
    """`forward` of a small net of its own."""

    def __init__(self, take: Forward, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net = net or nn.Sequential(
            nn.Linear(4, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 16), nn.SiLU(), Head()
        )
        self.take = take

    def forward(self, x: Tensor) -> Tensor:
        return self.take(self.net, x)


class Head(nn.Linear):
    def __init__(self) -> None:
        super().__init__(16, 1)


def verified(model: nn.Module, inputs: Any, constraints: Any) -> autopar.Verification:
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    plan = autopar.plan(model, cluster, inputs, constraints=constraints, cache=False)
    return autopar.verify(plan, model, inputs)


def penalty(net: nn.Module, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_(True)
    out = net(x)
    (slope,) = grad(out, x, grad_outputs=torch.ones_like(out), create_graph=True)
    return out.mean() + 10 * (slope.norm(dim=-1) - 1).square().mean()


def equation(net: nn.Module, x: Tensor) -> Tensor:
    x.requires_grad = True
    u = net(x)
    slope = grad(u.sum(), x, create_graph=True)[0]
    curve = grad(slope[:, 0].sum(), x, create_graph=True)[0][:, 0]
    return (u.squeeze(-1) * slope[:, 1] - 0.1 * curve).square().mean()


def forces(net: nn.Module, x: Tensor) -> Tensor:
    with torch.enable_grad():
        places = x.clone().requires_grad_(True)
        energy = net(places).sum()
    return (grad([energy], [places], create_graph=True)[0] - x).square().mean() + energy


def adapted(net: nn.Module, x: Tensor) -> Tensor:
    weights = dict(net.named_parameters())
    slopes = grad(net(x).square().mean(), list(weights.values()), create_graph=True)
    steps = {k: w - 0.1 * d for (k, w), d in zip(weights.items(), slopes, strict=True)}
    return torch.func.functional_call(net, steps, (x,)).square().mean()


def guided(net: nn.Module, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    slope = grad(net(x).sum(), x)[0]  # a number: nothing of it has a gradient
    return net(x + slope).square().mean()


MICROBATCHES = {"pipeline": {"size": 1, "microbatches": 2}}


@pytest.mark.parametrize(
    ("take", "constraints"),
    [
        (penalty, {"data": 2}),
        (equation, {"data": 2}),
        (guided, {"data": 2}),
        (forces, MICROBATCHES),
    ],
)
def test_derivatives_by_inputs(take: Forward, constraints: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 4).double()
    found = verified(Taking(take).double(), (x,), constraints)
    assert found.gradients and found.worst[1] < 1e-9 and not x.requires_grad


@pytest.mark.parametrize("constraints", [{"data": 2}, {"tensor": {"mode": "1d", "size": 2}}])
def test_derivatives_by_parameters(constraints: Any) -> None:
    torch.manual_seed(0)
    found = verified(Taking(adapted).double(), (torch.randn(8, 4).double(),), constraints)
    assert found.worst[1] < 1e-9


def test_a_derivative_without_training() -> None:
    torch.manual_seed(0)
    model, x = Taking(forces).double().eval(), torch.randn(8, 4).double()
    traced = trace(model, (x,), training=False)
    assert not traced.training
    assert verified(model, (x,), {"data": 2}).worst[1] < 1e-9


def early(net: nn.Module, x: Tensor) -> Tensor:
    before = x.square()
    x.requires_grad_(True)
    return grad((net(x) * before).sum(), x, create_graph=True)[0].square().mean()


def unused(net: nn.Module, x: Tensor) -> Tensor:
    other = torch.zeros_like(x).requires_grad_(True)
    found = grad(net(x).sum(), other, create_graph=True, allow_unused=True)[0]
    return net(x).sum() if found is None else found.sum()


def batched(net: nn.Module, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_(True)
    seeds = torch.eye(8).unsqueeze(-1)
    return grad(net(x), x, seeds, is_grads_batched=True, create_graph=True)[0].square().mean()


def backward(net: nn.Module, x: Tensor) -> Tensor:
    out = net(x).mean()
    out.backward(retain_graph=True)
    return out


def attention(net: nn.Module, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_(True)
    heads = net[0](x).view(8, 1, 4, 4)
    found = F.scaled_dot_product_attention(heads, heads, heads)
    return grad(found.sum(), x, create_graph=True)[0].square().mean()


@pytest.mark.parametrize(
    ("take", "words"),
    [
        (early, "read before requires_grad_"),
        (unused, "is None"),
        (batched, "is_grads_batched"),
        (backward, "calls backward"),
        (attention, "attention"),
    ],
)
def test_what_would_be_another_number_is_refused(take: Forward, words: str) -> None:
    with pytest.raises(TraceError, match=words) as caught:
        trace(Taking(take), (torch.randn(8, 4),), training=True)
    assert "test_derivatives.py" in str(caught.value) or take is attention
