"""Seconds of the optimizer's update of one rank's share of a parameter.

Each parameter, gradient and state is read, and all but gradients written, once: of N bytes of
parameter and S of states 3 N + 2 S bytes move. No launches are counted, as torch's optimizers take
many parameters in a few. What a rank holds whole it updates whole, so plans differ in it as in any
op. Where the states are in host memory, `offload.py` says what that adds.
"""

from __future__ import annotations

import numpy as np

from autopar.cost_model.compute import kernel_seconds
from autopar.cost_model.memory import Offloaded, dtype_bytes, optimizer_state_bytes
from autopar.cost_model.profile import DeviceProfile

__all__ = ["update_seconds"]


def update_seconds(
    device: DeviceProfile, optimizer: object, num_bytes: float, dtype: object
) -> float:
    """Seconds in which a device updates a shard, without what states on the host add.

    Args:
        device: whose memory is read and written.
        optimizer: as for `optimizer_state_bytes`, or an `Offloaded` one; None for no update.
        num_bytes: of the local shard of a trainable parameter.
        dtype: of the parameter.
    """
    if isinstance(optimizer, Offloaded):
        return update_seconds(device, optimizer.optimizer, num_bytes, dtype)
    if optimizer is None or not num_bytes:
        return 0.0
    states = optimizer_state_bytes(optimizer, int(num_bytes) // dtype_bytes(dtype), dtype)
    moved = np.array(3.0 * num_bytes + 2.0 * states)
    name = str(dtype).removeprefix("torch.")
    return float(kernel_seconds(device, "update", name, moved, launches=np.zeros(())))
