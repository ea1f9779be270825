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

from autopar.solver.problem import Array, ChoiceProblem, Indices, evaluate

__all__ = ["Bounds", "MessagePassing", "bound_with_memory", "improve_bounds"]

_CHECK_EVERY = 5
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


class _Messages:
    def __init__(self, problem: ChoiceProblem) -> None:
        self.problem = problem
        finite = sum(float(np.max(c[np.isfinite(c)], initial=0.0)) for c in problem.costs.values())
        finite += sum(float(np.max(m[np.isfinite(m)], initial=0.0)) for m in problem.edges.values())
        self.big = 10.0 * finite + 1.0
        self.nodes = list(problem.costs)
        self.order = {node: k for k, node in enumerate(self.nodes)}
        self.theta = {n: np.where(np.isfinite(c), c, self.big) for n, c in problem.costs.items()}
        # tables of the edges towards later nodes, and to earlier ones with these along columns
        self.after: dict[Hashable, list[tuple[Hashable, Array]]] = {n: [] for n in self.nodes}
        self.before: dict[Hashable, list[tuple[Hashable, Array]]] = {n: [] for n in self.nodes}
        self.around: dict[Hashable, list[tuple[Hashable, Array]]] = {n: [] for n in self.nodes}
        for (i, j), matrix in problem.edges.items():
            a, b, m = (i, j, matrix) if self.order[i] < self.order[j] else (j, i, matrix.T)
            table = np.where(np.isfinite(m), m, self.big)
            self.after[a].append((b, table))
            self.before[b].append((a, table))
            self.around[i].append((j, matrix))
            self.around[j].append((i, matrix.T))
        for node in self.nodes:
            self.collect(node, before=False)

    def collect(self, node: Hashable, before: bool) -> None:
        """Move into the node all that its edges from earlier nodes, or to later ones, can give."""
        theta = self.theta[node]
        if before:
            for _, edge in self.before[node]:
                least = np.minimum.reduce(edge, axis=0)
                theta += least
                edge -= least[None, :]
        else:
            for _, edge in self.after[node]:
                least = np.minimum.reduce(edge, axis=1)
                theta += least
                edge -= least[:, None]

    def sweep(self, forward: bool) -> None:
        nodes = self.nodes if forward else reversed(self.nodes)
        for node in nodes:
            # the sweep before has left nothing in the other edges
            self.collect(node, before=forward)
            nexts = self.after[node] if forward else self.before[node]
            if not nexts:
                continue
            weight = 1.0 / max(len(self.after[node]), len(self.before[node]), 1)
            share = self.theta[node] * weight
            for _, edge in nexts:
                edge += share[:, None] if forward else share[None, :]
            self.theta[node] -= share * len(nexts)

    def bound(self) -> float:
        total = sum(float(t.min()) for t in self.theta.values())
        return total + sum(float(m.min()) for edges in self.after.values() for _, m in edges)

    def label(self) -> dict[Hashable, int]:
        """Greedy assignment in node order on the current costs."""
        chosen: dict[Hashable, int] = {}
        for node in self.nodes:
            cost = self.theta[node].copy()
            for other, edge in self.before[node]:
                cost += edge[chosen[other]]
            for _, edge in self.after[node]:
                cost += edge.min(axis=1)
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
        total = sum(float(c[chosen[n]]) for n, c in self.problem.costs.items())
        return total + sum(
            float(m[chosen[i], chosen[j]]) for (i, j), m in self.problem.edges.items()
        )

    def open_states(self, lower: float, upper: float) -> dict[Hashable, Indices]:
        """States whose least possible total does not exceed `upper`."""
        keep: dict[Hashable, Indices] = {}
        slack = 1e-9 * max(abs(upper), 1e-12)
        for node in self.nodes:
            least = self.theta[node] - self.theta[node].min()
            for _, edge in self.after[node]:
                least = least + edge.min(axis=1) - edge.min()
            for _, edge in self.before[node]:
                least = least + edge.min(axis=0) - edge.min()
            keep[node] = np.flatnonzero(lower + least <= upper + slack)
        return keep


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

    Args:
        problem: memory is not looked at; fold it into the costs with a multiplier.
    """

    def __init__(self, problem: ChoiceProblem) -> None:
        self._messages = _Messages(problem)
        self.lower, self.upper = self._messages.bound(), np.inf
        self._chosen: dict[Hashable, int] = {}
        self._latest: dict[Hashable, int] = {}
        self._sweeps = self._stalled = 0

    def run(self, sweeps: int, tolerance: float) -> Bounds:
        """Go on until the bounds meet or stall.

        Args:
            sweeps: forward and backward sweeps at most, those of earlier runs included.
            tolerance: relative gap at which to stop.
        """
        while self._sweeps < sweeps and self._stalled < _STALLED and not self._met(tolerance):
            self._messages.sweep(forward=True)
            self._messages.sweep(forward=False)
            index = self._sweeps
            self._sweeps += 1
            if index % _CHECK_EVERY == 0 or index <= 2:
                self._check(index)
        final = self._messages.bound()
        keep = self._messages.open_states(final, self.upper)
        lower = float(max(self.lower, final))
        return Bounds(lower, float(self.upper), self._chosen, keep, self._latest)

    def _met(self, tolerance: float) -> bool:
        # also where the first labels were impossible: later ones are, too
        gap = self.upper - self.lower
        return self._sweeps > 0 and bool(gap <= tolerance * abs(self.upper))

    def _check(self, index: int) -> None:
        """Measure the bound, and label the nodes anew."""
        messages = self._messages
        previous, self.lower = self.lower, max(self.lower, messages.bound())
        latest = messages.label()
        cost = messages.descend(latest)
        if np.isinf(min(cost, self.upper)):
            latest = messages.label_possible()
            cost = messages.descend(latest)
        self._latest = latest
        if cost < self.upper:
            self.upper, self._chosen = cost, latest
        slow = self.lower - previous <= 1e-5 * abs(self.lower)
        self._stalled = self._stalled + 1 if slow and index > 5 else 0


def improve_bounds(problem: ChoiceProblem, *, sweeps: int = 200, tolerance: float = 1e-6) -> Bounds:
    """Run message passing until the bounds meet (within `tolerance`, relative) or stall."""
    return MessagePassing(problem).run(sweeps, tolerance)


_MULTIPLIER_STEPS = 24


def bound_with_memory(problem: ChoiceProblem, limit: float) -> Bounds:
    """Bounds under Σ memory ≤ limit, by Lagrangian relaxation of that row.

    For every multiplier λ ≥ 0, min Σ cost + λ (Σ memory − limit) is a lower bound, and the
    assignments met on the way that fit the limit are upper bounds. λ is found by bisection.
    """
    best: Bounds | None = None
    upper, chosen = np.inf, {}
    low, high = 0.0, 0.0
    scale = _first_multiplier(problem, limit)
    for _ in range(_MULTIPLIER_STEPS):
        multiplier = 0.0 if best is None else scale if not high else 0.5 * (low + high)
        priced = ChoiceProblem(
            {
                n: c + multiplier * problem.memory[n] if n in problem.memory else c
                for n, c in problem.costs.items()
            },
            {},
            problem.edges,
        )
        found = improve_bounds(priced, sweeps=60, tolerance=1e-4)
        lower = found.lower - multiplier * limit
        if not found.chosen:
            break
        cost, memory = evaluate(problem, found.chosen)
        if best is None or lower > best.lower:
            best = Bounds(lower, found.upper - multiplier * limit, found.chosen, found.keep)
        if memory <= limit:
            if cost < upper:
                upper, chosen = cost, found.chosen
            high = multiplier
            if multiplier == 0.0:
                break
        elif not high and multiplier:
            low, scale = multiplier, scale * 4
        elif multiplier:
            low = multiplier
        if np.isfinite(upper) and upper - best.lower <= 1e-4 * abs(upper):
            break
        if high and high - low <= 1e-3 * high:
            break
    everything = {n: np.arange(len(c)) for n, c in problem.costs.items()}
    if best is None:
        return Bounds(-np.inf, np.inf, {}, everything)
    keep = best.keep
    if not np.isfinite(upper) or upper > best.upper:
        # what the multiplier's own optimum rules out may be what fits
        keep = everything
    return Bounds(best.lower, upper, chosen, keep)


def _first_multiplier(problem: ChoiceProblem, limit: float) -> float:
    """Seconds per byte at which memory weighs about as much as time."""
    seconds = sum(float(np.max(c[np.isfinite(c)], initial=0.0)) for c in problem.costs.values())
    size = sum(float(m.max()) for m in problem.memory.values())
    return max(seconds, 1e-9) / max(size, 1.0)
