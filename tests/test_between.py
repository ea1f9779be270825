"""What a forward hands on stays as it was when buffers are written, and no user's write is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import autopar
from tests.dist import run_ranks


class Queued(nn.Module):
    """Reads buffers and then updates them, two of them with each other's old values."""

    def __init__(self) -> None:
        super().__init__()
        start = torch.arange(1.0, 9.0, dtype=torch.float64)
        self.weight = nn.Parameter(start.reshape(2, 4) / 8)
        self.register_buffer("temperature", torch.full((4,), 2.0, dtype=torch.float64))
        self.register_buffer("new", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("old", torch.ones(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        before = self.temperature.clone()
        rows = x @ self.weight * before + self.new.clone() * self.weight.sum()
        self.temperature.add_(0.5)
        new = self.old.clone()
        self.old.copy_(self.new)
        self.new.copy_(new)
        return rows.square().mean(), before


def _steps(rank: int, pins: dict[str, Any], whole: bool) -> list[float]:
    """Differences from one device after three steps, of results, gradients and buffers."""
    x = torch.arange(8, dtype=torch.float64).reshape(4, 2) / 8
    single = Queued()
    parallel = autopar.parallelize(
        Queued(), init_device_mesh("cpu", (2,)), (x,), constraints=pins, cache=False
    )
    found = []
    for _ in range(3):
        loss, before = single(x)
        loss.backward()
        if whole:
            result, told = parallel.train_step(x), before
        else:
            result, told = parallel(x)
            result.backward()
        found.append(torch.dist(result, loss))
        if told is not None:  # beside the loss, a step in microbatches returns nothing
            found.append(torch.dist(told, before))
        found.append(torch.dist(parallel.weight.grad.full_tensor(), single.weight.grad))
        found += [torch.dist(parallel.get_buffer(n), b) for n, b in single.named_buffers()]
    return [float(x) for x in found]


@pytest.mark.parametrize("whole", [False, True], ids=["backward", "train_step"])
@pytest.mark.parametrize(
    "pins",
    [{"data": 2}, {"data": 2, "zero": 3}, {"pipeline": {"size": 1, "microbatches": 2}}],
    ids=["data", "zero3", "microbatches"],
)
def test_buffers_are_written_behind_what_is_read_of_them(pins: dict[str, Any], whole: bool) -> None:
    for found in run_ranks(_steps, 2, pins, whole):
        assert max(found) < 1e-12


class Scales(nn.Module):
    """The gradient of a factor needs what it is multiplied with."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.tensor(2.0))
        self.second = nn.Parameter(torch.tensor(3.0))
        self.register_buffer("table", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.first * self.second * self.table).sum()


class Telling(nn.Module):
    """Returns what its backward reads, and what its state is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 4))
        self.register_buffer("table", torch.ones(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = x @ self.weight
        before = {"table": self.table.clone(), "weight": self.weight.detach().clone()}
        return {"loss": logits.square().sum(), "logits": logits, **before}


def _results(rank: int) -> tuple[str, list[float]]:
    """What backward says after a write to the logits; state that was returned, after a write."""
    x = torch.ones(2, 3)
    parallel = autopar.parallelize(Telling(), init_device_mesh("cpu", (1,)), (x,), cache=False)
    output = parallel(x)
    with torch.no_grad():
        output["logits"].view(-1)[0] = 7.0
    with pytest.raises(autopar.AutoparError) as caught:
        output["loss"].backward()
    told = []
    for mode in (True, False):
        output = parallel.train(mode)(x)
        with torch.no_grad():
            parallel.weight.add_(1.0)
            parallel.table.add_(1.0)
        told += [float(output["table"].sum()), float(output["weight"].sum())]
    return str(caught.value), told


def test_results_are_the_users_own() -> None:
    ((message, told),) = run_ranks(_results, 1)
    assert "output['logits'] of shape (2, 4) was changed in place" in message
    assert told == [4.0, 12.0, 8.0, 24.0]


def _written(rank: int) -> dict[str, str]:
    """What backward says after a write between it and its forward, by what was written."""
    x = torch.ones(2, 3)
    parallel = autopar.parallelize(Scales(), init_device_mesh("cpu", (1,)), (x,), cache=False)
    said = {}
    given = distribute_tensor(x, parallel.mesh, [Replicate()])
    held = {"second": parallel.second, "table": parallel.table, "args_0": given}
    for name, tensor in held.items():
        loss = parallel(given)
        with torch.no_grad():
            tensor.add_(1.0)
        with pytest.raises(autopar.AutoparError) as caught:
            loss.backward()
        said[name] = str(caught.value)
    loss = parallel(x)
    x.zero_()  # a plain input is copied
    loss.backward()  # nor is a write before both its business
    return said


def test_a_write_between_forward_and_backward_is_refused() -> None:
    (said,) = run_ranks(_written, 1)
    for name, message in said.items():
        assert f"'{name}' of shape" in message and "between the forward and its backward" in message
