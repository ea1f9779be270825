"""The ILP against exhaustive enumeration, with and without a memory limit."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.solver.eliminate import minimise
from autopar.solver.ilp import Infeasible, solve_problem
from autopar.solver.problem import ChoiceProblem, evaluate


@st.composite
def problems(draw: st.DrawFn) -> ChoiceProblem:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    problem = ChoiceProblem()
    count = draw(st.integers(1, 6))
    for node in range(count):
        states = int(rng.integers(1, 5))
        memory = rng.integers(0, 50, states).astype(float) if rng.random() < 0.5 else None
        problem.add_node(node, rng.integers(0, 20, states).astype(float), memory)
    for i, j in itertools.combinations(range(count), 2):
        if rng.random() < 0.6:
            shape = (len(problem.costs[i]), len(problem.costs[j]))
            matrix = rng.integers(0, 20, shape).astype(float)
            matrix[rng.random(shape) < 0.15] = np.inf
            problem.add_edge(i, j, matrix)
    return problem


def enumerate_best(problem: ChoiceProblem, limit: float | None) -> float:
    best = math.inf
    for states in itertools.product(*(range(len(c)) for c in problem.costs.values())):
        cost, memory = evaluate(problem, dict(zip(problem.costs, states, strict=True)))
        if limit is None or memory <= limit:
            best = min(best, cost)
    return best


@given(problems(), st.sampled_from([None, 20.0, 60.0, 120.0]))
@settings(max_examples=150, deadline=None)
def test_ilp_equals_enumeration(problem: ChoiceProblem, limit: float | None) -> None:
    best = enumerate_best(problem, limit)
    if math.isinf(best):
        with pytest.raises(Infeasible):
            solve_problem(problem, memory_limit=limit)
        return
    solution = solve_problem(problem, memory_limit=limit)
    assert solution.objective == pytest.approx(best, abs=1e-6)
    assert solution.bound <= solution.objective + 1e-9
    assert solution.gap <= 1e-4
    cost, memory = evaluate(problem, solution.chosen)
    assert cost == pytest.approx(solution.objective)
    assert limit is None or memory <= limit + 1e-6


@given(problems())
@settings(max_examples=150, deadline=None)
def test_elimination_equals_enumeration(problem: ChoiceProblem) -> None:
    best = enumerate_best(problem, None)
    found = minimise(problem)
    assert found is not None
    cost, chosen = found
    assert cost == pytest.approx(best)
    if not math.isinf(best):
        assert evaluate(problem, chosen)[0] == pytest.approx(best)


def test_elimination_gives_up_before_its_tables_are_too_large() -> None:
    problem = ChoiceProblem()
    for node in range(6):
        problem.add_node(node, np.zeros(10))
    for i, j in itertools.combinations(range(6), 2):
        problem.add_edge(i, j, np.ones((10, 10)))
    assert minimise(problem, max_entries=10_000) is None
    assert minimise(problem, max_entries=10_000_000) is not None
