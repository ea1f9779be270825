"""The ILP against exhaustive enumeration."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Hashable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.solver.discrete import eliminate
from autopar.solver.discrete.eliminate import _order, minimise
from autopar.solver.discrete.ilp import Infeasible, Prepared, solve_problem
from autopar.solver.discrete.messages import MessagePassing
from autopar.solver.discrete.problem import Array, ChoiceProblem, evaluate
from autopar.solver.discrete.reduce import Reduced, _gain, _joined


@st.composite
def problems(draw: st.DrawFn) -> ChoiceProblem:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    problem = ChoiceProblem()
    count = draw(st.integers(1, 6))
    for node in range(count):
        states = int(rng.integers(1, 5))
        problem.add_node(node, rng.integers(0, 20, states).astype(float))
    for i, j in itertools.combinations(range(count), 2):
        if rng.random() < 0.6:
            shape = (len(problem.costs[i]), len(problem.costs[j]))
            matrix = rng.integers(0, 20, shape).astype(float)
            matrix[rng.random(shape) < 0.15] = np.inf
            problem.add_edge(i, j, matrix)
    return problem


def enumerate_best(problem: ChoiceProblem) -> float:
    best = math.inf
    for states in itertools.product(*(range(len(c)) for c in problem.costs.values())):
        best = min(best, evaluate(problem, dict(zip(problem.costs, states, strict=True))))
    return best


@given(problems())
@settings(max_examples=150, deadline=None)
def test_ilp_equals_enumeration(problem: ChoiceProblem) -> None:
    best = enumerate_best(problem)
    if math.isinf(best):
        with pytest.raises(Infeasible):
            solve_problem(problem)
        return
    solution = solve_problem(problem)
    assert solution.objective == pytest.approx(best, abs=1e-6)
    assert solution.bound <= solution.objective + 1e-9
    assert solution.gap <= 1e-4
    assert evaluate(problem, solution.chosen) == pytest.approx(solution.objective)


@given(problems())
@settings(max_examples=150, deadline=None)
def test_elimination_equals_enumeration(problem: ChoiceProblem) -> None:
    best = enumerate_best(problem)
    found = minimise(problem)
    assert found is not None
    cost, chosen = found
    assert cost == pytest.approx(best)
    if not math.isinf(best):
        assert evaluate(problem, chosen) == pytest.approx(best)


@given(problems(), st.integers(1, 40))
@settings(max_examples=100, deadline=None)
def test_tables_that_are_summed_in_blocks_equal_whole_ones(
    problem: ChoiceProblem, block: int
) -> None:
    whole = minimise(problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eliminate, "_BLOCK", block)
        assert minimise(problem) == whole


def test_elimination_gives_up_before_its_tables_are_too_large() -> None:
    problem = ChoiceProblem()
    for node in range(6):
        problem.add_node(node, np.zeros(10))
    for i, j in itertools.combinations(range(6), 2):
        problem.add_edge(i, j, np.ones((10, 10)))
    assert minimise(problem, max_entries=10_000) is None
    assert minimise(problem, max_entries=10_000_000) is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eliminate, "_MAX_TABLE", 10**4)  # of 10**5 that are left of the first node
        assert minimise(problem, max_entries=10_000_000) is None


def slow_order(problem: ChoiceProblem) -> list[Hashable]:
    """Least weighted fill-in first, then the smallest table; all of it found anew for each node."""
    states = {node: len(costs) for node, costs in problem.costs.items()}
    pairs = {frozenset(edge) for edge in problem.edges}
    order: list[Hashable] = []
    while len(order) < len(states):
        efforts: dict[Hashable, tuple[int, int]] = {}
        for node in states.keys() - set(order):
            around = [n for n in states if n not in order and frozenset((n, node)) in pairs]
            missing = (p for p in itertools.combinations(around, 2) if frozenset(p) not in pairs)
            fill = sum(states[a] * states[b] for a, b in missing)
            efforts[node] = fill, math.prod(states[n] for n in (node, *around))
        node = min((n for n in states if n in efforts), key=efforts.__getitem__)
        around = [n for n in states if n not in order and frozenset((n, node)) in pairs]
        pairs |= {frozenset(pair) for pair in itertools.combinations(around, 2)}
        order.append(node)
    return order


@pytest.mark.parametrize("seed", range(20))
def test_nodes_are_eliminated_in_the_order_of_the_least_fill(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = ChoiceProblem({n: np.zeros(int(rng.integers(1, 5))) for n in range(14)})
    for i, j in itertools.combinations(range(14), 2):
        if rng.random() < 0.25:
            problem.add_edge(i, j, np.zeros((len(problem.costs[i]), len(problem.costs[j]))))
    states = {node: len(costs) for node, costs in problem.costs.items()}
    assert _order(states, problem.edges, 1 << 40) == slow_order(problem)


@given(problems(), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_bounds_that_are_resumed_equal_those_in_one_go(problem: ChoiceProblem, first: int) -> None:
    resumed = MessagePassing(problem)
    resumed.run(first, 1e-3)
    found, whole = resumed.run(40, 1e-6), MessagePassing(problem).run(40, 1e-6)
    assert (found.lower, found.upper) == (whole.lower, whole.upper)
    assert found.chosen == whole.chosen


@given(problems(), st.integers(1, 12), st.integers(1, 6))
@settings(max_examples=150, deadline=None)
def test_nothing_with_other_states_than_the_likeliest_costs_less(
    problem: ChoiceProblem, count: int, sweeps: int
) -> None:
    passing = MessagePassing(problem)
    passing.run(sweeps, 0.0)
    keep, rest = passing.likeliest(count)
    assert all(len(states) for states in keep.values())
    for states in itertools.product(*(range(len(c)) for c in problem.costs.values())):
        chosen = dict(zip(problem.costs, states, strict=True))
        if any(state not in keep[node] for node, state in chosen.items()):
            # what bounds have ruled out may cost less than the rest, but not than the best known
            cost = evaluate(problem, chosen)
            assert cost + 1e-7 >= min(rest, passing.upper)


@given(problems())
@settings(max_examples=150, deadline=None)
def test_bounds_hold_and_keep_what_is_better(problem: ChoiceProblem) -> None:
    best = enumerate_best(problem)
    passing = MessagePassing(problem)
    found = passing.run(40, 1e-6)
    assert found.lower <= best + 1e-9
    if math.isinf(best):
        return
    assert best <= found.upper + 1e-9
    if found.chosen:
        assert evaluate(problem, found.chosen) == pytest.approx(found.upper)
    kept = itertools.product(*(found.keep[node].tolist() for node in problem.costs))
    least = min(evaluate(problem, dict(zip(problem.costs, states, strict=True))) for states in kept)
    assert min(least, found.upper) == pytest.approx(best)


@given(problems())
@settings(max_examples=100, deadline=None)
def test_what_bounds_leave_open_is_eliminated(problem: ChoiceProblem) -> None:
    best = enumerate_best(problem)
    if math.isinf(best):
        return
    prepared = Prepared(
        Reduced(problem, kept={n: np.arange(len(c)) for n, c in problem.costs.items()})
    )
    prepared.least = None  # as if it were too wide
    # each goes on from the last
    for exact, proved in ((False, False), (False, True), (True, True)):
        solution = solve_problem(problem, exact=exact, proved=proved, prepared=prepared)
        assert solution.bound <= best + 1e-9 <= solution.objective + 2e-9
    assert solution.objective == pytest.approx(best)


def test_where_messages_stay_apart_more_of_the_states_are_eliminated() -> None:
    """A ladder of cycles, on which the bound of messages is far from the optimum."""
    rng = np.random.default_rng(3)
    problem = ChoiceProblem({n: rng.random(20) for n in range(40)})
    for n in range(38):
        problem.add_edge(n, n + 2, rng.random((20, 20)) ** 8)
    for n in range(39):
        problem.add_edge(n, n + 1, rng.random((20, 20)) ** 8)
    optimum = minimise(problem, 1 << 40)
    assert optimum is not None
    kept = {n: np.arange(20) for n in problem.costs}
    prepared = Prepared(Reduced(problem, kept=kept))
    prepared.least = None  # as if it were too wide
    few = prepared.passing.run(40, 0.0)
    assert few.gap > 0.02
    found = solve_problem(problem, exact=False, prepared=prepared)
    assert found.bound <= optimum[0] + 1e-9
    assert found.objective <= optimum[0] + 1e-9 < few.upper - 1e-3
    assert solve_problem(problem, prepared=prepared).bound == pytest.approx(optimum[0])


def test_sweeps_that_only_raise_a_bound_are_left_out_where_it_is_of_no_use() -> None:
    rng = np.random.default_rng(0)
    problem = ChoiceProblem({n: rng.random(12) for n in range(24)})
    for pair in itertools.combinations(range(24), 2):
        problem.add_edge(*pair, rng.random((12, 12)))
    kept = {n: np.arange(12) for n in problem.costs}
    whole, short = (Prepared(Reduced(problem, kept=dict(kept))) for _ in range(2))
    proved = solve_problem(problem, exact=False, prepared=whole)
    found = solve_problem(problem, exact=False, proved=False, prepared=short)
    assert short.passing._sweeps < whole.passing._sweeps
    assert found.bound < proved.bound < proved.objective
    assert proved.objective <= found.objective <= 1.002 * proved.objective


def test_what_few_sweeps_leave_far_is_swept_on() -> None:
    """Nodes in no order along a chain: a sweep takes what one end costs few nodes far."""
    rng = np.random.default_rng(0)
    problem = ChoiceProblem({int(n): rng.random(40) * 1e-3 for n in rng.permutation(60)})
    for n in (0, 59):
        problem.costs[n] = rng.random(40)
    for n in range(59):
        problem.add_edge(n, n + 1, 10.0 * (1.0 - np.eye(40)))
    for n, away in itertools.product(range(60), (2, 3)):
        if n + away < 60:
            problem.add_edge(n, n + away, rng.random((40, 40)) * 1e-4)
    few = MessagePassing(problem).run(40, 0.0)
    assert few.gap > 0.5
    found = solve_problem(problem, exact=False)
    assert found.gap < 1e-3
    assert found.objective < few.upper


def slow_gain(costs: Array, matrices: list[Array]) -> Array:
    """At least how much state r saves over s, pair by pair."""
    count = len(costs)
    gain = np.full((count, count), -np.inf)
    for s, r in itertools.permutations(range(count), 2):
        total = float(costs[s] - costs[r])
        for matrix in matrices:
            pairs = zip(matrix[s].tolist(), matrix[r].tolist(), strict=True)
            total += min(math.inf if math.isinf(a) else a - b for a, b in pairs)
        gain[s, r] = -math.inf if math.isnan(total) else total
    return gain


@pytest.mark.parametrize("seed", range(40))
def test_gains_of_states_that_may_dominate_are_exact(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(2, 9))
    costs = rng.integers(0, 4, count).astype(float)
    matrices = [rng.integers(0, 3, (count, int(n))).astype(float) for n in rng.integers(1, 6, 3)]
    for matrix in matrices:
        matrix[rng.random(matrix.shape) < 0.3] = np.inf
    wanted, found = slow_gain(costs, matrices), _gain(costs, matrices)
    assert ((found >= 0) == (wanted >= 0)).all()
    assert np.array_equal(found[found >= 0], wanted[wanted >= 0])


@pytest.mark.parametrize("sizes", [(7, 3, 4), (9, 40, 50), (1, 30, 30)])
def test_a_fold_takes_the_first_best_state(sizes: tuple[int, int, int]) -> None:
    rng = np.random.default_rng(0)
    own, left, right = (rng.integers(0, 3, shape).astype(float)
                        for shape in (sizes[0], sizes[:2], (sizes[0], sizes[2])))  # fmt: skip
    left[rng.random(left.shape) < 0.3] = np.inf
    total = own[:, None, None] + left[:, :, None] + right[:, None, :]
    best, least = _joined(own, left, right)
    assert np.array_equal(best, total.argmin(axis=0))
    assert np.array_equal(least, total.min(axis=0))


def test_nothing_is_printed() -> None:
    """HiGHS prints a banner when the first one of a process is made."""
    program = """
import pulp
from autopar.solver.discrete.highs import HiGHS
problem = pulp.LpProblem("least")
x = problem.add_variable("x", lowBound=2, cat="Integer")
problem.setObjective(pulp.LpAffineExpression({x: 1.0}))
problem += pulp.LpAffineExpression({x: 2.0}) >= 5
problem.solve(HiGHS(gap_abs=0.0, mip_max_nodes=10))
assert x.value() == 3.0 and problem.sol_status == pulp.LpSolutionOptimal
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout == b""
