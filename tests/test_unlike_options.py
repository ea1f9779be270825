"""Ranks whose optimizers have other options, of which a checkpoint would keep one rank's."""

from __future__ import annotations

from pathlib import Path

import autopar
from tests.dist import try_ranks
from tests.test_checkpoint import small


def unlike_rates(rank: int, path: str) -> None:
    parallel, optimizer = small()
    optimizer.param_groups[0]["lr"] = 0.1 * (rank + 1)
    autopar.save_checkpoint(path, parallel, optimizer, step=1)


def test_ranks_that_step_by_other_learning_rates_are_found_by_a_save(tmp_path: Path) -> None:
    for error in try_ranks(unlike_rates, 2, str(tmp_path), timeout=90):
        assert error.kind == "CheckpointError", error.trace
        assert "lr of group 0 of the optimizer is 0.1 on rank 0 and 0.2 on rank 1" in error.message
    assert not list(tmp_path.iterdir())
