"""Ops that the lowering of a variant runs in place of the one that was traced."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from autopar.cost_model import DeviceProfile, compute_seconds_array

__all__ = ["LocalWork"]


class LocalWork(NamedTuple):
    """Ops of one kind: how many, and what each does on a device."""

    op_class: str
    times: int
    num_bytes: float
    flops: float = 0.0

    def seconds(self, device: DeviceProfile, dtype: str) -> float:
        """Of all of them, one after the other."""
        if not self.times:
            return 0.0
        flops, num_bytes = np.array(self.flops), np.array(self.num_bytes)
        each = compute_seconds_array(device, self.op_class, dtype, flops, num_bytes)
        return self.times * float(each)
