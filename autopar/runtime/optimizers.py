"""Optimizers of torch that are wrong on sharded DTensors are stopped before their first step.

`torch.optim.Adafactor` scales its update by `param.norm().item()` and `update.norm().item()`. On a
sharded DTensor these are the norms of one rank's shard (torch 2.13), so ranks scale differently.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar.errors import AutoparError

__all__ = ["guard_optimizers"]

_READS_LOCAL_NORMS = (torch.optim.Adafactor,)


@cache
def guard_optimizers() -> None:
    """Check every optimizer of this process before its steps; once is enough."""
    register_optimizer_step_pre_hook(_check)


def _check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not isinstance(optimizer, _READS_LOCAL_NORMS):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, DTensor) and any(p.is_shard() for p in parameter.placements):
                raise AutoparError(
                    f"torch.optim.{type(optimizer).__name__} takes the norm of each rank's shard "
                    f"for that of the parameter: a parameter of shape {tuple(parameter.shape)} is "
                    f"placed {list(parameter.placements)}. Keep parameters whole with "
                    'constraints={"data": …, "zero": 0}, or use another optimizer.'
                )
