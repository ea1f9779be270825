"""States that an optimizer took from elsewhere lie where its parameters do before it steps.

`optimizer.load_state_dict` takes what it is given: whole tensors of one device, or DTensors of
another plan. A step on shares would read such a state as if it were this rank's share.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar._compat import dtensor_like
from autopar.runtime.stand_ins import COUNTERS
from autopar.runtime.state import share_like

__all__ = ["settle_states"]


def settle_states(optimizer: Optimizer) -> None:
    """Place states of a parameter's shape as the parameter is. Collective, if DTensors move."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            states = optimizer.state.get(parameter)
            if states and isinstance(parameter, DTensor):
                _settle(states, parameter)


def _settle(states: dict[str, Any], parameter: DTensor) -> None:
    for key, value in states.items():
        if not isinstance(value, Tensor) or value.shape != parameter.shape or key in COUNTERS:
            continue
        if isinstance(value, DTensor):
            if value._spec is parameter._spec or _is_placed_as(value, parameter):
                continue
            value = value.full_tensor()
        share = share_like(value.to(parameter.device), parameter)
        states[key] = dtensor_like(share.clone().contiguous(), parameter)


def _is_placed_as(value: DTensor, parameter: DTensor) -> bool:
    same_mesh = value.device_mesh == parameter.device_mesh
    return same_mesh and value.placements == parameter.placements
