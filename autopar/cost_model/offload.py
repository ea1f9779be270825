"""Optimizer states in host memory: what updating there costs (Ren et al. 2021, arXiv 2101.06840).

Parameter and gradient go down, the updated parameter comes up. With N bytes of parameter, S of
states, link bandwidth b and memory bandwidths h (host) and d (device):

    added seconds = 3 N / b + (3 N + 2 S) (1 / h − 1 / d)

Nothing of it is taken to overlap with the step.
"""

from __future__ import annotations

from autopar.cost_model.memory import Offloaded, dtype_bytes, optimizer_state_bytes
from autopar.cost_model.profile import DeviceProfile

__all__ = ["can_offload", "host_state_bytes", "offload_seconds"]


def can_offload(device: DeviceProfile) -> bool:
    """True where the host has memory of its own."""
    return device.host_bandwidth > 0


def host_state_bytes(optimizer: object, num_bytes: float, dtype: object) -> int:
    """Bytes of host memory for the states of a shard; 0 for an optimizer that is not offloaded."""
    if not isinstance(optimizer, Offloaded):
        return 0
    return optimizer_state_bytes(optimizer.optimizer, int(num_bytes) // dtype_bytes(dtype), dtype)


def offload_seconds(
    device: DeviceProfile, optimizer: object, num_bytes: float, dtype: object
) -> float:
    """What updating a shard on the host adds to a step.

    Args:
        device: with its link to the host. Without one, the device's memory is the host's, and
            what is copied is copied inside it.
        optimizer: adds nothing unless it is `Offloaded`.
        num_bytes: of the local shard of a trainable parameter.
        dtype: of the parameter.
    """
    if not isinstance(optimizer, Offloaded):
        return 0.0
    link = device.host_bandwidth or device.memory_bandwidth
    host = device.host_memory_bandwidth or device.memory_bandwidth
    moved = 3.0 * num_bytes + 2.0 * host_state_bytes(optimizer, num_bytes, dtype)
    slower = max(0.0, 1.0 / host - 1.0 / device.memory_bandwidth)
    return 3.0 * num_bytes / link + moved * slower
