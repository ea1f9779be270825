"""Ranks that part ways: those that wait say where all are, or end where their steps differ."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.runtime import lost, stalled
from tests.dist import RankError, try_ranks

SHORT_S = 1.0


def _module(path: str, rank: int) -> tuple[Any, Tensor]:
    """A parallel module whose rank waits no longer than a test can, and writes to a file."""
    stalled._STALL_S = lost._INTERVAL_S = SHORT_S
    lost._SILENCE_S = 2 * SHORT_S
    sys.stderr = open(Path(path) / str(rank), "a")  # noqa: SIM115
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), torch.randn(4, 8)
    mesh = init_device_mesh("cpu", (2,))
    constraints = {"tensor": {"mode": "1d"}}
    loss_fn = nn.functional.mse_loss
    parallel = autopar.parallelize(model, mesh, (x, x), loss_fn=loss_fn, constraints=constraints)
    return parallel, x


def leaves_the_loop(rank: int, path: str) -> None:
    """Rank 1 makes one step and rank 0 two; rank 1 lets it wait, and then ends."""
    parallel, x = _module(path, rank)
    parallel.train_step(x, x)
    if rank == 0:
        parallel.train_step(x, x)
    else:
        time.sleep(6 * SHORT_S)
        os._exit(0)


def test_a_rank_that_waits_says_where_the_others_are(tmp_path: Path) -> None:
    first, second = try_ranks(leaves_the_loop, 2, str(tmp_path))
    assert isinstance(first, RankError) and isinstance(second, RankError)
    told = (tmp_path / "0").read_text()
    assert "rank 0 has been 1 s in train_step of step 2" in told
    assert "Rank 1 has begun 1 steps, and is not in communication for long" in told
    assert not (tmp_path / "1").read_text()


def steps_unlike(rank: int, path: str) -> None:
    """Two models for two sizes of batch; in the third step each rank runs another one."""
    parallel, x = _module(path, rank)
    other, small = _module(path, rank)[0], x[:2]
    for first in (True, False, not rank):
        if first:
            parallel.train_step(x, x)
        else:
            other.train_step(small, small)
    if rank == 0:  # the other one never comes
        parallel.train_step(x, x)
    time.sleep(8 * SHORT_S)


def test_ranks_whose_steps_differ_do_not_wait_for_each_other(tmp_path: Path) -> None:
    outcomes = try_ranks(steps_unlike, 2, str(tmp_path), timeout=60)
    assert [type(outcome) for outcome in outcomes] == [RankError, RankError]
    assert not any(outcome.kind == "Timeout" for outcome in outcomes), outcomes
    told = "".join((tmp_path / str(rank)).read_text() for rank in range(2))
    assert "in train_step: ranks" in told
    assert "have called their model with batches of different shapes" in told


def test_several_ranks_at_one_place(capsys: pytest.CaptureFixture[str]) -> None:
    stall = stalled.Stall()
    place = "has begun 2 steps, and is not in communication for long"
    stall.tell(0, "in the norm", {1: place, 2: place, 3: "is in the norm of step 2"})
    told = capsys.readouterr().err
    assert "Ranks 1, 2 have begun 2 steps, and are not in communication for long" in told
    assert "Rank 3 is in the norm of step 2" in told
