"""Optimizers of torch that would give wrong numbers are stopped before their first step.

`torch.optim.Adafactor` scales its update by `param.norm().item()` and `update.norm().item()`. On a
sharded DTensor these are the norms of one rank's shard (torch 2.13), so ranks scale differently.
`torch.optim.LBFGS` takes products over all parameters, and a rank of a pipeline has some of them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar.errors import AutoparError
from autopar.runtime.stage_gradients import is_of_a_stage

__all__ = ["guard_optimizers"]

_READS_LOCAL_NORMS = (torch.optim.Adafactor,)
_READS_ALL_PARAMETERS = (torch.optim.LBFGS,)


@cache
def guard_optimizers() -> None:
    """Check every optimizer of this process before its steps; once is enough."""
    register_optimizer_step_pre_hook(_check)


def _check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    name = type(optimizer).__name__
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if isinstance(optimizer, _READS_ALL_PARAMETERS):
        if any(is_of_a_stage(p) for p in parameters):
            raise AutoparError(
                f"torch.optim.{name} takes products over all parameters, and a rank of a pipeline "
                "has those of its stages only. Plan without one, with "
                "constraints={'pipeline': 'none'}, or use another optimizer."
            )
    if isinstance(optimizer, _READS_LOCAL_NORMS):
        for parameter in parameters:
            if isinstance(parameter, DTensor) and any(p.is_shard() for p in parameter.placements):
                raise AutoparError(
                    f"torch.optim.{name} takes the norm of each rank's shard "
                    f"for that of the parameter: a parameter of shape {tuple(parameter.shape)} is "
                    f"placed {list(parameter.placements)}. Keep parameters whole with "
                    'constraints={"data": …, "zero": 0}, or use another optimizer.'
                )
