"""The search under memory rows against enumeration: plans obey the limit, bounds are bounds."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from autopar.solver import fit, relaxed
from autopar.solver.branch import Part
from autopar.solver.discrete.ilp import Solution, solve_problem, solve_whole
from autopar.solver.discrete.problem import ChoiceProblem, Row, evaluate
from autopar.solver.discrete.reduce import reduce_problem
from autopar.solver.fit import Fit, MemorySearch
from autopar.solver.row_at import RowAt


def random_problem(rng: np.random.Generator, nodes: int) -> ChoiceProblem:
    problem = ChoiceProblem()
    for node in range(nodes):
        problem.add_node(node, rng.integers(0, 20, int(rng.integers(2, 4))).astype(float))
    for i, j in itertools.combinations(range(nodes), 2):
        if rng.random() < 0.5:
            shape = (len(problem.costs[i]), len(problem.costs[j]))
            problem.add_edge(i, j, rng.integers(0, 20, shape).astype(float))
    return problem


def random_rows(rng: np.random.Generator, problem: ChoiceProblem, count: int) -> list[Row]:
    rows = []
    for _ in range(count):
        row = Row(float(rng.integers(0, 10)))
        for node, costs in problem.costs.items():
            if rng.random() < 0.7:
                row.add(node, rng.integers(0, 50, len(costs)).astype(float))
        for (i, j), matrix in problem.edges.items():
            if rng.random() < 0.3:
                row.add_pair(i, j, rng.integers(0, 20, matrix.shape).astype(float))
        rows.append(row)
    return rows


def everything(problem: ChoiceProblem) -> list[dict[Any, int]]:
    states = itertools.product(*(range(len(c)) for c in problem.costs.values()))
    return [dict(zip(problem.costs, chosen, strict=True)) for chosen in states]


def search(
    problem: ChoiceProblem, rows: list[Row], limit: int, known: MemorySearch | None = None
) -> MemorySearch:
    def decide(solution: Solution) -> Fit:
        sizes = [round(row.value(solution.chosen)) for row in rows]
        peak = SimpleNamespace(peak_bytes=max(sizes), index=int(np.argmax(sizes)))
        fake = SimpleNamespace(peak=peak, peak_at=RowAt(peak.index))
        return Fit(solution, cast(Any, None), cast(Any, fake))

    liveness = SimpleNamespace(row=lambda at: rows[at.position])
    return MemorySearch(problem, cast(Any, liveness), decide, limit, known)


class Tight:
    """A random problem, all its choices with their peaks, and a limit that forbids the fastest."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.problem = random_problem(rng, 7)
        self.rows = random_rows(rng, self.problem, 3)
        self.every = everything(self.problem)
        self.peaks = [max(row.value(chosen) for row in self.rows) for chosen in self.every]
        fastest = int(np.argmin([evaluate(self.problem, chosen) for chosen in self.every]))
        # between the least peak and that of the fastest plan
        self.limit = round(0.5 * (min(self.peaks) + self.peaks[fastest]))

    def optimum(self, problem: ChoiceProblem) -> float:
        """The least seconds within the limit, at the costs of `problem`."""
        pairs = zip(self.every, self.peaks, strict=True)
        return min(evaluate(problem, chosen) for chosen, peak in pairs if peak <= self.limit)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("pairs", [0, 1000])
def test_plans_obey_the_limit_and_bounds_hold(
    pairs: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By prices and branching, and, as one ILP, exactly."""
    monkeypatch.setattr(relaxed, "_SMALL", pairs)
    tight = Tight(np.random.default_rng(seed))
    limit, optimum = tight.limit, tight.optimum(tight.problem)
    found = search(tight.problem, tight.rows, limit)
    found.start(math.inf)
    first = found.bound
    found.finish(math.inf)
    assert found.best is not None
    assert found.best.peak <= limit
    assert first <= found.bound + 1e-9
    assert found.bound <= optimum + 1e-6
    assert found.best.solution.objective >= optimum - 1e-6
    # branching on so few nodes goes on to the end
    near = 1.002 if pairs else 1.011
    assert found.best.solution.objective <= optimum * near + 1e-6
    if pairs:
        assert found.bound >= optimum * (1 - 5e-3)


@pytest.mark.parametrize("seed", range(6))
def test_a_small_problem_is_known_to_have_nothing_below_what_another_takes(seed: int) -> None:
    tight = Tight(np.random.default_rng(seed))
    optimum = tight.optimum(tight.problem)
    rows = tight.rows
    for below, exists in ((0.99 * optimum, False), (1.01 * optimum + 1e-3, True)):
        chosen, bound = solve_whole(tight.problem, rows, tight.limit, 1e-6, below)
        assert (chosen is not None) == exists
        assert bound <= (optimum if exists else below) + 1e-6
        assert bound >= (optimum if exists else below) - 1e-3
        if chosen is not None:
            assert max(row.value(chosen) for row in rows) <= tight.limit
            assert evaluate(tight.problem, chosen) == pytest.approx(optimum)


def test_nothing_is_branched_on_for_a_bound_that_tells_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    branched: list[float] = []

    def branch(root: Part, *_: object) -> float:
        branched.append(root.bound)
        return root.bound

    monkeypatch.setattr(fit, "branch", branch)
    monkeypatch.setattr(relaxed, "_SMALL", 0)
    for least, often in ((math.inf, True), (-math.inf, False)):
        branched.clear()
        for seed in range(6):
            tight = Tight(np.random.default_rng(seed))
            found = search(tight.problem, tight.rows, tight.limit)
            found.start(math.inf)
            found.finish(math.inf, least)
            assert found.best is not None and found.best.peak <= tight.limit
            assert found.bound <= tight.optimum(tight.problem) + 1e-6
        assert bool(branched) == often


class Asked:
    """Counts what is solved; `share` of each bound is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, share: float = 1.0) -> None:
        self.count = 0
        self.share = share
        monkeypatch.setattr(relaxed, "_SMALL", 0)
        monkeypatch.setattr(relaxed, "solve_problem", self.solve)

    def solve(self, *args: Any, **kwargs: Any) -> Solution:
        self.count += 1
        found = solve_problem(*args, **kwargs)
        return replace(found, bound=self.share * found.bound)


def test_the_same_prices_are_solved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch)
    tight = Tight(np.random.default_rng(0))
    found = search(tight.problem, tight.rows, tight.limit)
    found.start(math.inf)
    before = asked.count
    prices = dict.fromkeys(found.relaxed.rows, 0.01)
    first = found.relaxed.solve(prices)
    assert found.relaxed.solve({**prices, 99: 0.0})[0] is first[0]
    assert asked.count == before + 1
    assert found.relaxed.solve(prices, scale=2.0)[0] is not first[0]
    mask = {0: np.ones(len(tight.problem.costs[0]), dtype=bool)}
    assert found.relaxed.solve(prices, allowed=mask)[0] is not first[0]
    assert asked.count == before + 3


def test_no_more_prices_are_tried_where_the_least_cost_is_not_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is proved stays proved, and a plan that fits is found."""
    counts: dict[float, list[int]] = {1.0: [], 0.5: []}
    for share, seed in itertools.product(counts, range(6)):
        asked = Asked(monkeypatch, share)
        tight = Tight(np.random.default_rng(seed))
        found = search(tight.problem, tight.rows, tight.limit)
        found.start(math.inf)
        before = asked.count
        found.finish(math.inf)
        counts[share].append(asked.count - before)
        assert found.best is not None and found.best.peak <= tight.limit
        assert found.bound <= tight.optimum(tight.problem) + 1e-6
    assert max(counts[0.5]) <= 1 < max(counts[1.0])


@pytest.mark.parametrize("seed", range(6))
def test_a_search_goes_on_with_the_plans_of_one_at_other_costs(seed: int) -> None:
    """Its bound is one, its plan obeys the limit, and is no worse than those taken over."""
    rng = np.random.default_rng(seed)
    tight = Tight(rng)
    problem, rows, limit = tight.problem, tight.rows, tight.limit
    before = search(problem, rows, limit)
    before.start(math.inf)
    before.finish(math.inf)
    others = ChoiceProblem(
        {node: cost * rng.uniform(0.5, 2.0) for node, cost in problem.costs.items()},
        {pair: matrix * rng.uniform(0.5, 2.0) for pair, matrix in problem.edges.items()},
    )
    optimum = tight.optimum(others)
    found = search(others, rows, limit, before)
    taken = [column.chosen for column in found.relaxed.columns]
    assert found.relaxed.rows == before.relaxed.rows
    assert taken == [column.chosen for column in before.relaxed.columns]
    for column in found.relaxed.columns:
        assert column.seconds == evaluate(others, column.chosen)
    found.start(math.inf)
    found.finish(math.inf)
    assert found.best is not None
    assert found.best.peak <= limit
    assert found.bound <= optimum + 1e-9
    fitting = [c for c in taken if max(row.value(c) for row in rows) <= limit]
    least_s = min((evaluate(others, c) for c in fitting), default=math.inf)
    assert found.best.solution.objective <= least_s + 1e-9


@pytest.mark.parametrize("seed", range(3))
def test_what_another_problem_beats_is_proved_so(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, 6)
    rows = random_rows(rng, problem, 2)
    every = everything(problem)
    least = min(max(row.value(chosen) for row in rows) for chosen in every)
    fits = [c for c in every if max(row.value(c) for row in rows) <= 1.1 * least]
    optimum = min(evaluate(problem, c) for c in fits)
    found = search(problem, rows, int(1.1 * least))
    beat = 0.9 * min(evaluate(problem, c) for c in every) + 1e-3
    assert found.start(beat, 0.1) is None
    assert found.bound <= optimum + 1e-6


@pytest.mark.parametrize("seed", range(20))
def test_fixed_nodes_keep_the_optimum_whatever_they_cost_later(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, 6)
    fixed = {0, 3}
    reduced = reduce_problem(problem, fixed)
    assert fixed <= set(reduced.problem.costs)
    extra = {node: rng.integers(0, 60, len(problem.costs[node])).astype(float) for node in fixed}
    pair = rng.integers(0, 60, (len(problem.costs[0]), len(problem.costs[3]))).astype(float)

    def with_extra(given: ChoiceProblem, kept: Any) -> ChoiceProblem:
        changed = given.copy()
        for node in fixed:
            changed.costs[node] = changed.costs[node] + extra[node][kept[node]]
        changed.add_edge(0, 3, pair[np.ix_(kept[0], kept[3])])
        return changed

    whole = with_extra(problem, {n: np.arange(len(c)) for n, c in problem.costs.items()})
    small = with_extra(reduced.problem, reduced.kept)
    best = min(evaluate(whole, chosen) for chosen in everything(whole))
    again = min(everything(small), key=lambda chosen: evaluate(small, chosen))
    assert evaluate(small, again) + reduced.offset == pytest.approx(best)
    assert evaluate(whole, reduced.expand(again)) == pytest.approx(best)
