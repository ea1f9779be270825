"""What pipeline stages send each other: values of a microbatch, shared parameters, gradients."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

__all__ = ["Transfer", "TransferPhase", "paired", "port_of"]

TransferPhase = Literal["hoist", "forward", "backward", "finish"]


@dataclass(frozen=True, slots=True)
class Transfer:
    """A value that one stage sends to another.

    Attributes:
        value: its name in both stages: of an output of kind "sent", and of a placeholder of kind
            "received" (except "finish": the FQN of the parameter whose gradient it adds to).
        source, target: stages.
        phase: once before the turns, at each turn's forward or backward, or once after them.
        shape, dtype: of the whole tensor.
    """

    value: str
    source: int
    target: int
    phase: TransferPhase
    shape: tuple[int, ...]
    dtype: torch.dtype


def port_of(value: str) -> str:
    """Name that stands for the layout of a value that is sent and has no placeholder for it."""
    return f"port.{value}"


def paired(transfers: Iterable[Transfer], stage: int) -> dict[str, str]:
    """Port of each value that a stage sends.

    Over a cut, a value that comes back with the shape of one that went is taken for its gradient,
    and has its layout.
    """
    ports: dict[str, str] = {}
    for below in (stage - 1, stage):
        up = [t for t in transfers if t.phase == "forward" and t.source == below]
        down = [t for t in transfers if t.phase == "backward" and t.target == below]
        for transfer in down:
            twin = next(
                (t for t in up if (t.shape, t.dtype) == (transfer.shape, transfer.dtype)), None
            )
            if twin is not None:
                up.remove(twin)
            if below == stage and twin is not None:
                ports[twin.value] = transfer.value
            if below == stage - 1:
                ports[transfer.value] = twin.value if twin else port_of(transfer.value)
    for transfer in transfers:
        if transfer.source == stage and transfer.phase != "finish":
            ports.setdefault(transfer.value, port_of(transfer.value))
    return ports
