"""Tensors that stand in for parameters and their states in an optimizer while it steps.

A stand-in is the local tensor of a DTensor (an op on a DTensor costs the host time for placements,
and an optimizer runs a dozen for each parameter), a copy of it in host memory, or both. Between
steps, groups and states hold DTensors, as torch's own would.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar._dtensors import dtensor_like, local_of
from autopar.core.host_link import HOST, HostLink

__all__ = ["COUNTERS", "StandIns"]

COUNTERS = frozenset({"step", "eta", "mu", "mu_product"})  # states without the parameter's shape
_States = MutableMapping[Any, dict[str, Any]]


class StandIns:
    """Stands for some parameters of an optimizer, for one step.

    Args:
        parameters: what they stand for, in order.
        link: to the host, for copies there; None for the memory of the parameters themselves.
        local: plain tensors stand for DTensors; else DTensors of the same placements.
    """

    def __init__(
        self, parameters: Sequence[Tensor], link: HostLink | None, local: bool = True
    ) -> None:
        self.parameters = parameters
        self.tensors: list[nn.Parameter] = []
        self._link, self._local = link, local
        self._sent: list[Tensor] | None = None
        self._arrival: torch.Event | None = None
        self._before: list[dict[str, Any] | None] = []

    def send(self) -> None:
        """Begin the copies of parameters and gradients to the host, unless they are begun."""
        if self._sent is not None:
            return
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        self._sent = [_share(value) for value in (*self.parameters, *gradients)]
        if self._link is not None:
            self._sent, self._arrival = self._link.down(self._sent)

    def enter(self, state: _States) -> list[nn.Parameter]:
        """The stand-ins, with their gradients; states of the optimizer go below them."""
        self.send()
        assert self._sent is not None
        if self._arrival is not None:
            self._arrival.synchronize()
        values, gradients = iter(self._sent), iter(self._sent[len(self.parameters) :])
        for parameter in self.parameters:
            given = self._like(next(values), parameter)
            tensor = nn.Parameter(given, requires_grad=parameter.requires_grad)
            if parameter.grad is not None:
                tensor.grad = self._like(next(gradients), parameter.grad)
            states = state.pop(parameter, None)
            if states is not None:
                state[tensor] = {key: self._inward(value) for key, value in states.items()}
            self.tensors.append(tensor)
            self._before.append(states)
        return self.tensors

    @torch.no_grad()
    def leave(self, state: _States, update: bool = True) -> None:
        """States go back below the parameters, and host values up to them if `update`."""
        if self._link is not None and update:
            pairs = zip(self.parameters, self.tensors, strict=True)
            self._link.up((_share(parameter), _share(tensor)) for parameter, tensor in pairs)
        for parameter, tensor, before in zip(
            self.parameters, self.tensors, self._before, strict=True
        ):
            if tensor in state:
                new = state.pop(tensor)
                if self._local and isinstance(parameter, DTensor):
                    new = _as_dtensors(new, before or {}, parameter)
                state[parameter] = new
        self.tensors, self._before, self._sent, self._arrival = [], [], None, None

    def _like(self, value: Tensor, original: Tensor) -> Tensor:
        if isinstance(original, DTensor) and not self._local:
            return dtensor_like(value, original)
        return value

    def _inward(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        share = _share(value)
        if self._link is not None and share.device != HOST:
            share = share.to(HOST)  # put there by `load_state_dict`, or by `__init__`
        elif not self._local:
            return value
        return self._like(share, value)


def _share(value: Tensor) -> Tensor:
    """The rank's own part of a tensor, outside of autograd."""
    share = local_of(value)
    return share.detach() if share.requires_grad else share  # a detach takes as long as a view


def _as_dtensors(new: dict[str, Any], old: dict[str, Any], parameter: DTensor) -> dict[str, Any]:
    """States of a parameter from those of its share; as they were where the memory is the same."""
    found: dict[str, Any] = {}
    for key, value in new.items():
        before = old.get(key)
        if not isinstance(value, Tensor) or key in COUNTERS:
            found[key] = value
        elif isinstance(before, DTensor) and before._local_tensor.data_ptr() == value.data_ptr():
            found[key] = before
        else:
            found[key] = dtensor_like(value, parameter)
    return found
