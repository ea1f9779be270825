"""Lower bounds and good assignments by sequential message passing, and states that they rule out.

Costs are moved between nodes and edges without changing any assignment's total, so that

    bound = Σ_i min_s θ_i[s] + Σ_(i,j) min_(s,t) θ_ij[s, t]

rises. This is SRMP for pairs, equal to TRW-S (Kolmogorov 2006; Kolmogorov 2015, arXiv 1309.5655):
a node collects what its edges can give, and hands equal parts to the edges that come next in the
sweep. Each sweep also labels the nodes greedily, which gives an upper bound. A state whose least
possible total exceeds the upper bound is in no better assignment and is dropped.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.solver.discrete.problem import Array, ChoiceProblem, Indices, evaluate
from autopar.solver.discrete.time_limit import check_time

__all__ = ["Bounds", "MessagePassing"]

_CHECK_EVERY = 5
_FEWER = 0.7  # of the states: then the rest is left behind
_STALLED = 3  # checks in a row that raise the bound by next to nothing


@dataclass(slots=True)
class Bounds:
    """What message passing found out.

    Attributes:
        lower: no assignment costs less.
        upper: cost of `chosen`, infinite if none was found.
        chosen: the best assignment seen.
        keep: per node, the states that could still be in a better one.
        latest: the last labels, which may be impossible together.
    """

    lower: float
    upper: float
    chosen: dict[Hashable, int]
    keep: dict[Hashable, Indices]
    latest: dict[Hashable, int] = field(default_factory=dict)

    @property
    def gap(self) -> float:
        """(upper - lower) / upper; infinite where no assignment is known."""
        if np.isinf(self.upper):
            return np.inf
        return (self.upper - self.lower) / max(abs(self.upper), 1e-9)


_Edge = tuple[Hashable, Array]
_Visit = tuple[Array, Array, list[Array], list[Array], float]


class _Messages:
    """Costs that messages have moved, of the states that are still open.

    Between a backward sweep and the next forward one the least entry of each row of a table is 0.

    Attributes:
        problem: the original costs of these; an edge goes from the earlier to the later node.
        theta, tables: the moved costs of nodes and edges.
        kept: the original states of each node.
        base, offset: what nodes with one open state, which are settled, cost; and as moved.
    """

    def __init__(self, problem: ChoiceProblem) -> None:
        finite = sum(float(np.max(c[np.isfinite(c)], initial=0.0)) for c in problem.costs.values())
        finite += sum(float(np.max(m[np.isfinite(m)], initial=0.0)) for m in problem.edges.values())
        big = 10.0 * finite + 1.0
        order = {node: k for k, node in enumerate(problem.costs)}
        edges = {
            (i, j) if order[i] < order[j] else (j, i): m if order[i] < order[j] else m.T
            for (i, j), m in problem.edges.items()
        }
        self.problem = ChoiceProblem(problem.costs, edges)
        self.theta = {n: np.where(np.isfinite(c), c, big) for n, c in problem.costs.items()}
        self.tables = {pair: np.where(np.isfinite(m), m, big) for pair, m in edges.items()}
        self.kept: dict[Hashable, Indices] = {n: np.arange(len(c)) for n, c in self.theta.items()}
        self.base = self.offset = 0.0
        self._connect()

    def _connect(self) -> None:
        """Who is beside whom, and what a sweep does at each node, one way and the other."""
        self.nodes = list(self.problem.costs)
        self.after: dict[Hashable, list[_Edge]] = {n: [] for n in self.nodes}
        self.before: dict[Hashable, list[_Edge]] = {n: [] for n in self.nodes}
        self.around: dict[Hashable, list[_Edge]] = {n: [] for n in self.nodes}
        for (a, b), table in self.tables.items():
            self.after[a].append((b, table))
            self.before[b].append((a, table))
            matrix = self.problem.edges[a, b]
            self.around[a].append((b, matrix))
            self.around[b].append((a, matrix.T))
        self.forward = [self._visit(node, 0) for node in self.nodes]
        self.backward = [self._visit(node, 1) for node in reversed(self.nodes)]
        for (a, _), table in self.tables.items():  # as a backward sweep leaves them
            least = table.min(axis=1)
            self.theta[a] += least
            table -= least[:, None]

    def _visit(self, node: Hashable, axis: int) -> _Visit:
        """Its costs along edges to nodes visited before, and after; these edges; the share of each.

        What the edges hold is along `axis` for the former.
        """
        theta = self.theta[node]
        row, column = theta[None, :], theta[:, None]
        before, after = ([edge for _, edge in x[node]] for x in (self.before, self.after))
        share = 1.0 / max(len(before), len(after), 1)
        if axis == 0:
            return row, column, before, after, share
        return column, row, after, before, share

    @property
    def num_states(self) -> int:
        """Of nodes that are not settled."""
        return sum(map(len, self.theta.values()))

    def restrict(self, keep: Mapping[Hashable, Indices]) -> None:
        """Go on with some states of each node; what messages have moved stays moved."""
        costs = {n: self.problem.costs[n][keep[n]] for n in self.nodes}
        theta = {n: self.theta[n][keep[n]] for n in self.nodes}
        edges, tables = self.problem.edges, self.tables
        self.kept.update((n, self.kept[n][keep[n]]) for n in self.nodes)
        self.problem, self.theta, self.tables = ChoiceProblem(costs), theta, {}
        for (a, b), table in tables.items():
            at = np.ix_(keep[a], keep[b])
            own, moved = edges[a, b][at], table[at]
            if len(costs[a]) > 1 < len(costs[b]):
                self.problem.edges[a, b], self.tables[a, b] = own, moved
            elif len(costs[b]) > 1:
                costs[b], theta[b] = costs[b] + own[0], theta[b] + moved[0]
            else:
                costs[a], theta[a] = costs[a] + own[:, 0], theta[a] + moved[:, 0]
        for node in self.nodes:
            if len(costs[node]) == 1:
                self.base += float(costs.pop(node)[0])
                self.offset += float(theta.pop(node)[0])
        self._connect()

    def whole(self, chosen: Mapping[Hashable, int]) -> dict[Hashable, int]:
        """Original states of all nodes from those of the nodes that are not settled."""
        return {node: int(states[chosen.get(node, 0)]) for node, states in self.kept.items()}

    def sweep(self, forward: bool) -> None:
        """Nodes collect from their edges to nodes visited before, and hand on to the others."""
        axis = 0 if forward else 1
        least_of, add, subtract = np.minimum.reduce, np.add, np.subtract
        for inwards, outwards, collected, others, share in (
            self.forward if forward else self.backward
        ):
            for edge in collected:
                least = least_of(edge, axis, None, None, True)
                add(inwards, least, inwards)
                subtract(edge, least, edge)
            if others:
                part = outwards * share
                for edge in others:
                    add(edge, part, edge)
                subtract(outwards, part * len(others), outwards)

    def bound(self) -> float:
        return self.offset + sum(float(t.min()) for t in self.theta.values())

    def label(self) -> dict[Hashable, int]:
        """Greedy assignment in node order on the current costs."""
        chosen: dict[Hashable, int] = {}
        for node in self.nodes:
            cost = self.theta[node].copy()
            for other, edge in self.before[node]:
                cost += edge[chosen[other]]
            chosen[node] = int(cost.argmin())
        return chosen

    def label_possible(self) -> dict[Hashable, int]:
        """As `label`, but each choice rules out what is impossible with it, however far away.

        States that have no partner left in some neighbour go (arc consistency, Mackworth 1977).
        """
        alive = {n: np.isfinite(cost) for n, cost in self.problem.costs.items()}
        strict: dict[Hashable, list[tuple[Hashable, NDArray[np.bool_]]]]
        strict = {n: [] for n in self.nodes}
        for (i, j), matrix in self.problem.edges.items():
            finite = np.isfinite(matrix)
            if not finite.all():
                strict[i].append((j, finite))
                strict[j].append((i, finite.T))
        chosen: dict[Hashable, int] = {}
        for node in self.nodes:
            cost = np.where(alive[node], self.theta[node], np.inf)
            for other, edge in self.before[node]:
                cost += edge[chosen[other]]
            for other, edge in self.after[node]:
                cost += edge[:, alive[other]].min(axis=1)
            chosen[node] = int(cost.argmin())
            alive[node] = np.arange(len(cost)) == chosen[node]
            reached = [node]
            while reached:
                source = reached.pop()
                for other, finite in strict[source]:
                    left = alive[other] & finite[alive[source]].any(axis=0)
                    if other not in chosen and left.any() and left.sum() < alive[other].sum():
                        alive[other] = left
                        reached.append(other)
        return chosen

    def descend(self, chosen: dict[Hashable, int]) -> float:
        """Improve an assignment one node at a time on the original costs; returns its cost."""
        descent = _Descent(self.problem, self.around, chosen)
        for _ in range(10):
            if not descent.one_by_one() and not descent.by_pairs():
                break
        return self.base + evaluate(self.problem, chosen)

    def over(self) -> dict[Hashable, Array]:
        """What each state's least possible total is at least above the bound."""
        found: dict[Hashable, Array] = {}
        for node in self.nodes:
            least = self.theta[node] - self.theta[node].min()
            for _, edge in self.before[node]:
                least += edge.min(axis=0)
            found[node] = least
        return found

    def open_states(self, lower: float, upper: float) -> dict[Hashable, Indices]:
        """States whose least possible total does not exceed `upper`."""
        most = upper + 1e-9 * max(abs(upper), 1e-12) - lower
        return {node: np.flatnonzero(over <= most) for node, over in self.over().items()}

    def likeliest(self, count: int) -> tuple[dict[Hashable, Indices], float]:
        """About so many states, of least possible totals, and what others cost at least."""
        over = self.over()
        every = np.concatenate([np.zeros(1), *over.values()])
        most = float(np.partition(every, count)[count]) if count < len(every) else np.inf
        keep = {node: np.flatnonzero(o <= max(most, o.min())) for node, o in over.items()}
        return keep, self.bound() + most


class _Descent:
    """Moves single nodes and pairs; what failed is tried again where something near has moved."""

    def __init__(
        self,
        problem: ChoiceProblem,
        around: Mapping[Hashable, Sequence[tuple[Hashable, Array]]],
        chosen: dict[Hashable, int],
    ) -> None:
        self.problem = problem
        self.around = around
        self.chosen = chosen
        self.moves = 0
        # at which move a node or one beside it changed last, and when it was tried since
        self.stirred = dict.fromkeys(problem.costs, 0)
        self.tried: dict[object, int] = {}

    def _is_settled(self, key: object, *nodes: Hashable) -> bool:
        """True if nothing near has moved since these nodes were tried; else notes that they are."""
        known = self.tried.get(key, -1)
        self.tried[key] = self.moves
        return all(self.stirred[node] <= known for node in nodes)

    def _given(self, node: Hashable, but: Hashable | None = None) -> Array:
        """Cost of each state of a node with its neighbours (all `but` one) as chosen."""
        cost = self.problem.costs[node].copy()
        for other, matrix in self.around[node]:
            if other != but:
                cost += matrix[:, self.chosen[other]]
        return cost

    def _set(self, node: Hashable, state: int) -> None:
        if self.chosen[node] != state:
            self.chosen[node] = state
            self.moves += 1
            self.stirred[node] = self.moves
            for other, _ in self.around[node]:
                self.stirred[other] = self.moves

    def one_by_one(self) -> bool:
        """Move each node to its best state; False if none moved."""
        changed = False
        for node in self.problem.costs:
            if self._is_settled(node, node):
                continue
            cost = self._given(node)
            best = int(cost.argmin())
            if cost[best] < cost[self.chosen[node]]:
                self._set(node, best)
                changed = True
        return changed

    def by_pairs(self) -> bool:
        """Improve both ends of an edge at once, where neither alone would move."""
        improved = False
        for (i, j), matrix in self.problem.edges.items():
            if self._is_settled((i, j), i, j):
                continue
            left, right = self._given(i, but=j), self._given(j, but=i)
            total = left[:, None] + right[None, :] + matrix
            s, t = divmod(int(total.argmin()), total.shape[1])
            now = total[self.chosen[i], self.chosen[j]]
            if total[s, t] < now and (np.isinf(now) or now - total[s, t] > 1e-12 * abs(now)):
                self._set(i, s)
                self._set(j, t)
                improved = True
        return improved


class MessagePassing:
    """Message passing that can be resumed: what it has found so far is kept.

    It goes on with the states that are still open alone, once they are few enough.
    """

    def __init__(self, problem: ChoiceProblem) -> None:
        self._messages = _Messages(problem)
        self.lower, self.upper = self._messages.bound(), np.inf
        self._chosen: dict[Hashable, int] = {}
        self._latest: dict[Hashable, int] = {}
        self._sweeps = self._stalled = 0

    def know(self, upper: float, chosen: dict[Hashable, int]) -> None:
        """Note an assignment that costs less than those found."""
        self.upper, self._chosen = upper, chosen

    def run(self, sweeps: int, tolerance: float) -> Bounds:
        """Go on until the bounds meet or stall.

        Args:
            sweeps: forward and backward sweeps at most, those of earlier runs included.
            tolerance: relative gap at which to stop.
        """
        while self._sweeps < sweeps and self._stalled < _STALLED and not self._met(tolerance):
            check_time()
            self._messages.sweep(forward=True)
            self._messages.sweep(forward=False)
            self._sweeps += 1
            if self._sweeps == 1 or self._sweeps % _CHECK_EVERY == 0:
                self._check()
        final = self._messages.bound()
        lower = float(max(self.lower, min(final, self.upper)))
        keep = self._original(self._messages.open_states(final, self.upper))
        return Bounds(lower, float(self.upper), self._chosen, keep, self._latest)

    @property
    def num_states(self) -> int:
        """Of nodes that have more than one left."""
        return self._messages.num_states

    def likeliest(self, count: int) -> tuple[dict[Hashable, Indices], float]:
        """Per node, the states that look best: about so many of all, and one at least.

        And the cost that no assignment with any other state is below.
        """
        states, rest = self._messages.likeliest(count)
        return self._original(states), rest

    def _original(self, states: Mapping[Hashable, Indices]) -> dict[Hashable, Indices]:
        """The original numbers of some states of each node that is not settled, and of the rest."""
        kept = self._messages.kept
        return kept | {node: kept[node][numbers] for node, numbers in states.items()}

    def _met(self, tolerance: float) -> bool:
        # also where the first labels were impossible: later ones are, too
        gap = self.upper - self.lower
        return self._sweeps > 0 and bool(gap <= tolerance * abs(self.upper))

    def _check(self) -> None:
        """Measure the bound, and label the nodes anew."""
        messages = self._messages
        bound = messages.bound()
        # what is not open any more costs more than the best assignment
        previous, self.lower = self.lower, max(self.lower, min(bound, self.upper))
        latest = messages.label()
        cost = messages.descend(latest)
        if np.isinf(min(cost, self.upper)):
            latest = messages.label_possible()
            cost = messages.descend(latest)
        self._latest = messages.whole(latest)
        if cost < self.upper:
            self.upper, self._chosen = cost, self._latest
        if np.isfinite(self.upper):
            keep = messages.open_states(bound, self.upper)
            if sum(map(len, keep.values())) <= _FEWER * messages.num_states:
                messages.restrict(keep)
        slow = self._sweeps > 1 and self.lower - previous <= 1e-5 * abs(self.lower)
        self._stalled = self._stalled + 1 if slow else 0
