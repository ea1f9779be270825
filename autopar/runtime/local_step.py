"""Optimizers that work element by element step on each rank's shares, not on DTensors.

Each operation on a DTensor has the host find its placements, and an optimizer makes a dozen of
them for each parameter; here they are known to be the parameter's own.
So for the step, plain tensors of the same memory stand in the optimizer's groups, and their states
below them. Between steps the groups and states have the DTensors, as torch's own would: the same
memory again, so that nothing is copied. Of torch's optimizers all of `_ELEMENTWISE` are such.

`foreach` stays off unless it is asked for, as it is for DTensors: on an accelerator it is torch's
default for plain tensors, and takes memory for temporary values of all parameters at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from autopar._compat import dtensor_like
from autopar.runtime.offload import is_offloaded

__all__ = ["step_on_shares"]

_ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {
        optim.ASGD,
        optim.Adadelta,
        optim.Adagrad,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.Rprop,
        optim.SGD,
    }
)
_COUNTERS = frozenset({"step", "eta", "mu", "mu_product"})  # states without the parameter's shape
_MARK, _INSIDE = "_autopar_share", "_autopar_inside"
# the group's list, the place in it, the parameter, what stands for it, its states
_Swapped = tuple[list[Tensor], int, DTensor, nn.Parameter, dict[str, Any] | None]


def step_on_shares(parameters: Iterable[Tensor]) -> None:
    """Let elementwise optimizers of these parameters step so, from the next step on."""
    _register()
    for parameter in parameters:
        setattr(parameter, _MARK, True)


@cache
def _register() -> None:
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if hasattr(optimizer, _INSIDE):
        _after(optimizer, args, kwargs)  # the step before raised
    if len(args) > 1 or kwargs.get("closure") is not None or not _is_elementwise(optimizer):
        return
    found: list[_Swapped] = []
    by_default: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = False
            by_default.append(group)
        for place, parameter in enumerate(group["params"]):
            states = optimizer.state.pop(parameter, None)
            share = nn.Parameter(_share(parameter), requires_grad=parameter.requires_grad)
            if parameter.grad is not None:
                share.grad = _share(parameter.grad)
            group["params"][place] = share
            if states is not None:
                optimizer.state[share] = {key: _share(value) for key, value in states.items()}
            found.append((group["params"], place, parameter, share, states))
    setattr(optimizer, _INSIDE, (found, by_default))


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not hasattr(optimizer, _INSIDE):
        return
    found: list[_Swapped]
    found, by_default = getattr(optimizer, _INSIDE)
    delattr(optimizer, _INSIDE)
    for group in by_default:
        group["foreach"] = None
    for held, place, parameter, share, states in found:
        held[place] = parameter
        if share in optimizer.state:
            new = optimizer.state.pop(share)
            optimizer.state[parameter] = _as_dtensors(new, states or {}, parameter)


def _is_elementwise(optimizer: Optimizer) -> bool:
    """True if each parameter and its gradient are shares of one placement, and all else allows."""
    if type(optimizer) not in _ELEMENTWISE:
        return False
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            return False
        for parameter in group["params"]:
            if not hasattr(parameter, _MARK) or is_offloaded(parameter):
                return False
            gradient = parameter.grad
            if gradient is not None and not (
                isinstance(gradient, DTensor) and gradient.placements == parameter.placements
            ):
                return False
    return True


def _share(value: Any) -> Any:
    return value._local_tensor.detach() if isinstance(value, DTensor) else value


def _as_dtensors(new: dict[str, Any], old: dict[str, Any], parameter: DTensor) -> dict[str, Any]:
    """States of a parameter from those of its share; as they were where the memory is the same."""
    found: dict[str, Any] = {}
    for key, value in new.items():
        before = old.get(key)
        if not isinstance(value, Tensor) or key in _COUNTERS:
            found[key] = value
        elif isinstance(before, DTensor) and before._local_tensor.data_ptr() == value.data_ptr():
            found[key] = before
        else:
            found[key] = dtensor_like(value, parameter)
    return found
