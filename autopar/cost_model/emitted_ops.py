"""Seconds of the ops of an emitted program, by the curves of a device."""

from __future__ import annotations

import numpy as np
from torch import fx

from autopar.core.emitted_work import emitted_work
from autopar.cost_model.compute import compute_seconds_array
from autopar.cost_model.profile import DeviceProfile

__all__ = ["node_seconds"]


def node_seconds(node: fx.Node, device: DeviceProfile) -> float:
    """Seconds of one emitted op by the device's curves."""
    work = emitted_work(node)
    if work is None:
        return 0.0
    if work.op_class == "view":
        return device.view_overhead_s
    seconds = compute_seconds_array(
        device, work.op_class, work.dtype, np.array(work.flops), np.array(work.moved), work.steps
    )
    return float(seconds)
