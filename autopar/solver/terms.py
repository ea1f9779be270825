"""What the costs of a problem are sums of, so that other weights ask for no more than new sums.

Seconds of ops and of collectives that may hide count as much as a search says (`overlap`). States,
and what moves between them, are the same for all weights::

    node = (inner + compute · (seconds − inner)) · times
    edge = hideable · moved · times + compute · computed
    end  = hideable · moved · times

where `hideable` counts for what may hide alone.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from autopar.solver.discrete.problem import Array, ChoiceProblem
from autopar.solver.overlap import Weights

__all__ = ["Terms"]


@dataclass(frozen=True, slots=True)
class _Node:
    seconds: Array
    inner: Array | None  # of the seconds, those that count whatever the weights; None: all do
    times: float

    def weighted(self, weights: Weights) -> Array:
        cost = self.seconds
        if self.inner is not None:
            cost = self.inner + weights.compute * (cost - self.inner)
        return cost * self.times


@dataclass(frozen=True, slots=True)
class _Edge:
    moved: Array
    times: float | None  # of what may hide; None: `moved` counts as it is, whatever the weights
    computed: Array | None

    def weighted(self, weights: Weights) -> Array:
        cost = self.moved
        if self.times is not None:
            cost = cost * weights.hideable * self.times
        if self.computed is not None:
            cost = cost + self.computed * weights.compute
        return cost


@dataclass(slots=True)
class Terms:
    """The terms of a problem, in the order in which they are added up."""

    nodes: dict[Hashable, _Node] = field(default_factory=dict)
    edges: list[tuple[Hashable, Hashable, _Edge]] = field(default_factory=list)
    more: list[tuple[Hashable, Array, bool]] = field(default_factory=list)

    def node(
        self, key: Hashable, seconds: Array, times: float = 1, inner: Array | None = None
    ) -> None:
        """Seconds of each state, some times a step; with `inner`, more than these is compute."""
        self.nodes[key] = _Node(seconds, inner, times)

    def edge(
        self,
        i: Hashable,
        j: Hashable,
        moved: Array,
        times: float,
        may_hide: bool = False,
        computed: Array | None = None,
    ) -> None:
        """Seconds of moves between two nodes, and of compute that a move takes in a step."""
        edge = _Edge(moved if may_hide else moved * times, times if may_hide else None, computed)
        self.edges.append((i, j, edge))

    def end(self, key: Hashable, seconds: Array, may_hide: bool) -> None:
        """Seconds in which each state of a node is brought to what the caller gets."""
        self.more.append((key, seconds, may_hide))

    def problem(self, weights: Weights) -> ChoiceProblem:
        """The sums under some weights."""
        found = ChoiceProblem()
        for key, node in self.nodes.items():
            found.add_node(key, node.weighted(weights))
        for i, j, edge in self.edges:
            found.add_edge(i, j, edge.weighted(weights))
        for key, seconds, may_hide in self.more:
            found.costs[key] = found.costs[key] + seconds * (weights.hideable if may_hide else 1.0)
        return found
