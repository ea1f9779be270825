"""Whether the ranks of a group reach each other's memory, and torch's fused ops where they do.

A group is asked once, when a program first comes to one of its fused calls. Every rank says what
it knows of its own device, then all try to map a small buffer of each other; between these steps
they agree, so that all use the fused ops or none does. What stands against it is told in a warning.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar import _compat
from autopar.errors import SymmetricMemoryWarning

__all__ = ["FusedCalls", "Probe", "fused_calls", "reason_against"]

_LEAST_CAPABILITY = (8, 0)
"""Of the devices that torch tests symmetric memory on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedCalls:
    """Torch's ops on matrices.

    Attributes:
        gather_matmul: (m, k), the (k, n) of each product, the group and whether the gathered
            (ranks · m, k) is wanted; yields that, or None, and each (ranks · m, n).
        matmul_reduce_scatter: (m, k), (k, n) and the group; yields (m / ranks, n).
    """

    gather_matmul: Callable[[Tensor, list[Tensor], str, bool], tuple[Tensor | None, list[Tensor]]]
    matmul_reduce_scatter: Callable[[Tensor, Tensor, str], Tensor]


@dataclass(frozen=True, slots=True)
class Probe:
    """How one rank finds out; steps yield what stands against fused calls, or "", and may raise.

    Attributes:
        place: yields the machine, and the device on it, as two texts.
        own: of this rank alone.
        peers: given the devices of all ranks.
        meet: maps a buffer of every rank.
    """

    place: Callable[[], tuple[str, str]]
    own: Callable[[], str]
    peers: Callable[[Sequence[str]], str]
    meet: Callable[[], None]


def fused_calls(group_name: str, device: torch.device) -> FusedCalls | None:
    """The fused ops for tensors on a device, or None where the group cannot use them.

    Collective, the first time that a group asks.
    """
    if device.type != "cuda":
        return None
    return _calls_of(_compat.group_of(group_name), device)


@lru_cache(maxsize=64)
def _calls_of(group: Any, device: torch.device) -> FusedCalls | None:
    reason = reason_against(group, _probe(group, device))
    if reason:
        warnings.warn(
            f"no symmetric memory in process group {group.group_name}: {reason}; products and "
            "the collectives beside them run one after the other there. Leave the pass "
            "'symmetric_memory' out, so that they are cut into pieces",
            SymmetricMemoryWarning,
            stacklevel=2,
        )
        return None
    return FusedCalls(
        gather_matmul=_compat.fused_all_gather_matmul,
        matmul_reduce_scatter=_compat.fused_matmul_reduce_scatter,
    )


def reason_against(group: Any, probe: Probe) -> str:
    """What stands against fused calls on some rank of a group, or ""; the same on all of them."""
    place: list[str] = []

    def alone() -> str:
        place.extend(probe.place())
        return probe.own()

    failed = _tried(alone)
    all_of: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(all_of, (failed, *place), group=group)
    if reason := next((found[0] for found in all_of if found[0]), ""):
        return str(reason)
    _, machines, devices = zip(*all_of, strict=True)
    if len(set(machines)) > 1:
        return f"its ranks are on {len(set(machines))} machines"
    if len(set(devices)) < len(devices):
        return "some of its ranks share a device"
    if reason := _first(group, _tried(lambda: probe.peers(devices))):
        return reason

    def met() -> str:
        probe.meet()
        return ""

    return _first(group, _tried(met))


def _first(group: Any, reason: str) -> str:
    """The first reason that any rank has."""
    reasons: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(reasons, reason, group=group)
    return next(filter(None, reasons), "")


def _tried(step: Callable[[], str]) -> str:
    try:
        return step()
    except Exception as error:  # whatever a driver or torch raises, the others must hear of it
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _probe(group: Any, device: torch.device) -> Probe:
    """Of a rank on CUDA."""
    index = torch.cuda.current_device() if device.index is None else device.index

    def own() -> str:
        capability = torch.cuda.get_device_capability(index)
        if capability < _LEAST_CAPABILITY:
            return f"its devices have compute capability {capability}, {_LEAST_CAPABILITY} is least"
        if not _compat.has_symmetric_memory(torch.device("cuda", index)):
            return f"torch {torch.__version__} has none for this device"
        return ""

    def peers(devices: Sequence[str]) -> str:
        visible = {_uuid(i): i for i in range(torch.cuda.device_count())}
        # a device that this process does not see cannot be asked about: meeting will tell
        others = [visible[d] for d in devices if d in visible and visible[d] != index]
        if all(torch.cuda.can_device_access_peer(index, other) for other in others):
            return ""
        return "a device cannot reach the memory of another"

    return Probe(
        place=lambda: (_machine(), _uuid(index)),
        own=own,
        peers=peers,
        meet=lambda: _compat.meet_in_symmetric_memory(group),
    )


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _machine() -> str:
    """The machine and the container: ranks hand each other files through /tmp, by process id."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    space, scratch = Path("/proc/self/ns/pid"), Path("/tmp")
    known = boot.read_text().strip() if boot.exists() else os.uname().nodename
    return f"{known} {os.readlink(space) if space.exists() else ''} {scratch.stat().st_ino}"
