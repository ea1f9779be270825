"""Freezing and unfreezing behind `parallelize`: followed, or refused with the names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from tests.dist import run_ranks

PLANS: dict[str, dict[str, Any]] = {
    "zero3": {"data": 2, "zero": 3},
    "pipeline": {"pipeline": {"size": 2, "microbatches": 2, "cuts": ["layers.2"]}},
}


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.unread = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return x.square().mean()


def tower() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Tower().double(), torch.randn(8, 8, dtype=torch.float64)


def train(model: nn.Module, wanted: bool, *prefixes: str) -> None:
    for name, parameter in model.named_parameters():
        if name.startswith(prefixes):
            parameter.requires_grad_(wanted)


def toggled(rank: int, plan: str, late: bool) -> tuple[list[str], float]:
    """Messages of steps on what was unfrozen; how far gradients are off after freezing again.

    `late`: the first batch plans, and parameters are toggled before it.
    """
    model, x = tower()
    single, _ = tower()
    train(model, False, "layers.0.", "layers.3.weight")
    mesh = init_device_mesh("cpu", (2,))
    given = () if late else (x,)
    parallel = autopar.parallelize(model, mesh, *given, constraints=PLANS[plan], cache=False)
    for module in (single, parallel):
        train(module, True, "layers.")
    messages = []
    for step in (parallel.train_step, parallel):
        try:
            step(x)
        except autopar.AutoparError as error:
            messages.append(str(error))
    with torch.no_grad():
        parallel(x)  # it computes no gradients anyway
    for module in (single, parallel):
        train(module, False, "layers.0.", "layers.1.weight", "layers.3.weight")
    parallel.train_step(x)
    single(x).backward()
    expected = {name: p.grad for name, p in single.named_parameters()}
    off = 0.0
    for name, parameter in parallel.named_parameters():
        whole, gradient = expected[name], parameter.grad
        assert (whole is None) == (gradient is None), name
        if whole is not None:
            off = max(off, float(torch.dist(gradient.full_tensor(), whole) / whole.norm()))
    return messages, off


@pytest.mark.parametrize(("plan", "late"), [("zero3", False), ("zero3", True), ("pipeline", False)])
def test_what_is_unfrozen_later_is_named_and_what_is_frozen_later_stays_so(
    plan: str, late: bool
) -> None:
    first, second = run_ranks(toggled, 2, plan, late)
    for messages, off in (first, second):
        assert len(messages) == 2
        assert all("autopar.parallelize again" in message for message in messages)
        assert off < 1e-12
    assert all("layers.0.weight, layers.0.bias" in message for message in first[0])
    assert all("layers.3.weight" in message for message in second[0])
