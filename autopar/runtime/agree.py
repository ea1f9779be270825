"""Ranks agree, or all of them stop: one rank's error must not leave the others waiting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from autopar.errors import AutoparError

__all__ = ["agree"]


def agree(error: Exception | None, mine: Mapping[str, Any]) -> None:
    """Compare `mine` over all ranks of the world; every rank calls this, failed or not.

    Args:
        error: what this rank is about to raise.
        mine: what must be equal everywhere, by name, most telling first.

    Raises:
        Exception: `error`, where there is one.
        AutoparError: another rank failed, or holds something else.
    """
    text = None if error is None else f"{type(error).__name__}: {error}"
    everyone: list[Any] = [(text, dict(mine))]
    if dist.is_initialized() and dist.get_world_size() > 1:
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (text, dict(mine)))
    if error is not None:
        raise error
    for rank, (failure, _) in enumerate(everyone):
        if failure is not None:
            raise AutoparError(f"rank {rank} failed: {failure}")
    reference = everyone[0][1]
    for rank, (_, other) in enumerate(everyone):
        if other != reference:
            raise AutoparError(
                f"ranks hold different models or inputs: {_difference(reference, other)} on ranks "
                f"0 and {rank}. Build the same model with the same configuration, and pass the "
                "same plan and the same global batch shape on every rank."
            )


def _difference(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    for name in (*first, *second):
        if first.get(name) != second.get(name):
            return f"{name} is {first.get(name, 'absent')} and {second.get(name, 'absent')}"
    return "the order of the parameters differs"
