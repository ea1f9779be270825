"""Steps that fail, and whose errors the training loop catches to go on with the next batch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.runtime import lost
from tests.dist import run_ranks, try_ranks

BAD = 2  # the number of the batch that holds a token which there is not


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.embed(ids)), labels)


def batch(number: int, rows: list[int]) -> dict[str, Tensor]:
    """Batch of a number, with a bad token in some rows if it is the bad one."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(0, 16, (4,), generator=generator)
    if number == BAD:
        ids[rows] = 99
    return {"ids": ids, "labels": torch.randint(0, 4, (4,), generator=generator)}


def skipping(rank: int, rows: list[int], world: int) -> tuple[list[float], list[str]]:
    """Losses of the steps that did not fail, and the errors of those that did."""
    lost._SILENCE_S = 2.0
    torch.manual_seed(0)
    model: Any = Net().double()
    if world > 1:
        mesh = init_device_mesh("cpu", (world,))
        model = autopar.parallelize(model, mesh, batch(0, []), constraints={"data": world})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses, errors = [], []
    for number in range(6):
        try:
            loss = model(**batch(number, rows))
            loss.backward()
        except (autopar.AutoparError, IndexError) as error:
            errors.append(str(error))
            continue
        finally:
            if not errors or len(errors) == 1:
                optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, errors


def test_a_batch_that_fails_on_all_ranks_may_be_skipped() -> None:
    expected, _ = skipping(0, [0, 3], 1)
    for losses, errors in run_ranks(skipping, 2, [0, 3], 2):
        assert len(errors) == 1 and "99" in errors[0]
        assert losses == pytest.approx(expected, rel=1e-12) and len(losses) == 5


def skipping_to_the_end(rank: int, path: str) -> None:
    found = skipping(rank, [3], 2)
    Path(path, f"{rank}.json").write_text(json.dumps(found))
    os._exit(0)


def test_no_step_runs_behind_one_that_failed_on_some_ranks_alone(tmp_path: Path) -> None:
    try_ranks(skipping_to_the_end, 2, str(tmp_path), timeout=120)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    losses, errors = found[1]
    assert len(losses) == BAD and len(errors) == 6 - BAD and "99" in errors[0]
    for error in errors[1:]:
        assert "step 3 failed on rank 1 and not on rank 0 (AutoparError: " in error
        assert "load the last checkpoint" in error
    # the other rank waits in the step, and hears that there is no one to wait for
    losses, errors = found[0]
    assert len(losses) == BAD and "because rank 1 ended" in errors[0]
