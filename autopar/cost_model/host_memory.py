"""Memory of the machine at hand, as a process may use it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from autopar.cost_model.profile import DeviceProfile

__all__ = ["machine_memory_bytes", "with_live_memory"]

_GROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def machine_memory_bytes() -> int:
    """Physical memory, or what the container of this process may have of it."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in _GROUP_LIMITS:
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            total = min(total, int(text))
    return total


def with_live_memory(
    device: DeviceProfile, device_type: str, local_ranks: int, per_node: int
) -> DeviceProfile:
    """A device with the memory that this process can have; as it is where that is not known.

    Args:
        device: of a profile.
        device_type: torch's.
        local_ranks: processes of this node; 0 where nobody says.
        per_node: devices of a node, which share the host where nobody says.
    """
    machine = machine_memory_bytes()
    if device_type == "cuda":
        import torch

        if not torch.cuda.is_available():
            return device
        total = int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    elif device_type == "cpu" and local_ranks:
        total = machine // local_ranks
    else:
        return device
    live = dict.fromkeys(("memory_bytes", "host_memory_bytes"), "live")
    return replace(
        device,
        memory_bytes=total,
        host_memory_bytes=machine // (local_ranks or per_node),
        sources={**device.sources, **live},
    )
