"""`train_step` runs the programs without autograd where no hook asks for it: equal gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from tests import zoo
from tests.dist import run_ranks


def _accumulates(rank: int, world: int) -> tuple[float, float, int]:
    """How far train_step is from backward: one step, two steps; and calls of a hook."""
    model, inputs = zoo.gpt2(dropout=0.0)
    parallel = autopar.parallelize(model.train(), init_device_mesh("cpu", (world,)), inputs)
    parameters = list(parallel.parameters())

    def apart(times: int) -> float:
        found = [
            torch.dist(p.grad.to_local(), times * g)
            for p, g in zip(parameters, expected, strict=True)
        ]
        return max(float(x) for x in found)

    assert parallel.compiled.at_once is not None
    parallel(**inputs).loss.backward()
    expected = [p.grad.to_local().clone() for p in parameters]
    parallel.zero_grad()
    parallel.train_step(**inputs)
    once = apart(1)
    calls: list[Tensor] = []
    handle = parameters[0].register_hook(calls.append)
    parallel.train_step(**inputs)  # by autograd, because of the hook
    handle.remove()
    return once, apart(2), len(calls)


def test_train_step_is_backward_with_and_without_autograd() -> None:
    for once, twice, calls in run_ranks(_accumulates, 2, 2):
        assert once < 1e-6 and twice < 1e-6 and calls == 1


class TwoBiases(nn.Module):
    """Its biases have one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.second = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x + (self.first + self.second)).square().sum()


def _scaled_apart(rank: int) -> list[float]:
    x = torch.arange(8, dtype=torch.float64).reshape(2, 4)
    parallel = autopar.parallelize(TwoBiases(), init_device_mesh("cpu", (1,)), (x,))
    parallel.train_step(x)
    first, second = (p.grad.to_local() for p in parallel.parameters())
    expected = second.clone()
    first.mul_(2.0)
    return [float(torch.dist(first, 2 * expected)), float(torch.dist(second, expected))]


def test_gradients_of_two_parameters_are_two_tensors() -> None:
    assert run_ranks(_scaled_apart, 1) == [[0.0, 0.0]]


class SeveralScalars(nn.Module):
    """A loss with a penalty in it, which is returned too, as routers of experts do."""

    def __init__(self, names: tuple[str, str]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(4, 4))
        self.names = names

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = torch.tanh(x @ self.weight)
        penalty = logits.abs().mean()
        values = (logits.square().mean() + 0.1 * penalty, penalty)
        return {"logits": logits, **dict(zip(self.names, values, strict=True))}


def _scalars(rank: int, size: int) -> tuple[float, str, str]:
    """How far train_step is from one device; what a sum with another scalar and no name say."""
    x = torch.arange(16, dtype=torch.float64).reshape(4, 4) / 16
    mesh = init_device_mesh("cpu", (2,))
    single = SeveralScalars(("loss", "penalty"))
    single(x)["loss"].backward()
    pins = {"pipeline": {"size": 1, "microbatches": size}} if size > 1 else {"data": 2}
    named = SeveralScalars(("loss", "penalty"))
    parallel = autopar.parallelize(named, mesh, (x,), constraints=pins)

    def apart() -> float:
        gradient = parallel.weight.grad.full_tensor()
        parallel.zero_grad()
        return float(torch.dist(gradient, single.weight.grad))

    parallel.train_step(x)
    found = [apart()]
    parallel(x)["loss"].backward()
    found.append(apart())
    messages = []
    if size == 1:
        output = parallel(x)
        with pytest.raises(autopar.AutoparError) as caught:
            (output["loss"] + output["penalty"]).backward()
        messages.append(str(caught.value))
        unnamed = autopar.parallelize(SeveralScalars(("total", "penalty")), mesh, (x,))
        with pytest.raises(autopar.AutoparError) as caught:
            unnamed.train_step(x)
        messages.append(str(caught.value))
        output = unnamed(x)  # as none is the loss, all have gradients
        (output["total"] + 2 * output["penalty"]).backward()
        single.weight.grad = None
        output = single(x)
        (output["loss"] + 2 * output["penalty"]).backward()
        found.append(float(torch.dist(unnamed.weight.grad.full_tensor(), single.weight.grad)))
    summed, nameless = messages or ["", ""]
    return max(found), summed, nameless


@pytest.mark.parametrize("microbatches", [1, 2])
def test_the_scalar_called_loss_is_trained_and_another_sum_is_refused(microbatches: int) -> None:
    for off, summed, unnamed in run_ranks(_scalars, 2, microbatches):
        assert off < 1e-12
        if microbatches == 1:
            assert "['penalty']" in summed and "['loss'] alone" in summed
            assert "output['total'], output['penalty']" in unnamed and "`loss`" in unnamed
