"""Predicted peak memory beside what is live while a step runs on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.runtime.live import LiveBytes
from tests import zoo
from tests.dist import run_ranks

SLOW = ("llama", "vit", "t5", "mixtral")
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "one-full": (1, {"checkpoint": "full"}),
    "zero3": (4, {"data": 4, "zero": 3}),
    "1d": (4, {"tensor": {"mode": "1d", "size": 4}}),
    "mixed": (4, {"data": 2, "tensor": {"mode": "1d", "size": 2}, "checkpoint": "selective"}),
}


def peaks(rank: int, world: int, name: str, constraints: Any) -> tuple[int, int]:
    """Predicted and measured peak of the second step, when AdamW has its states."""
    model, inputs = zoo.MODELS[name]()
    mesh = init_device_mesh("cpu", (world,))
    parallel = autopar.parallelize(model.train(), mesh, inputs, constraints=constraints)
    del model
    optimizer = torch.optim.AdamW(parallel.parameters())
    parallel.train_step(**inputs)
    optimizer.step()
    optimizer.zero_grad()
    live = LiveBytes()
    states = [list(state.values()) for state in optimizer.state.values()]
    live.hold([list(parallel.parameters()), list(parallel.buffers()), states, inputs])
    with live:
        parallel.train_step(**inputs)
    return parallel.plan.predicted.peak_memory_bytes, live.peak_bytes


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    "name",
    ["gpt2", "resnet", *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)],
)
def test_the_predicted_peak_is_true(name: str, plan: str) -> None:
    world, constraints = PLANS[plan]
    for predicted, measured in run_ranks(peaks, world, world, name, constraints):
        assert 0.98 * measured <= predicted <= 1.05 * measured


def test_what_is_live_is_counted_once_and_let_go() -> None:
    held = torch.zeros(100)
    live = LiveBytes()
    live.hold([held, held[10:20]])
    assert live.peak_bytes == 400
    with live:
        first = held + 1
        view = first[:50]
        assert live.peak_bytes == 800
        del first
        second = held + 2  # the view keeps the first alive
        assert live.peak_bytes == 1200
        del view, second
        (held + 3).sum()
    assert live.peak_bytes == 1200
