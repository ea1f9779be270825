"""The integer program of a problem in PuLP, with as few variables as its tables need.

x[i, s] ∈ {0, 1}         node i is in state s,  Σ_s x[i, s] = 1

States that differ in an edge's table by a constant are alike there: the constant goes to their
nodes, and the edge sees only the groups g of such states, X[i, g] = Σ_(s in g) x[i, s].

e[i, j, g, h] ≥ 0        i in group g and j in group h
Σ_h e[i, j, g, h] = X[i, g],  Σ_g e[i, j, g, h] = X[j, h]    (LP-tight marginals)

Two groups on each side need one variable, the product y = X[i, 1] · X[j, 1], or none where that is
impossible. The tables are the seconds of the edge and its bytes in every memory row.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import pulp
from numpy.typing import NDArray

from autopar.solver.discrete.problem import Array, ChoiceProblem, Indices, Row

__all__ = ["SECONDS", "Program"]

SECONDS = 1e3  # the solver's tolerances suit milliseconds better than seconds
_ALIKE = 1e-12  # relative difference of costs that are equal

Mask = NDArray[np.bool_]
_Sum = dict[pulp.LpVariable, float]


@dataclass(frozen=True, slots=True)
class _Groups:
    """An edge over groups of states: variables of each group on both sides, tables, what can be."""

    name: str
    members: Sequence[Sequence[Sequence[pulp.LpVariable]]]
    tables: Sequence[Array]
    finite: Mask


class Program:
    """Variables and rows of one problem.

    Args:
        problem: of seconds.
        rows: each at most `limit`.
        limit: bytes.
    """

    def __init__(
        self, problem: ChoiceProblem, rows: Sequence[Row] = (), limit: float = math.inf
    ) -> None:
        self.problem = problem
        self.prob = pulp.LpProblem("plan", pulp.LpMinimize)
        self.index = {node: k for k, node in enumerate(problem.costs)}
        scale = max(limit, 1.0) if math.isfinite(limit) else 1.0
        self.scales = [SECONDS, *[1.0 / scale for _ in rows]]
        # seconds first, then the bytes of each row
        self.sums: list[_Sum] = [defaultdict(float) for _ in self.scales]
        self.constants = [0.0, *[row.constant / scale for row in rows]]
        self.x: dict[Hashable, list[pulp.LpVariable]] = {}
        self._nodes(rows)
        self._edges(rows)
        self.prob.setObjective(pulp.LpAffineExpression(self.sums[0], self.constants[0]))
        for total, constant in zip(self.sums[1:], self.constants[1:], strict=True):
            self.prob += pulp.LpAffineExpression(total) <= limit / scale - constant

    def states(self) -> dict[Hashable, int]:
        """The state of each node in the solution."""
        return {
            node: int(np.argmax([v.value() or 0.0 for v in row])) for node, row in self.x.items()
        }

    def _count(self, variables: Sequence[pulp.LpVariable], tables: Sequence[Array]) -> None:
        """Add tables (one per sum) of numbers that variables stand for."""
        for total, scale, table in zip(self.sums, self.scales, tables, strict=True):
            for k in np.flatnonzero(table):
                total[variables[int(k)]] += scale * float(table[k])

    def _nodes(self, rows: Sequence[Row]) -> None:
        for node, costs in self.problem.costs.items():
            row = [
                self.prob.add_variable(f"x_{self.index[node]}_{state}", cat="Binary")
                for state in range(len(costs))
            ]
            self.x[node] = row
            self.prob += pulp.LpAffineExpression(dict.fromkeys(row, 1.0)) == 1
            self._forbid([v for v, cost in zip(row, costs, strict=True) if not math.isfinite(cost)])
            empty = np.zeros(len(costs))
            known = [r.nodes.get(node, empty) for r in rows]
            self._count(row, [np.where(np.isfinite(costs), costs, 0.0), *known])

    def _forbid(self, variables: Sequence[pulp.LpVariable]) -> None:
        if variables:
            self.prob += pulp.LpAffineExpression(dict.fromkeys(variables, 1.0)) == 0

    def _edges(self, rows: Sequence[Row]) -> None:
        pairs = dict(self.problem.edges)
        for row in rows:  # bytes of a pair that costs nothing together
            for (i, j), num_bytes in row.edges.items():
                if (i, j) not in pairs and (j, i) not in pairs:
                    pairs[i, j] = np.zeros(num_bytes.shape)
        for (i, j), matrix in pairs.items():
            tables = [matrix]
            for row in rows:
                known, turned = row.edges.get((i, j)), row.edges.get((j, i))
                both = [t for t in (known, None if turned is None else turned.T) if t is not None]
                tables.append(sum(both, start=np.zeros(matrix.shape)))
            self._edge(i, j, tables, np.isfinite(matrix))

    def _edge(self, i: Hashable, j: Hashable, tables: list[Array], finite: Mask) -> None:
        """The costs of a pair: what is alike moves to the nodes, the rest gets variables."""
        left, right = self.x[i], self.x[j]
        columns, own = _alike(tables, finite)
        self._count(right, own)
        first = _first(columns)
        tables, finite = [t[:, first] for t in tables], finite[:, first]
        lines, own = _alike([t.T for t in tables], finite.T)
        self._count(left, own)
        first = _first(lines)
        tables, finite = [t[first] for t in tables], finite[first]
        members = [
            [[v for v, group in zip(row, groups, strict=True) if group == g] for g in range(count)]
            for row, groups, count in zip(
                (left, right), (lines, columns), finite.shape, strict=True
            )
        ]
        groups = _Groups(f"e_{self.index[i]}_{self.index[j]}", members, tables, finite)
        if finite.shape == (1, 1):
            if finite.all():
                self._add(tables)
            else:
                self._forbid(left)
        elif finite.shape == (2, 2) and finite.sum() >= 3:
            self._product(groups)
        else:
            self._marginals(groups)

    def _add(self, tables: Sequence[Array]) -> None:
        """Count what every choice costs."""
        for k, (table, scale) in enumerate(zip(tables, self.scales, strict=True)):
            self.constants[k] += scale * float(table.flat[0])

    def _product(self, groups: _Groups) -> None:
        """Two groups on each side: the corner (1, 1), the impossible one if there is, is y."""
        members, tables, finite = groups.members, groups.tables, groups.finite
        s, t = (0, 0) if finite.all() else map(int, np.argwhere(~finite)[0])
        a, b = members[0][s], members[1][t]
        corner = [table[1 - s, 1 - t] for table in tables]
        self._add([np.array(c) for c in corner])
        for variables, cells in ((a, (s, 1 - t)), (b, (1 - s, t))):
            for k, table in enumerate(tables):
                for v in variables:
                    self.sums[k][v] += self.scales[k] * float(table[cells] - corner[k])
        ends = pulp.LpAffineExpression(dict.fromkeys((*a, *b), 1.0))
        if not finite.all():
            self.prob += ends <= 1
            return
        more = [
            scale * float(m[s, t] - m[1 - s, t] - m[s, 1 - t] + c)
            for m, c, scale in zip(tables, corner, self.scales, strict=True)
        ]
        y = self.prob.add_variable(groups.name, lowBound=0)
        for total, extra in zip(self.sums, more, strict=True):
            if extra:
                total[y] = extra
        if any(extra > 0 for extra in more):
            self.prob += ends - y <= 1
        if any(extra < 0 for extra in more):
            for variables in (a, b):
                self.prob += y - pulp.LpAffineExpression(dict.fromkeys(variables, 1.0)) <= 0

    def _marginals(self, groups: _Groups) -> None:
        """A variable for each pair of groups."""
        sides: list[list[_Sum]] = [[{} for _ in side] for side in groups.members]
        for g, h in np.argwhere(groups.finite):
            variable = self.prob.add_variable(f"{groups.name}_{g}_{h}", lowBound=0)
            sides[0][g][variable] = sides[1][h][variable] = 1.0
            self._count([variable], [table[g, h : h + 1] for table in groups.tables])
        for side, sums in zip(groups.members, sides, strict=True):
            for group, terms in zip(side, sums, strict=True):
                self.prob += pulp.LpAffineExpression({**terms, **dict.fromkeys(group, -1.0)}) == 0


def _alike(tables: Sequence[Array], finite: Mask) -> tuple[Indices, list[Array]]:
    """Groups of columns that differ by a constant in every table, and these constants.

    The constant of a column is what it has more than the first of its group.
    """
    top = finite.argmax(axis=0)
    at = np.arange(finite.shape[1])
    keys = [finite.astype(np.float64)]
    bases: list[Array] = []
    for table in tables:
        known = np.where(finite, table, 0.0)
        base = known[top, at]
        size = max(float(np.abs(known).max(initial=0.0)), 1e-300)
        keys.append(np.round(np.where(finite, known - base, 0.0) / size / _ALIKE) * _ALIKE)
        bases.append(base)
    _, groups = np.unique(np.concatenate(keys), axis=1, return_inverse=True)
    groups = groups.reshape(-1)
    first = _first(groups)
    return groups, [base - base[first[groups]] for base in bases]


def _first(groups: Indices) -> Indices:
    """The first member of each group."""
    return np.unique(groups, return_index=True)[1]
