"""Exact shrinking of a `ChoiceProblem` before the ILP sees it.

- Impossible states go: those with infinite cost, or whose row in some edge is all infinite.
- Dominated states go (Goldstein 1994, "Efficient rotamer elimination…"): state s if some s' has
  cost no larger and Σ_edges max_t (C[s', t] − C[s, t]) does not eat the advantage.
- A node with one or two neighbours is folded into them: its best state is a function of theirs
  (the R1 and R2 reductions of PBQP, Scholz and Eckstein 2002). So is a node with one state, with
  any neighbours.

Folding keeps the optimum and, through `expand`, gives back every folded node's state.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.solver.discrete.problem import Array, ChoiceProblem, Indices

__all__ = ["Reduced", "reduce_problem"]

_MAX_FILL = 1 << 22  # entries of a comparison
_MAX_FOLD = 1 << 18  # combinations of states that folding compares: tables of many stay apart
_LARGE = 1 << 9  # entries of a folded matrix that are found state by state
_MAX_COMPARED = 64  # states of a node that are compared pairwise

Fold = tuple[Hashable, tuple[Hashable, ...], tuple[Indices, ...], Indices]


@dataclass(slots=True)
class Reduced:
    """A smaller problem with the way back.

    Attributes:
        problem: what is left.
        offset: cost already decided.
        kept: original state numbers of each node.
        folds: folded nodes in order, each with its neighbours, their state numbers at that time,
            and the best state per combination of these.
    """

    problem: ChoiceProblem
    offset: float = 0.0
    kept: dict[Hashable, Indices] = field(default_factory=dict)
    folds: list[Fold] = field(default_factory=list)

    def expand(self, chosen: dict[Hashable, int]) -> dict[Hashable, int]:
        """States of all original nodes from those of the reduced problem."""
        states = {node: int(self.kept[node][state]) for node, state in chosen.items()}
        for node, neighbours, numbers, best in reversed(self.folds):
            at = tuple(
                int(np.searchsorted(kept, states[other]))
                for other, kept in zip(neighbours, numbers, strict=True)
            )
            states[node] = int(self.kept[node][best[at]])
        return states


class _Reducer:
    def __init__(self, problem: ChoiceProblem, fixed: Container[Hashable]) -> None:
        self.fixed = fixed
        self.costs = dict(problem.costs)
        self.adjacent: dict[Hashable, dict[Hashable, Array]] = {n: {} for n in self.costs}
        for (i, j), matrix in problem.edges.items():
            self.adjacent[i][j] = matrix
            self.adjacent[j][i] = matrix.T
        self.kept: dict[Hashable, Indices] = {n: np.arange(len(c)) for n, c in self.costs.items()}
        # neighbours with which some states are impossible
        self.strict: dict[Hashable, set[Hashable]] = {n: set() for n in self.costs}
        for (i, j), matrix in problem.edges.items():
            self._note_strict(i, j, matrix)
        self.folds: list[Fold] = []
        self.offset = 0.0

    def _note_strict(self, i: Hashable, j: Hashable, matrix: Array) -> None:
        if not np.isfinite(matrix).all():
            self.strict[i].add(j)
            self.strict[j].add(i)

    def restrict(self, node: Hashable, keep: Indices) -> None:
        """Keep only some states of a node."""
        self.costs[node] = self.costs[node][keep]
        self.kept[node] = self.kept[node][keep]
        for other, matrix in self.adjacent[node].items():
            smaller = matrix[keep]
            self.adjacent[node][other] = smaller
            self.adjacent[other][node] = smaller.T

    def drop_impossible(self, node: Hashable) -> bool:
        alive = np.isfinite(self.costs[node])
        for other in self.strict[node]:
            alive &= np.isfinite(self.adjacent[node][other]).any(axis=1)
        if alive.all() or not alive.any():
            return False
        self.restrict(node, np.flatnonzero(alive))
        return True

    def drop_dominated(self, node: Hashable) -> bool:
        count = len(self.costs[node])
        if not 2 <= count <= _MAX_COMPARED or node in self.fixed:
            return False
        matrices = list(self.adjacent[node].values())
        if any(matrix.size * count > _MAX_FILL for matrix in matrices):
            return False
        gain = _gain(self.costs[node], matrices)
        order = np.arange(count)
        # of two equal states the first stays
        beaten = (gain > 0) | ((gain >= 0) & (order[None, :] < order[:, None]))
        alive = np.ones(count, dtype=bool)
        for state in np.flatnonzero(beaten.any(axis=1)):
            if np.any(beaten[state] & alive):
                alive[state] = False
        if alive.all():
            return False
        self.restrict(node, np.flatnonzero(alive))
        return True

    def fold(self, node: Hashable) -> bool:
        """Fold a node with one state or at most two neighbours; False if it has to stay."""
        neighbours = tuple(self.adjacent[node])
        if node in self.fixed or len(self.adjacent) == 1:
            return False
        if len(self.costs[node]) == 1:
            return self.settle(node)
        if len(neighbours) > 2:
            return False
        own = self.costs[node]
        if not neighbours:
            best: Indices = np.asarray(int(own.argmin()))
            self.offset += float(own.min())
        elif len(neighbours) == 1:
            total = self.adjacent[node][neighbours[0]] + own[:, None]
            best = total.argmin(axis=0)
            least = np.take_along_axis(total, best[None, :], axis=0)[0]
            self.costs[neighbours[0]] = self.costs[neighbours[0]] + least
        else:
            i, j = neighbours
            left, right = self.adjacent[node][i], self.adjacent[node][j]
            if left.shape[1] * right.shape[1] * len(own) > _MAX_FOLD:
                return False
            best, joined = _joined(own, left, right)
            if j in self.adjacent[i]:
                joined = joined + self.adjacent[i][j]
            self.adjacent[i][j] = joined
            self.adjacent[j][i] = joined.T
            self._note_strict(i, j, joined)
        self._remove(node)
        numbers = tuple(self.kept[other] for other in neighbours)
        self.folds.append((node, neighbours, numbers, best))
        return True

    def settle(self, node: Hashable) -> bool:
        """Make what a node's only state costs with its neighbours a part of their costs."""
        self.offset += float(self.costs[node][0])
        for other, matrix in self.adjacent[node].items():
            self.costs[other] = self.costs[other] + matrix[0]
        self._remove(node)
        self.folds.append((node, (), (), np.asarray(0)))
        return True

    def _remove(self, node: Hashable) -> None:
        for other in self.adjacent.pop(node):
            del self.adjacent[other][node]
            self.strict[other].discard(node)
        del self.costs[node], self.strict[node]

    def run(self, changed_nodes: Iterable[Hashable]) -> None:
        """Fold what can be folded; states are compared where nothing else is left to do."""
        pending = dict.fromkeys(changed_nodes)
        compared: dict[Hashable, None] = {}  # once nothing is pending
        while pending or compared:
            if pending:
                node = next(iter(pending))
                del pending[node]
                if node not in self.costs:
                    continue
                around = list(self.adjacent[node])
                changed = self.drop_impossible(node)
                if self.fold(node):
                    compared.pop(node, None)
                    changed = True
                else:
                    compared[node] = None
            else:
                node = next(iter(compared))
                del compared[node]
                around = list(self.adjacent[node])
                changed = self.drop_dominated(node)
                if changed:
                    self.fold(node)
            if changed:
                pending.update(dict.fromkeys(n for n in around if n in self.costs))


def _joined(own: Array, left: Array, right: Array) -> tuple[Indices, Array]:
    """The best state of a node for each pair of states of its neighbours, and its cost."""
    if left.shape[1] * right.shape[1] < _LARGE:
        total = own[:, None, None] + left[:, :, None] + right[:, None, :]
        return total.argmin(axis=0), total.min(axis=0)
    # state by state: large tables leave the processor's caches
    least = (own[0] + left[0])[:, None] + right[0]
    best = np.zeros(least.shape, dtype=np.intp)
    for state in range(1, len(own)):
        cost = (own[state] + left[state])[:, None] + right[state]
        np.copyto(best, state, where=cost < least)
        np.minimum(least, cost, out=least)
    return best, least


def _gain(costs: Array, matrices: Sequence[Array]) -> Array:
    """gain[s, r]: at least how much r saves over s, whatever the neighbours do; −inf if negative.

    What r saves where a neighbour is in the state that suits s best bounds that from above, and
    leaves few pairs to compare in all states.
    """
    with np.errstate(invalid="ignore"):
        own = costs[:, None] - costs[None, :]
        own[np.isnan(own)] = 0.0
        np.fill_diagonal(own, -np.inf)
        gain = np.full(own.shape, -np.inf)
        most = own
        for matrix in matrices:
            theirs = matrix.take(matrix.argmin(axis=1), axis=1)
            difference = theirs.diagonal() - theirs
            difference[np.isnan(difference)] = np.inf
            most = most + difference.T
            if (most < 0).all():
                return gain
        s, r = np.nonzero(most >= 0)
        total = own[s, r]
        for matrix in matrices:
            mine = matrix.take(s, axis=0)
            difference = mine - matrix.take(r, axis=0)
            difference[np.isinf(mine)] = np.inf
            total = total + np.minimum.reduce(difference, axis=1)
        gain[s, r] = np.where(np.isnan(total), -np.inf, total)
    return gain


def reduce_problem(
    problem: ChoiceProblem,
    fixed: Container[Hashable] = (),
    changed: Iterable[Hashable] | None = None,
) -> Reduced:
    """Shrink a problem without changing its optimum.

    Args:
        problem: to shrink.
        fixed: nodes that keep all their possible states: whatever is added to their costs or
            between them later, the optimum is kept.
        changed: nodes with other costs or edges than when the problem was reduced last; default:
            all.
    """
    reducer = _Reducer(problem, fixed)
    reducer.run(problem.costs if changed is None else changed)
    edges: dict[tuple[Hashable, Hashable], Array] = {}
    order = {node: k for k, node in enumerate(reducer.costs)}
    for node, others in reducer.adjacent.items():
        for other, matrix in others.items():
            if order[node] < order[other]:
                edges[node, other] = matrix
    left = ChoiceProblem(reducer.costs, edges)
    return Reduced(left, reducer.offset, reducer.kept, reducer.folds)
