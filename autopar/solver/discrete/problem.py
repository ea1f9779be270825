"""The discrete problem that planning is: one state per node, a cost per state and per edge.

    minimise    Σ_i cost_i[s_i] + Σ_(i,j) C_ij[s_i, s_j]

A node is an op (or a class of identical ops) and a state one of its strategies; an edge is a
tensor between two ops and C the seconds of its redistribution. `inf` marks what cannot be. Memory
is in rows of their own.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

__all__ = ["Array", "Assignment", "ChoiceProblem", "Indices", "Row", "evaluate"]

Array = NDArray[np.float64]
Indices = NDArray[np.intp]
Assignment = Mapping[Hashable, int]


@dataclass(slots=True)
class ChoiceProblem:
    """Nodes with a cost per state, and edges with a cost matrix.

    Attributes:
        costs: seconds of each state, by node.
        edges: cost matrix by `(i, j)`, states of `i` along rows; each pair at most once.
    """

    costs: dict[Hashable, Array] = field(default_factory=dict)
    edges: dict[tuple[Hashable, Hashable], Array] = field(default_factory=dict)

    def add_node(self, key: Hashable, cost: Array) -> None:
        """Add a node; a second one under the same key is an error."""
        assert key not in self.costs, f"node {key} is there already"
        self.costs[key] = np.asarray(cost, dtype=np.float64)

    def add_edge(self, i: Hashable, j: Hashable, matrix: Array) -> None:
        """Add the cost of a pair; pairs add up, and a pair of a node with itself is its cost."""
        if i == j:
            self.costs[i] = self.costs[i] + np.diagonal(matrix)
        elif (j, i) in self.edges:
            self.edges[j, i] = self.edges[j, i] + matrix.T
        elif (i, j) in self.edges:
            self.edges[i, j] = self.edges[i, j] + matrix
        else:
            self.edges[i, j] = matrix  # no table is written to

    def copy(self) -> ChoiceProblem:
        """A copy whose dicts may be changed; arrays are shared."""
        return ChoiceProblem(dict(self.costs), dict(self.edges))


@dataclass(slots=True)
class Row:
    """Live bytes at one op: a constant, and bytes by state of nodes and of pairs of nodes."""

    constant: float = 0.0
    nodes: dict[Hashable, Array] = field(default_factory=dict)
    edges: dict[tuple[Hashable, Hashable], Array] = field(default_factory=dict)

    def add(self, node: Hashable, num_bytes: Array) -> None:
        """Count bytes of a node's states."""
        known = self.nodes.get(node)
        self.nodes[node] = num_bytes if known is None else known + num_bytes

    def add_pair(self, i: Hashable, j: Hashable, num_bytes: Array) -> None:
        """Count bytes of a pair's states; of a node with itself, those of the node."""
        if i == j:
            self.add(i, np.diagonal(num_bytes))
        elif (j, i) in self.edges:
            self.edges[j, i] = self.edges[j, i] + num_bytes.T
        else:
            known = self.edges.get((i, j))
            self.edges[i, j] = num_bytes if known is None else known + num_bytes

    def add_row(self, other: Row, times: int = 1) -> None:
        """Count all that another row counts, some times."""
        self.constant += times * other.constant
        for node, num_bytes in other.nodes.items():
            self.add(node, times * num_bytes)
        for (i, j), num_bytes in other.edges.items():
            self.add_pair(i, j, times * num_bytes)

    def among(self, keep: Mapping[Hashable, Indices]) -> Row:
        """The row over some of the states of each node."""
        return Row(
            self.constant,
            {n: b[keep[n]] for n, b in self.nodes.items()},
            {(i, j): b[np.ix_(keep[i], keep[j])] for (i, j), b in self.edges.items()},
        )

    def value(self, chosen: Assignment) -> float:
        """Bytes of an assignment."""
        total = self.constant + sum(float(b[chosen[n]]) for n, b in self.nodes.items())
        return total + sum(float(b[chosen[i], chosen[j]]) for (i, j), b in self.edges.items())

    def price_into(self, problem: ChoiceProblem, seconds_per_byte: float) -> None:
        """Add the bytes, at a price, to a problem's costs."""
        for node, num_bytes in self.nodes.items():
            problem.costs[node] = problem.costs[node] + seconds_per_byte * num_bytes
        for (i, j), num_bytes in self.edges.items():
            problem.add_edge(i, j, seconds_per_byte * num_bytes)


def evaluate(problem: ChoiceProblem, chosen: Assignment) -> float:
    """Seconds of an assignment, summed from the problem's own numbers."""
    cost = sum(float(costs[chosen[key]]) for key, costs in problem.costs.items())
    return cost + sum(float(m[chosen[i], chosen[j]]) for (i, j), m in problem.edges.items())
