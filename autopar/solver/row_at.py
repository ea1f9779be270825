"""The moments of a step that rows of memory are of (`liveness`)."""

from __future__ import annotations

from typing import NamedTuple

from autopar.core.flights import ALL

__all__ = ["HOST_ROW", "RowAt"]


class RowAt(NamedTuple):
    """While one op of a microbatch runs.

    Attributes:
        position: of the op in the order; before all if negative.
        sums: of gradients that there are when the microbatch begins (`core.flights`).
    """

    position: int
    sums: int = ALL


HOST_ROW = RowAt(-(1 << 30))
"""Of host memory: of no op."""
