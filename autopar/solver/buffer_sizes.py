"""Bytes that a device holds of a buffer, and of its copies on the way, by its layouts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.core.placement import Layout, shard_factor
from autopar.core.redistribute import packing_fraction, path
from autopar.core.strategy import TensorSpec
from autopar.solver.discrete.problem import Array
from autopar.solver.moves import MoveCosts

__all__ = ["BufferSizes"]


class BufferSizes:
    """Sizes of buffers in each of some layouts.

    Args:
        moves: redistributions on the mesh.
        granularity_bytes: buffers are rounded up to it.
    """

    def __init__(self, moves: MoveCosts, granularity_bytes: int) -> None:
        self.moves = moves
        self.granularity = granularity_bytes
        self.mesh = moves.cluster.mesh_shape
        self._sizes: dict[tuple[int, Layout], float] = {}
        self._fractions: dict[tuple[Layout, Layout], float] = {}

    def of(self, spec: TensorSpec, layouts: Sequence[Layout]) -> Array:
        """Bytes of one device's share in each layout, (layouts,)."""
        out = np.empty(len(layouts))
        for index, layout in enumerate(layouts):
            key = (spec.num_bytes, layout)
            known = self._sizes.get(key)
            if known is None:
                share = spec.num_bytes / shard_factor(layout, self.mesh)
                known = -(-share // self.granularity) * self.granularity
                self._sizes[key] = known
            out[index] = known
        return out

    def packed(
        self, sources: Sequence[Layout], wanted: Sequence[Layout], spec: TensorSpec
    ) -> Array:
        """Bytes that a redistribution packs into another order on its way, (sources, wanted)."""
        rows, columns = list(dict.fromkeys(sources)), list(dict.fromkeys(wanted))
        small = np.array([[self._fraction(s, t) for t in columns] for s in rows])
        at = np.ix_([rows.index(s) for s in sources], [columns.index(t) for t in wanted])
        return np.asarray(small[at] * spec.num_bytes)

    def moved(self, sources: Sequence[Layout], wanted: Sequence[Layout], spec: TensorSpec) -> Array:
        """Where a redistribution sends something, and so has a buffer of its own."""
        seconds = self.moves.matrix(sources, wanted, spec.num_bytes)
        return np.asarray(np.isfinite(seconds) & (seconds > 0))

    def _fraction(self, src: Layout, dst: Layout) -> float:
        key = (src, dst)
        if key not in self._fractions:
            self._fractions[key] = packing_fraction(path(src, dst, self.mesh) or ())
        return self._fractions[key]
