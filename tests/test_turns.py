"""Ranks that do not go on alike: one turns to other inputs, or leaves out a backward."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar._compat import default_store
from autopar.runtime import counted, lost, turns
from autopar.runtime.counted import Counts
from tests.dist import RankError, run_ranks, try_ranks

PLANS: dict[str, dict[str, Any]] = {
    "data": {"data": 2},
    "tensor": {"tensor": {"mode": "1d", "size": 2}},
    "pipeline": {"pipeline": {"size": 2, "microbatches": 2}},
}


class Net(nn.Module):
    """Large enough for every batch to be split, so that ranks communicate."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out.square().mean()


def parallel(plan: str) -> tuple[Any, Tensor]:
    lost._INTERVAL_S, lost._SILENCE_S, turns._LOOK_S = 0.1, 2.0, 0.2
    torch.manual_seed(0)
    x = torch.randn(4096, 256)
    mesh = init_device_mesh("cpu", (2,))
    return autopar.parallelize(Net().train(), mesh, (x,), constraints=PLANS[plan]), x


def one_turns(rank: int, plan: str) -> None:
    """Both ranks have met both sizes; in the third step, rank 1 alone takes the other one."""
    module, x = parallel(plan)
    for batch in (x, x[:2048], x if rank else x[:2048]):
        module.train_step(batch)
    for _ in range(100):  # rank 0 hears of it at the latest when it looks for rank 1
        module.train_step(x[:2048])


@pytest.mark.parametrize("plan", PLANS)
def test_one_rank_alone_does_not_turn_to_another_batch(plan: str) -> None:
    other, turned = try_ranks(one_turns, 2, plan, timeout=60)
    assert isinstance(turned, RankError) and isinstance(other, RankError)
    assert turned.kind == "AutoparError", turned.trace
    assert "rank 1 comes to step 3 with a batch of another shape" in turned.message
    assert "but rank 0 has begun step 3, the next one" in turned.message
    assert other.kind == "LostRankError", other.trace
    assert "rank 1 ended (AutoparError: rank 1 comes to step 3" in other.message


def turn_apart(rank: int) -> None:
    module, x = parallel("data")
    for batch in (x, x[:2048], x[:1024], x if rank else x[:2048]):
        module.train_step(batch)


def test_ranks_do_not_turn_to_different_batches() -> None:
    for outcome in try_ranks(turn_apart, 2, timeout=60):
        assert isinstance(outcome, RankError)
        assert outcome.kind == "AutoparError", outcome.trace
        assert "ranks 0 and 1 come to it with steps of different kinds" in outcome.message


def does_not_come(rank: int, kind: str) -> list[float]:
    """In front of a step of another kind, rank 1 is late, or ends without a word."""
    turns._SILENCE_S = 2.0
    os.environ["AUTOPAR_TIMEOUT_S"] = "3"
    module, x = parallel("data")
    for batch in (x, x[:2048]):
        module.train_step(batch)
    if rank == 1:
        time.sleep(5)
        if kind == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
    return [module.train_step(x).item()]


@pytest.mark.parametrize("kind", ["is late", "is killed"])
def test_a_rank_that_does_not_come_is_waited_for_as_long_as_it_lives(kind: str) -> None:
    first, other = try_ranks(does_not_come, 2, kind, timeout=60)
    if kind == "is late":
        assert first == other
    else:
        assert isinstance(first, RankError) and first.kind == "LostRankError", first
        assert "because rank 1 has shown no life for 2 s" in first.message


def catches_an_error(rank: int, plan: str) -> None:
    """Between the forward and the backward of the second step, rank 1 raises and goes on."""
    module, x = parallel(plan)
    for step in range(4):
        loss = module(x)
        if step == 1 and rank == 1:
            with pytest.raises(autopar.AutoparError) as first:
                module(x)
            with pytest.raises(autopar.AutoparError) as again:
                module.train_step(x)
            assert str(again.value) == str(first.value)
            raise first.value
        loss.backward()


@pytest.mark.parametrize("plan", ["data", "tensor"])
def test_a_rank_that_has_left_out_a_backward_goes_no_further(plan: str) -> None:
    other, left = try_ranks(catches_an_error, 2, plan, timeout=60)
    assert isinstance(left, RankError) and isinstance(other, RankError)
    assert left.kind == "AutoparError", left.trace
    assert "with the backward of its last step left out, but rank 0 has " in left.message
    assert other.kind == "LostRankError", other.trace
    assert "rank 1 ended (AutoparError: rank 1 comes to step 3" in other.message


def without_backward(rank: int) -> tuple[list[float], int]:
    """What all ranks do alike: forwards alone, two for a backward, evaluation, other batches."""
    module, x = parallel("data")
    losses = []
    for batch in (x, x[:2048], x, x[:2048]):
        module(batch)
        losses.append((module(batch) + module(batch.flip(0))).detach().item())
        (module(batch) + module(batch.flip(0))).backward()
        module.eval()
        losses.append(module(batch).item())
        module.train()
        losses.append(module.train_step(batch).item())
    kept = default_store().num_keys()
    for batch in (x, x[:2048]) * 4:
        module(batch)
        module.train_step(batch)
    return losses, default_store().num_keys() - kept


def test_what_all_ranks_do_alike_may_be_anything() -> None:
    (losses, more), (same, _) = run_ranks(without_backward, 2)
    assert losses == same and all(torch.isfinite(torch.tensor(losses)))
    assert more <= 2  # of the last meeting, which another rank may not have left


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """This process has run two steps, with a backward of each; what is noted of others."""
    monkeypatch.setattr(counted, "_now", [Counts()])
    monkeypatch.setattr(counted, "_trail", [Counts()] * 8)
    monkeypatch.setattr(counted, "unlike", [])
    for _ in range(2):
        counted.begin_step("plan")
        counted.begin_backward()
    return counted.unlike


@pytest.mark.parametrize(
    ("begun", "backwards", "told"),
    [
        (1, 0, ""),  # is behind
        (1, 1, ""),
        (2, 1, ""),
        (2, 2, ""),
        (3, 2, ""),  # is ahead
        (2, 0, "rank 1 has begun step 2 without a backward of the steps before it that rank 0"),
        (1, 2, "rank 0 has begun step 2 without a backward of the steps before it that rank 1"),
    ],
)
def test_backwards_are_compared(counts: list[str], begun: int, backwards: int, told: str) -> None:
    checksum = counted._trail[begun % 8].checksum
    counted.compare(0, 1, Counts(begun, checksum, backwards))
    assert bool(counts) == bool(told)
    if told:
        assert told in counts[0]
