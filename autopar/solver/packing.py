"""Seconds of the copies that moves of parameters and gradients make, which are part of compute.

Collectives stack what ranks send: a shard of any dim but the first is copied into that order, and
out of it (`core.redistribute.copied_fractions`). Parameters lie in memory as their dims stand; what
is copied of activations, which need not, is known of the program.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autopar.core.placement import Layout
from autopar.core.redistribute import copied_fractions
from autopar.core.strategy import TensorSpec
from autopar.cost_model import Cluster, compute_seconds_array
from autopar.solver.discrete.problem import Array, Indices

__all__ = ["Packing", "alike", "packing_seconds"]

_LARGE = 1 << 10  # times the devices: no rank has a single element of such a dim


class Packing:
    """What redistributions of tensors of one shape copy, by the numbers of layouts.

    Args:
        shape: as `alike` has it.
        cluster: with the mesh.
    """

    def __init__(self, shape: tuple[int, ...], cluster: Cluster) -> None:
        self.shape = shape
        self.cluster = cluster
        self._table = np.full((64, 64), -1, dtype=np.intp)
        self._copies: list[tuple[float, ...]] = []
        self._number: dict[tuple[float, ...], int] = {}
        self._seconds: dict[tuple[int, TensorSpec], float] = {}

    def seconds(
        self, rows: Indices, columns: Indices, layouts: Sequence[Layout], spec: TensorSpec
    ) -> Array:
        """Seconds for each pair of numbers of layouts, (rows, columns)."""
        short = len(layouts) - len(self._table)
        if short > 0:
            wider = max(short, len(self._table))
            self._table = np.pad(self._table, (0, wider), constant_values=-1)
        at = np.ix_(rows, columns)
        for i, j in zip(*np.nonzero(self._table[at] < 0), strict=True):
            row, column = int(rows[i]), int(columns[j])
            pair = layouts[row], layouts[column]
            found = copied_fractions(*pair, self.shape, self.cluster.mesh_shape)
            if found not in self._number:
                self._number[found] = len(self._copies)
                self._copies.append(found)
            self._table[row, column] = self._number[found]
        numbers, inverse = np.unique(self._table[at], return_inverse=True)
        seconds = [self._seconds_of(n, spec) for n in numbers.tolist()]
        return np.array(seconds)[inverse.reshape(len(rows), len(columns))]

    def _seconds_of(self, number: int, spec: TensorSpec) -> float:
        key = number, spec
        if key not in self._seconds:
            self._seconds[key] = packing_seconds(self._copies[number], spec, self.cluster)
        return self._seconds[key]


def alike(shape: Sequence[int], devices: int) -> tuple[int, ...]:
    """The shape that stands for all of which the same is copied.

    Sizes matter where a rank may be left with a single element. Where a strided split leaves runs
    of one element of a larger dim, they are taken for longer ones.
    """
    return tuple(n if n <= devices else devices * _LARGE for n in shape)


def packing_seconds(fractions: Sequence[float], spec: TensorSpec, cluster: Cluster) -> float:
    """Seconds of copies of parts of a tensor, each read and written."""
    if not fractions or not spec.num_bytes:
        return 0.0
    moved = 2 * spec.num_bytes * np.array(fractions)
    dtype = str(spec.dtype).removeprefix("torch.")
    none = np.zeros(len(fractions))
    return math.fsum(compute_seconds_array(cluster.device, "memory", dtype, none, moved))
