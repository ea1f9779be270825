"""Optimizer states in host memory, and the update there (Ren et al. 2021, arXiv 2101.06840).

Before an optimizer steps, parameters of plans with `offload: "optimizer"` and their gradients are
copied to the host, and stand in its groups in place of the device's. So its states are made in host
memory and stay there. After the step the new values are copied back. The optimizer is torch's own,
made from the parallel module's parameters as ever. On CPU meshes host and device are one memory;
the copies are made all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from autopar._compat import dtensor_like
from autopar.errors import AutoparError

__all__ = ["is_offloaded", "offload", "on_host"]

_MARK = "_autopar_offloaded"
_AWAY = "_autopar_away"
HOST = torch.device("cpu")
_Swapped = tuple[int, Tensor, Tensor]  # place in the group, the device's, the host's


def offload(parameters: Iterable[Tensor]) -> None:
    """Let optimizers of these parameters keep their states on the host, from the next step on."""
    _register()
    for parameter in parameters:
        setattr(parameter, _MARK, True)


def is_offloaded(parameter: Tensor) -> bool:
    """True for a parameter whose optimizer states belong to the host."""
    return bool(getattr(parameter, _MARK, False))


@contextmanager
def on_host(optimizer: Optimizer) -> Iterator[None]:
    """Inside, an optimizer holds host copies of its offloaded parameters; they are not read back.

    `Optimizer.load_state_dict` puts states where the parameters are.
    """
    _leave(optimizer, all_of_them=True)
    try:
        yield
    finally:
        _return(optimizer, update=False)


@cache
def _register() -> None:
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if hasattr(optimizer, _AWAY):
        _return(optimizer, update=False)  # the step before failed
    elif not any(is_offloaded(p) for p in parameters):
        return
    if len(args) > 1 or kwargs.get("closure") is not None:
        raise AutoparError(
            f"torch.optim.{type(optimizer).__name__}.step(closure) would compute gradients after "
            "they were copied to the host: compute them before, or plan with "
            'constraints={"offload": "none"}'
        )
    _leave(optimizer)


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if hasattr(optimizer, _AWAY):
        _return(optimizer, update=True)


def _leave(optimizer: Optimizer, all_of_them: bool = False) -> None:
    """Put host copies into the groups, and states under them."""
    away: list[tuple[list[Tensor], list[_Swapped]]] = []
    for group in optimizer.param_groups:
        held = group["params"]
        swapped: list[_Swapped] = [
            (place, parameter, _twin(parameter))
            for place, parameter in enumerate(held)
            if is_offloaded(parameter) and (all_of_them or parameter.grad is not None)
        ]
        away.append((held, swapped))
    _wait()
    for held, swapped in away:
        for place, parameter, twin in swapped:
            held[place] = twin
            if parameter in optimizer.state:
                state = optimizer.state.pop(parameter)
                optimizer.state[twin] = {key: _on_host(value) for key, value in state.items()}
    setattr(optimizer, _AWAY, away)


@torch.no_grad()
def _return(optimizer: Optimizer, update: bool) -> None:
    """Put the device's parameters back, with the new values if `update`."""
    away = getattr(optimizer, _AWAY)
    delattr(optimizer, _AWAY)
    for held, swapped in away:
        for place, parameter, twin in swapped:
            held[place] = parameter
            if twin in optimizer.state:
                optimizer.state[parameter] = optimizer.state.pop(twin)
            if update:
                _local(parameter).copy_(_local(twin), non_blocking=True)


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _twin(parameter: Tensor) -> nn.Parameter:
    """A parameter in host memory with the values and the gradient of another."""
    twin = nn.Parameter(_copied(parameter.detach()), requires_grad=parameter.requires_grad)
    if parameter.grad is not None:
        twin.grad = _copied(parameter.grad)
    return twin


def _copied(tensor: Tensor) -> Tensor:
    """A copy in host memory; from an accelerator it is ready after `_wait`."""
    local = _local(tensor)
    away = local.device != HOST
    host = torch.empty(local.shape, dtype=local.dtype, device=HOST, pin_memory=away)
    host.copy_(local, non_blocking=away)
    return dtensor_like(host, tensor) if isinstance(tensor, DTensor) else host


def _on_host(value: Any) -> Any:
    if not isinstance(value, Tensor) or _local(value).device == HOST:
        return value
    host = _local(value).to(HOST)
    return dtensor_like(host, value) if isinstance(value, DTensor) else host


def _wait() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
