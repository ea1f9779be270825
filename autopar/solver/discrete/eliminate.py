"""The exact optimum of a problem, by eliminating one node after the other.

Eliminating node i replaces all tables that have it by one over its neighbours,

    θ_N(i)[t] = min_s Σ_(tables with i) θ[s, t],

which is dynamic programming over a tree decomposition of the graph (Bertelè and Brioschi 1972;
Dechter 1999, "Bucket elimination"). The tables stay small where the graph is near a tree and nodes
have few states, as on meshes of one axis; elsewhere the order says so before any is made. Nodes go
in the order of the least fill-in, weighted by the states that it joins.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from autopar.solver.discrete.problem import Array, ChoiceProblem, Indices

__all__ = ["MAX_ENTRIES", "MOST_ENTRIES", "is_narrow", "minimise"]

_BLOCK = 1 << 18  # entries that are summed at once: they stay in the processor's caches
_MAX_TABLE = 1 << 24  # entries that are left of one table

MAX_ENTRIES = 1 << 24
"""Entries of all tables together that take a fraction of a second."""

MOST_ENTRIES = 3 << 30
"""Entries that take some seconds."""


@dataclass(frozen=True, slots=True)
class _Table:
    """Costs over the states of some nodes, which are in the order of their elimination."""

    nodes: tuple[Hashable, ...]
    costs: Array

    def over(self, nodes: tuple[Hashable, ...]) -> Array:
        """The table with an axis for each of `nodes`, of length 1 for those it does not have."""
        sizes = dict(zip(self.nodes, self.costs.shape, strict=True))
        return self.costs.reshape([sizes.get(node, 1) for node in nodes])


def minimise(
    problem: ChoiceProblem, max_entries: int = MAX_ENTRIES
) -> tuple[float, dict[Hashable, int]] | None:
    """The least cost and an assignment of that cost; None if the tables would be too large.

    The cost is infinite where no assignment is possible.
    """
    states = {node: len(costs) for node, costs in problem.costs.items()}
    order = _order(states, problem.edges, max_entries)
    if order is None:
        return None
    place = {node: k for k, node in enumerate(order)}
    buckets: dict[Hashable, list[_Table]] = {n: [_Table((n,), problem.costs[n])] for n in order}
    for (i, j), matrix in problem.edges.items():
        if place[i] < place[j]:
            buckets[i].append(_Table((i, j), matrix))
        else:
            buckets[j].append(_Table((j, i), matrix.T))
    least = 0.0
    best: dict[Hashable, tuple[tuple[Hashable, ...], Indices]] = {}
    for node in order:
        tables = buckets.pop(node)
        around = {other for table in tables for other in table.nodes if other != node}
        nodes = (node, *sorted(around, key=place.__getitem__))
        # small tables first, as sums grow to the size of the largest
        tables.sort(key=lambda t: t.costs.size)
        left, where = _without([table.over(nodes) for table in tables])
        best[node] = nodes[1:], where
        if len(nodes) == 1:
            least += float(left)
        else:
            buckets[nodes[1]].append(_Table(nodes[1:], left))
    chosen: dict[Hashable, int] = {}
    for node in reversed(order):
        others, where = best[node]
        chosen[node] = int(where[tuple(chosen[other] for other in others)])
    return least, chosen


def _without(tables: Sequence[Array]) -> tuple[Array, Indices]:
    """The least sum of some tables along their first axis, and where that is."""
    shape = np.broadcast_shapes(*(table.shape for table in tables))
    whole = 0  # axes behind the first, of which one index is taken at a time; the last is not
    while shape[0] * math.prod(shape[1 + whole :]) > _BLOCK and whole + 2 < len(shape):
        whole += 1
    if not whole:
        total = reduce(np.add, tables)
        return total.min(axis=0), total.argmin(axis=0)
    left = np.empty(shape[1:])
    states: Indices = np.zeros(shape[1:], dtype=np.min_scalar_type(shape[0]))
    for at in np.ndindex(shape[1 : 1 + whole]):
        total = reduce(np.add, (_part(table, at) for table in tables))
        least = left[at] = total.min(axis=0)
        where = states[at]
        for state in range(shape[0] - 1, -1, -1):  # the first that is as good stays
            np.copyto(where, state, where=total[state] == least)
    return left, states


def _part(table: Array, at: Sequence[int]) -> Array:
    """What a table has at some indices of the axes behind the first."""
    return table[(slice(None), *(i * (n > 1) for i, n in zip(at, table.shape[1:], strict=False)))]


def is_narrow(
    states: Mapping[Hashable, int], pairs: Iterable[tuple[Hashable, Hashable]], max_entries: int
) -> bool:
    """True if a problem with so many states of each node has tables of no more entries."""
    return _order(states, pairs, max_entries) is not None


def _order(
    states: Mapping[Hashable, int], pairs: Iterable[tuple[Hashable, Hashable]], max_entries: int
) -> list[Hashable] | None:
    """Which node to eliminate when; None where the tables get more entries than that."""
    around: dict[Hashable, dict[Hashable, None]] = {node: {} for node in states}
    for i, j in pairs:
        around[i][j] = around[j][i] = None

    def effort(node: Hashable) -> tuple[int, int]:
        others = list(around[node])
        fill = 0
        for k, a in enumerate(others):
            beside = around[a]
            for b in others[:k]:
                if b not in beside:
                    fill += states[a] * states[b]
        return fill, math.prod([states[n] for n in others]) * states[node]

    place = {node: k for k, node in enumerate(states)}
    efforts = {node: effort(node) for node in states}
    queue = [(*efforts[node], place[node], node) for node in states]
    heapq.heapify(queue)
    order: list[Hashable] = []
    entries = 0
    while queue:
        *least, _, node = heapq.heappop(queue)
        if efforts.get(node) != tuple(least):
            continue  # eliminated, or another effort by now
        size = efforts.pop(node)[1]
        entries += size
        if entries > max_entries or size > _MAX_TABLE * states[node]:
            return None
        order.append(node)
        others = list(around.pop(node))
        near = dict.fromkeys(others)
        for other in others:
            del around[other][node]
        for k, a in enumerate(others):
            for b in others[:k]:
                if b not in around[a]:
                    around[a][b] = around[b][a] = None
                    near.update((n, None) for n in around[a] if n in around[b])
        for n in near:
            efforts[n] = effort(n)
            heapq.heappush(queue, (*efforts[n], place[n], n))
    return order
