"""Calls that bring inputs of ever new kinds."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.runtime import lost
from tests import handwritten as hw
from tests.dist import run_ranks


class Scaled(nn.Module):
    """A loss that takes a number of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.model = hw.Mlp()

    def forward(self, x: torch.Tensor, labels: torch.Tensor, step: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(x, labels) * (1 + step)
        return loss


def counting(rank: int) -> list[str]:
    """Warnings of a loop that passes the number of each step."""
    batch = hw.vectors()
    parallel = autopar.parallelize(
        Scaled(), init_device_mesh("cpu", (2,)), {**batch, "step": 0}, constraints={"data": 2}
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(10):
            parallel.train_step(**batch, step=step)
    return [str(w.message) for w in caught if "kinds of inputs" in str(w.message)]


def test_a_number_that_changes_is_named_once() -> None:
    for told in run_ranks(counting, 2):
        (message,) = told
        assert "8 kinds of inputs" in message and "[1]['step'], 6 and 7" in message


class Flaky:
    """A store that fails for a while."""

    def __init__(self, failures: int) -> None:
        self.failures, self.written = failures, 0

    def set(self, key: str, value: Any) -> None:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("Connection reset by peer")
        self.written += 1

    def check(self, keys: list[str]) -> bool:
        return False


@pytest.mark.parametrize(("failures", "lives"), [(3, True), (100, False)])
def test_a_rank_is_seen_again_behind_a_failure(
    monkeypatch: pytest.MonkeyPatch, failures: int, lives: bool
) -> None:
    monkeypatch.setattr(lost, "_INTERVAL_S", 0.001)
    monkeypatch.setattr(lost.dist, "get_world_size", lambda: 2)
    store, stop = Flaky(failures), threading.Event()
    thread = threading.Thread(target=lost._beat, args=(stop, store, 0), daemon=True)
    thread.start()
    thread.join(0.5)
    assert thread.is_alive() == lives and (store.written > 0) == lives
    stop.set()
    thread.join()
