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
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.solver.discrete.problem import Array, ChoiceProblem

__all__ = ["minimise"]

_MAX_ENTRIES = 1 << 24  # of all tables together: a fraction of a second


@dataclass(frozen=True, slots=True)
class _Table:
    """Costs over the states of some nodes, which are in the order of their elimination."""

    nodes: tuple[Hashable, ...]
    costs: Array

    def given(self, chosen: dict[Hashable, int]) -> Array:
        """The costs of the first node's states, where those of the others are chosen."""
        at: tuple[Any, ...] = (slice(None), *(chosen[node] for node in self.nodes[1:]))
        return np.asarray(self.costs[at])

    def over(self, nodes: tuple[Hashable, ...]) -> Array:
        """The table with an axis for each of `nodes`, of length 1 for those it does not have."""
        sizes = dict(zip(self.nodes, self.costs.shape, strict=True))
        return self.costs.reshape([sizes.get(node, 1) for node in nodes])


def minimise(
    problem: ChoiceProblem, max_entries: int = _MAX_ENTRIES
) -> tuple[float, dict[Hashable, int]] | None:
    """The least cost and an assignment of that cost; None if the tables would be too large.

    The cost is infinite where no assignment is possible.
    """
    order = _order(problem, max_entries)
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
    for node in order:
        tables = buckets[node]
        around = {other for table in tables for other in table.nodes if other != node}
        nodes = (node, *sorted(around, key=place.__getitem__))
        total = tables[0].over(nodes)
        # small tables first, as sums grow to the size of the largest
        for table in sorted(tables[1:], key=lambda t: t.costs.size):
            total = total + table.over(nodes)
        left = total.min(axis=0)
        if len(nodes) == 1:
            least += float(left)
        else:
            buckets[nodes[1]].append(_Table(nodes[1:], left))
    chosen: dict[Hashable, int] = {}
    for node in reversed(order):
        cost = np.zeros(len(problem.costs[node]))
        for table in buckets[node]:
            cost = cost + table.given(chosen)
        chosen[node] = int(cost.argmin())
    return least, chosen


def _order(problem: ChoiceProblem, max_entries: int) -> list[Hashable] | None:
    """Which node to eliminate when; None where the tables get more entries than that."""
    states = {node: len(costs) for node, costs in problem.costs.items()}
    around: dict[Hashable, dict[Hashable, None]] = {node: {} for node in states}
    for i, j in problem.edges:
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
        entries += efforts.pop(node)[1]
        if entries > max_entries:
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
