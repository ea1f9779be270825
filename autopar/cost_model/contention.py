"""Compute and a collective at once: the collective's kernel takes multiprocessors from compute."""

from __future__ import annotations

from autopar.cost_model.profile import DeviceProfile

__all__ = ["beside_s"]

# multiprocessors that a collective of NCCL takes beside FSDP's compute: 24 in the trace of
# https://forums.developer.nvidia.com/t/337991
_SENDING = 24


def beside_s(device: DeviceProfile, compute_s: float, comm_s: float) -> float:
    """Seconds until both are done, of parts that start together.

    Args:
        device: one without a number of multiprocessors loses nothing.
        compute_s, comm_s: of each alone.
    """
    all_of_them = device.multiprocessors
    taken = min(0.5, _SENDING / all_of_them) if all_of_them else 0.0
    # at the lower rate until the communication ends, at the full rate after it
    return max(comm_s, compute_s + taken * min(comm_s, compute_s / (1 - taken)))
