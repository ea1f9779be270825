"""A rank that comes to a step with another batch is told soon, whatever the others wait for."""

from __future__ import annotations

import time
from typing import Any

import pytest
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
