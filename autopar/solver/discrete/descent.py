"""Local search on an assignment under memory rows: one node, then two neighbours, at a time."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import numpy as np

from autopar.solver.discrete.problem import Array, Assignment, ChoiceProblem, Row

__all__ = ["descend"]

_PASSES = 6
_PAIR_ENTRIES = 1 << 16  # states of two nodes × rows that are compared at once


class _State:
    """An assignment with its row totals, and what surrounds each node."""

    def __init__(
        self, problem: ChoiceProblem, rows: list[Row], limit: float, start: Assignment
    ) -> None:
        self.problem = problem
        self.rows = rows
        self.limit = limit
        self.chosen: dict[Hashable, int] = dict(start)
        self.totals = np.array([row.value(start) for row in rows])
        # all tables of a pair: seconds first, then one per row that has it
        self.pairs: dict[Hashable, list[tuple[Hashable, int, Array]]] = {
            node: [] for node in problem.costs
        }
        for index, edges in enumerate([problem.edges, *(row.edges for row in rows)]):
            for (i, j), matrix in edges.items():
                self.pairs[i].append((j, index, matrix))
                self.pairs[j].append((i, index, matrix.T))
        self.near = {n: {n, *(other for other, _, _ in found)} for n, found in self.pairs.items()}
        self.moves = 0
        self.moved: dict[Hashable, int] = {}  # at which move a node changed last
        self.failed: dict[tuple[Hashable, ...], tuple[int, Array]] = {}

    @property
    def slack(self) -> Array:
        """Bytes by which each row may grow."""
        return np.asarray(np.maximum(self.limit, self.totals) - self.totals)

    def fails(self, *nodes: Hashable) -> bool:
        """True if moving these nodes failed and would again: nothing near moved, no row fell."""
        known = self.failed.get(nodes)
        if known is None:
            return False
        since, slack = known
        if since == self.moves:
            return True
        moved = any(self.moved.get(n, 0) > since for node in nodes for n in self.near[node])
        return not moved and bool((self.slack <= slack).all())

    def note(self, *nodes: Hashable, moved: bool) -> bool:
        """Remember whether moving these nodes helped."""
        if moved:
            self.moves += 1
            self.moved.update(dict.fromkeys(nodes, self.moves))
        else:
            self.failed[nodes] = self.moves, self.slack
        return moved

    def table(self, node: Hashable, but: Hashable | None = None) -> Array:
        """(1 + rows, states): seconds and bytes of each state, the neighbours being as chosen."""
        own = self.problem.costs[node]
        out = np.zeros((1 + len(self.rows), len(own)))
        out[0] = own
        for index, row in enumerate(self.rows):
            if node in row.nodes:
                out[1 + index] = row.nodes[node]
        for other, index, matrix in self.pairs[node]:
            if other != but:
                out[index] += matrix[:, self.chosen[other]]
        return out

    def better(self, change: Array) -> int | None:
        """Flat index of the change that saves most and keeps to the limit; None if none saves."""
        after = self.totals.reshape(-1, *[1] * (change.ndim - 1)) + change[1:]
        # where the limit is exceeded already, it must at least not grow
        ceiling = np.maximum(self.limit, self.totals).reshape(-1, *[1] * (change.ndim - 1))
        seconds = np.where((after <= ceiling).all(axis=0), change[0], np.inf)
        best = int(seconds.argmin())
        return best if seconds.flat[best] < -1e-12 else None

    def one(self, node: Hashable) -> bool:
        """Move one node to a better state."""
        if self.fails(node):
            return False
        table = self.table(node)
        with np.errstate(invalid="ignore"):
            change = table - table[:, self.chosen[node]][:, None]
        best = self.better(change)
        if best is None:
            return self.note(node, moved=False)
        self.totals += change[1:, best]
        self.chosen[node] = best
        return self.note(node, moved=True)

    def two(self, i: Hashable, j: Hashable, between: list[tuple[int, Array]]) -> bool:
        """Move both ends of an edge to a better pair of states."""
        if self.fails(i, j):
            return False
        left, right = self.table(i, but=j), self.table(j, but=i)
        if left.shape[0] * left.shape[1] * right.shape[1] > _PAIR_ENTRIES:
            return False
        total = left[:, :, None] + right[:, None, :]
        for index, matrix in between:
            total[index] += matrix
        with np.errstate(invalid="ignore"):
            change = total - total[:, self.chosen[i], self.chosen[j]][:, None, None]
        best = self.better(change)
        if best is None:
            return self.note(i, j, moved=False)
        s, t = divmod(best, total.shape[2])
        self.totals += change[1:, s, t]
        self.chosen[i], self.chosen[j] = s, t
        return self.note(i, j, moved=True)

    def between(self, i: Hashable, j: Hashable) -> list[tuple[int, Array]]:
        return [(index, matrix) for other, index, matrix in self.pairs[i] if other == j]


def descend(
    problem: ChoiceProblem, rows: Iterable[Row], limit: float, start: Assignment
) -> dict[Hashable, int]:
    """An assignment that costs no more seconds than `start`, with no row beyond the limit.

    A row that `start` exceeds does not grow.
    """
    state = _State(problem, list(rows), limit, start)
    for _ in range(_PASSES):
        moved = [state.one(node) for node in problem.costs]
        if any(moved):
            continue
        moved = [state.two(i, j, state.between(i, j)) for i, j in problem.edges]
        if not any(moved):
            break
    return state.chosen
