"""A rank that comes to a step with another batch is told soon, whatever the others wait for."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.runtime import lost
from tests import handwritten as hw
from tests.dist import RankError, try_ranks

DATA: dict[str, Any] = {"data": 2}
TURNS: dict[str, Any] = {"pipeline": {"size": 2, "microbatches": 2}}


def differs_later(rank: int, constraints: Any) -> None:
    """The fourth batch of rank 1 has half of the rows."""
    lost._INTERVAL_S, lost._SILENCE_S = 0.1, 1.0
    inputs = hw.vectors()
    half = {name: value[: len(value) // 2] for name, value in inputs.items()}
    parallel = autopar.parallelize(
        hw.Mlp(layers=2).train(), init_device_mesh("cpu", (2,)), inputs, constraints=constraints
    )
    for _ in range(3):
        parallel.train_step(**inputs)
    parallel.train_step(**(half if rank == 1 else inputs))


@pytest.mark.parametrize("constraints", [DATA, TURNS])
def test_a_batch_of_another_shape_in_a_later_step(constraints: Any) -> None:
    began = time.monotonic()
    first, other = try_ranks(differs_later, 2, constraints, timeout=100)
    assert time.monotonic() - began < 60
    assert isinstance(first, RankError) and isinstance(other, RankError)
    assert other.kind == "AutoparError", other.trace
    assert "rank 1 came to plan a step, but rank 0 has begun step 4, the next one" in other.message
    assert "another shape" in other.message
    assert first.kind == "LostRankError", first.trace
    assert "rank 1 ended (AutoparError: rank 1 came to plan a step" in first.message


def is_late(rank: int) -> float:
    """Rank 0 comes late to a batch that all ranks meet for the first time."""
    lost._INTERVAL_S = 0.1
    inputs = hw.vectors()
    half = {name: value[: len(value) // 2] for name, value in inputs.items()}
    parallel = autopar.parallelize(
        hw.Mlp(layers=2).train(), init_device_mesh("cpu", (2,)), inputs, constraints=DATA
    )
    parallel.train_step(**inputs)
    if rank == 0:
        time.sleep(3)
    return parallel.train_step(**half).item()


def test_a_rank_that_is_late_is_waited_for() -> None:
    first, other = try_ranks(is_late, 2)
    assert first == other


class Wide(nn.Module):
    """What several ranks split, whatever the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).square().mean()


def goes_another_way(rank: int, same: bool) -> str:
    """Both shapes are known to both ranks, which then take them in another order."""
    lost._INTERVAL_S = 0.1
    small, large = torch.ones(2048, 256), torch.ones(4096, 256)
    mesh = init_device_mesh("cpu", (2,))
    parallel = autopar.parallelize(Wide().train(), mesh, (small,), constraints=DATA)
    parallel.train_step(small)
    parallel.train_step(large)
    for turn in range(2):
        parallel.train_step(large if (turn + (rank and not same)) % 2 else small)
    for _ in range(30 if same else 200):  # other steps, in which both do the same
        parallel.train_step(small)
        time.sleep(0.05)
    return "went on"


def test_batches_of_known_shapes_in_another_order() -> None:
    """Nothing waits, as gradients have the same shapes: what ranks have run is compared."""
    found = try_ranks(goes_another_way, 2, False, timeout=100)
    errors = [each for each in found if isinstance(each, RankError)]
    assert errors
    told = [e for e in errors if e.kind == "AutoparError"]
    assert told, [e.trace for e in errors]
    assert "called their model with batches of different shapes" in told[0].message
    assert try_ranks(goes_another_way, 2, True, timeout=100) == ["went on"] * 2
