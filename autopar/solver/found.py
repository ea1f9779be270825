"""Plans that a search has met."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from autopar.solver.discrete.ilp import Solution
from autopar.solver.discrete.problem import Assignment
from autopar.solver.price import Decision, Price
from autopar.solver.row_at import HOST_ROW, RowAt

__all__ = ["Fit", "Met"]


@dataclass(frozen=True, slots=True)
class Fit:
    """A plan with its price and its proof.

    `host_scale` is what a byte of host memory counts: 0, or the device's limit over the host's.
    """

    solution: Solution
    decision: Decision
    price: Price
    host_scale: float = 0.0

    @property
    def peak(self) -> int:
        """Bytes of the device, or of the host on its scale where these are nearer to the limit."""
        return max(self.price.peak.peak_bytes, self._on_host)

    @property
    def row(self) -> RowAt:
        """The moment of the peak."""
        return HOST_ROW if self._on_host > self.price.peak.peak_bytes else self.price.peak_at

    @property
    def _on_host(self) -> int:
        return math.ceil(self.host_scale * self.price.host_bytes - 1e-6) if self.host_scale else 0


class Met(NamedTuple):
    """A plan met on the way: its peak is that of the rows known, where it was not priced."""

    chosen: Assignment
    seconds: float
    peak: float
