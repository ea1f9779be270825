"""Optimizer states that were loaded are placed like their parameters before the next step.

`optimizer.load_state_dict` accepts whatever it is given: whole tensors of one device, or DTensors
of another plan. A step on shares would take such a state for this rank's share.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar._dtensors import dtensor_like
from autopar.runtime.saved_shares import check_own_shares, count_as_own, is_from_a_file
from autopar.runtime.stand_ins import COUNTERS
from autopar.runtime.state import share_like

__all__ = ["settle_states"]


def settle_states(optimizer: Optimizer) -> None:
    """Place states of a parameter's shape as the parameter is. Collective, if DTensors move.

    Raises:
        CheckpointError: they are the shares of another rank; on all ranks.
    """
    held = [
        (p, optimizer.state.get(p)) for group in optimizer.param_groups for p in group["params"]
    ]
    ours = [(p, states) for p, states in held if states and isinstance(p, DTensor)]
    values = [value for _, states in ours for value in states.values()]
    if is_from_a_file(values):
        keys = [key for _, states in ours for key in states]
        names = (f"the state {key!r} number {number}" for number, key in enumerate(keys))
        check_own_shares(dict(zip(names, values, strict=True)))
        for value in values:
            if isinstance(value, DTensor):
                count_as_own(value)
    for parameter, states in ours:
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
