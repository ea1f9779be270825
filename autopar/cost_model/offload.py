"""Optimizer states in host memory: what updating there costs (Ren et al. 2021, arXiv 2101.06840).

Parameter and gradient go down, the host updates, the new parameter comes up: a pipeline of three
stages over buckets of parameters, each with a bandwidth of its own. With N bytes of parameter, S of
states, link bandwidth b each way and memory bandwidths h (host) and d (device), of each parameter

    added seconds = max(2 N / b, (3 N + 2 S) / h, N / b) − (3 N + 2 S) / d,  0 at least

Which stage is the slowest depends on S / N alone, so with one optimizer and dtype it is the same
for all, and the sum of these is the time of the slowest stage. Not counted: the first bucket's way
down and the last one's way up, which nothing hides.

Optimizers that need more than each element's own values take everything down, update and bring
everything up, and where the host's memory is the device's, copies are not beside anything:

    added seconds = 3 N / b + (3 N + 2 S) (1 / h − 1 / d)
"""

from __future__ import annotations

from autopar.cost_model.memory import Offloaded, dtype_bytes, optimizer_name, optimizer_state_bytes
from autopar.cost_model.profile import DeviceProfile

__all__ = ["ELEMENTWISE", "can_offload", "host_state_bytes", "offload_seconds"]

# optimizers of torch that the runtime steps bucket by bucket, by name
ELEMENTWISE = frozenset(
    {
        "adadelta",
        "adagrad",
        "adam",
        "adamax",
        "adamw",
        "asgd",
        "nadam",
        "radam",
        "rmsprop",
        "rprop",
        "sgd",
    }
)


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
    if can_offload(device) and optimizer_name(optimizer.optimizer) in ELEMENTWISE:
        slowest = max(2.0 * num_bytes / link, moved / host)
        return max(0.0, slowest - moved / device.memory_bandwidth)
    slower = max(0.0, 1.0 / host - 1.0 / device.memory_bandwidth)
    return 3.0 * num_bytes / link + moved * slower
