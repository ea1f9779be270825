"""Ranks whose optimizers have other options, of which a checkpoint would keep one rank's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from tests.dist import try_ranks
from tests.test_checkpoint import small


def unlike(rank: int, path: str, name: str, values: list[Any]) -> None:
    parallel, optimizer = small()
    optimizer.param_groups[0][name] = values[rank]
    autopar.save_checkpoint(path, parallel, optimizer, step=1)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("lr", [0.1, 0.2]),
        ("lr", [torch.tensor(0.25), torch.tensor(0.5)]),
        ("betas", [(0.9, 0.95), (0.9, 0.99)]),
    ],
)
def test_ranks_that_step_by_other_options_are_found_by_a_save(
    tmp_path: Path, name: str, values: list[Any]
) -> None:
    mine, theirs = (v.item() if isinstance(v, torch.Tensor) else v for v in values)
    for error in try_ranks(unlike, 2, str(tmp_path), name, values, timeout=90):
        assert error.kind == "CheckpointError", error.trace
        assert (
            f"{name} of group 0 of the optimizer is {mine} on rank 0 and {theirs} on rank 1"
            in error.message
        )
    assert not list(tmp_path.iterdir())
