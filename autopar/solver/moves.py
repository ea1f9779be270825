"""Seconds of redistributions, by the layouts at both ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from autopar.core.placement import Layout
from autopar.core.redistribute import canonical, canonical_path
from autopar.core.strategy import TensorSpec
from autopar.cost_model import Cluster, CollectiveKind, bucketed_latency
from autopar.solver.discrete.problem import Array, Indices
from autopar.solver.packing import Packing, alike
from autopar.solver.step import ALONE, Bucket

__all__ = ["KEPT", "MoveCosts"]

KEPT = 1 << 12
"""Entries of a matrix that is kept for the next one who asks: larger ones would fill the memory."""

_Key: TypeAlias = tuple[tuple[Layout, ...], tuple[Layout, ...], float, Bucket]


class MoveCosts:
    """Seconds of redistributions: latency and time per byte of the whole tensor.

    Layouts are numbered, and a table by these numbers holds what is known: plans on three mesh axes
    ask for a million pairs of layouts, of which few differ. What may go in buckets is priced move
    by move, from tables of its own.

    Whether a move is possible depends on which dims are equal, and of a strided split on whether it
    is the one inside later axes that split the same dim: pairs that are alike in this are one.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._number: dict[Layout, int] = {}
        self._layouts: list[Layout] = []
        self._table = np.full((2, 64, 64), np.nan)  # latency and per byte
        # of each layout by axis: the dim that is split or -1, the split, and the number of the rest
        self._dims: list[list[int]] = []
        self._splits: list[list[int]] = []
        self._forms: list[list[int]] = []
        self._form_of: dict[tuple[str, bool], int] = {}
        self._alike: dict[bytes, tuple[float, float]] = {}
        self._inner = _products_of_later(cluster.mesh_shape)
        self._canonical: dict[tuple[Layout, Layout], tuple[tuple[str, float, float], ...]] = {}
        self._links: dict[tuple[str, int], tuple[float, float]] = {}
        self._packing: dict[tuple[int, ...], Packing] = {}
        self._tables: dict[tuple[tuple[Layout, ...], tuple[Layout, ...], Bucket], Array] = {}
        self._matrices: dict[_Key, Array] = {}

    def _price(self, src: Layout, dst: Layout) -> tuple[float, float]:
        """`(a, b)` of a + b · bytes; infinite where there is no way."""
        moves = self.coefficients(src, dst)
        return sum(a for _, a, _ in moves), sum(b for _, _, b in moves)

    def coefficients(self, src: Layout, dst: Layout) -> tuple[tuple[str, float, float], ...]:
        """Kind, and `(a, b)` of a + b · bytes, of each move; infinite where there is no way."""
        if any(d.is_partial and not s.is_partial for s, d in zip(src, dst, strict=True)):
            return (("", np.inf, 0.0),)
        plain = canonical(src, dst)[:2]
        if plain not in self._canonical:
            self._canonical[plain] = self._price_canonical(*plain)
        return self._canonical[plain]

    def _price_canonical(self, src: Layout, dst: Layout) -> tuple[tuple[str, float, float], ...]:
        moves = canonical_path(src, dst, self.cluster.mesh_shape)
        if moves is None:
            return (("", np.inf, 0.0),)
        found: list[tuple[str, float, float]] = []
        for move in moves:
            if move.kind == "slice" or self.cluster.mesh_shape[move.axis] == 1:
                continue
            alpha, beta = self._link(move.kind, move.axis)
            found.append((move.kind, alpha, beta * move.fraction))
        return tuple(found)

    def _link(self, kind: str, axis: int) -> tuple[float, float]:
        if (kind, axis) not in self._links:
            self._links[kind, axis] = self.cluster.alpha_beta(CollectiveKind(kind), axis)
        return self._links[kind, axis]

    def _numbers(self, layouts: Sequence[Layout]) -> Indices:
        for layout in layouts:
            if layout not in self._number:
                self._number[layout] = len(self._layouts)
                self._layouts.append(layout)
                self._dims.append([p.dim if p.is_shard else -1 for p in layout])
                # a split that is inside no later axes is a negative number
                self._splits.append(
                    [
                        p.split if p.split in self._inner[a] else -p.split
                        for a, p in enumerate(layout)
                    ]
                )
                forms = [(p.kind, p.own) for p in layout]
                known = self._form_of
                self._forms.append([known.setdefault(form, len(known)) for form in forms])
        while len(self._layouts) > self._table.shape[1]:
            size = self._table.shape[1]
            self._table = np.pad(
                self._table, ((0, 0), (0, size), (0, size)), constant_values=np.nan
            )
        return np.array([self._number[layout] for layout in layouts], dtype=np.intp)

    def matrix(
        self,
        sources: Sequence[Layout],
        targets: Sequence[Layout],
        num_bytes: float,
        bucket: Bucket = ALONE,
    ) -> Array:
        """Seconds from each source layout to each target layout.

        Args:
            sources, targets: layouts.
            num_bytes: of the whole tensor.
            bucket: what the tensor's moves may be joined with; see `Cluster.bucketed_seconds`.
        """
        if len(sources) * len(targets) > KEPT:
            return self._matrix(sources, targets, num_bytes, bucket)
        key = tuple(sources), tuple(targets), num_bytes, bucket
        known = self._matrices.get(key)
        if known is None:
            known = self._matrices[key] = self._matrix(sources, targets, num_bytes, bucket)
            known.setflags(write=False)
        return known

    def _matrix(
        self, sources: Sequence[Layout], targets: Sequence[Layout], num_bytes: float, bucket: Bucket
    ) -> Array:
        if not num_bytes:  # nothing is sent of an empty tensor, and takes no time
            known = self.matrix(sources, targets, 1.0)
            return np.where(np.isfinite(known), 0.0, np.inf)
        if bucket.count > 1:
            return self._bucketed(sources, targets, num_bytes, bucket)
        at = np.ix_(self._numbers(sources), self._numbers(targets))
        unknown = np.isnan(self._table[0][at])
        if unknown.any():
            i, j = np.nonzero(unknown)
            self._fill(at[0].ravel()[i], at[1].ravel()[j])
        found: Array = self._table[0][at] + self._table[1][at] * num_bytes
        return found

    def packing(
        self, sources: Sequence[Layout], targets: Sequence[Layout], spec: TensorSpec
    ) -> Array:
        """Seconds of copies on the way from each source layout to each target layout.

        Args:
            sources, targets: layouts.
            spec: of the whole tensor.
        """
        shape = alike(spec.shape, self.cluster.num_devices)
        if shape not in self._packing:
            self._packing[shape] = Packing(shape, self.cluster)
        rows, columns = self._numbers(sources), self._numbers(targets)
        return self._packing[shape].seconds(rows, columns, self._layouts, spec)

    def _fill(self, sources: Indices, targets: Indices) -> None:
        """Price pairs of layouts, of those that are alike one."""
        codes = self._codes(sources, targets)
        key = np.zeros(len(codes), dtype=np.int64)
        base = int(codes.max()) + 1
        for column in codes.T:
            if (int(key.max()) + 1) * base >= 1 << 62:
                key = np.unique(key, return_inverse=True)[1]
            key = key * base + column
        _, samples, alike = np.unique(key, return_index=True, return_inverse=True)
        prices = []
        for k in samples:
            name = codes[k].tobytes()
            if name not in self._alike:
                src, dst = self._layouts[int(sources[k])], self._layouts[int(targets[k])]
                self._alike[name] = self._price(src, dst)
            prices.append(self._alike[name])
        self._table[:, sources, targets] = np.array(prices).T[:, alike.ravel()]

    def _codes(self, sources: Indices, targets: Indices) -> Indices:
        """Numbers of pairs of layouts, equal where their moves are, (pairs, placements)."""
        dims, splits, forms = (
            np.concatenate([table[sources], table[targets]], axis=1)
            for table in map(np.array, (self._dims, self._splits, self._forms))
        )
        width = dims.shape[1]
        axis = np.arange(width) % (width // 2)
        same_dim = dims[:, :, None] == dims[:, None, :]
        same_split = splits[:, :, None] == splits[:, None, :]
        alone = (~same_dim | (same_split & (axis[:, None] == axis))).all(axis=2)
        # the first place with the same dim, or split, tells which are equal
        foreign = -1 - (same_dim & same_split).argmax(axis=2)
        splits = np.where(alone, 1, np.where(splits < 0, foreign, splits)) + width
        first = same_dim.argmax(axis=2)
        found: Indices = ((splits * len(self._form_of) + forms) * width + first).astype(np.int64)
        return found

    def _bucketed(
        self, sources: Sequence[Layout], targets: Sequence[Layout], num_bytes: float, bucket: Bucket
    ) -> Array:
        rows, columns = tuple(dict.fromkeys(sources)), tuple(dict.fromkeys(targets))
        if (rows, columns, bucket) not in self._tables:
            self._tables[rows, columns, bucket] = self._move_table(rows, columns, bucket)
        latency, per_byte, shared = self._tables[rows, columns, bucket]
        spent = per_byte * num_bytes
        small = (spent + bucketed_latency(latency, spent, shared)).sum(axis=2)
        row_of = {layout: i for i, layout in enumerate(rows)}
        column_of = {layout: j for j, layout in enumerate(columns)}
        return np.asarray(
            small[np.ix_([row_of[s] for s in sources], [column_of[t] for t in targets])]
        )

    def _move_table(
        self, rows: Sequence[Layout], columns: Sequence[Layout], bucket: Bucket
    ) -> Array:
        """Latency, seconds per byte and sharers of each move of each pair; 0 s behind the last."""
        pairs = [[self.coefficients(src, dst) for dst in columns] for src in rows]
        most = max((len(moves) for row in pairs for moves in row), default=0)
        table = np.zeros((3, len(rows), len(columns), most))
        table[2] = 1
        for i, row in enumerate(pairs):
            for j, moves in enumerate(row):
                for m, (kind, alpha, beta) in enumerate(moves):
                    table[:, i, j, m] = alpha, beta, bucket.shared(kind, m)
        return table


def _products_of_later(mesh_shape: Sequence[int]) -> list[set[int]]:
    """Of each axis, the products of sizes of axes behind it, that of none among them."""
    found: list[set[int]] = []
    products = {1}
    for size in reversed(mesh_shape):
        found.append(products)
        products = products | {size * p for p in products}
    return found[::-1]
