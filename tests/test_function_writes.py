"""Autograd functions that write to what they are given: the numbers of one device, or a reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.tracer.trace import trace


class Doubled(torch.autograd.Function):
    """Doubles in place; its gradient is another than that of its ops."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


class InPlace(nn.Module):
    def __init__(self, read: str) -> None:
        super().__init__()
        self.first, self.last, self.read = nn.Linear(8, 8), nn.Linear(8, 4), read

    def forward(self, x: Tensor) -> Tensor:
        given = self.first(x).clone()
        result = Doubled.apply(given)
        read = {"given": given, "result": result, "both": given + result}[self.read]
        return self.last(read).square().mean()


@pytest.mark.parametrize("read", ["given", "result", "both"])
def test_a_function_that_works_in_place(read: str) -> None:
    torch.manual_seed(0)
    model, x = InPlace(read).double(), torch.randn(8, 8, dtype=torch.float64)
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    plan = autopar.plan(model, cluster, x, constraints={"data": 2})
    found = autopar.verify(plan, model, x)
    assert found.worst[1] < 1e-9 and len(found.gradients) == 4


class Observed(torch.autograd.Function):
    """Keeps the largest value, or the largest gradient, in a buffer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, largest: Tensor, phase: str) -> Tensor:
        ctx.largest, ctx.phase = largest, phase
        if phase == "forward":
            largest.mul_(0.9).add_(x.abs().amax(), alpha=0.1)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.phase == "backward":
            ctx.largest.copy_(grad.abs().amax())
        return grad, None, None


class Observing(nn.Module):
    def __init__(self, phase: str) -> None:
        super().__init__()
        self.linear, self.phase = nn.Linear(8, 8), phase
        self.register_buffer("largest", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return Observed.apply(self.linear(x), self.largest, self.phase).square().mean()


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_function_that_writes_to_a_buffer_is_refused(phase: str) -> None:
    text = f"the {phase} of the autograd function Observed writes to a tensor of shape"
    with pytest.raises(autopar.TraceError, match=text):
        trace(Observing(phase), (torch.randn(4, 8),))


def test_one_that_writes_nowhere_is_not() -> None:
    assert trace(Observing("neither"), (torch.randn(4, 8),)).loss_index == 0


class Squared(torch.autograd.Function):
    """Its backward gives ops the memory for their results."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        found = torch.zeros_like(grad)
        found[:2] = 2 * grad[:2] * x[:2]
        torch.mul(2 * grad[2:], x[2:], out=found[2:])
        return found


class OfSquares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = Squared.apply(self.first(x)).sum()
        return total


def test_a_result_written_to_a_part_of_a_gradient_arrives() -> None:
    model, inputs = OfSquares().double(), (torch.randn(4, 8).double(),)
    cluster = autopar.Cluster.from_profile("cpu-gloo", nodes=1, devices_per_node=2)
    plan = autopar.plan(model, cluster, inputs, constraints={"data": 2}, cache=False)
    assert autopar.verify(plan, model, inputs).worst[1] < 1e-9
