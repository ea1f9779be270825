"""Orders of a pipeline's ranks whose actions are exchanged: against all orders that there are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from autopar.core.list_schedule import RankLoad, list_schedule, most_ahead
from autopar.core.schedule import Kind, kinds_of, orders_of
from autopar.cost_model.pipeline import ScheduleError, simulate_pipeline
from autopar.search import annealed_orders
from autopar.search.annealed_orders import annealed
from autopar.search.own_orders import least_held

RANKS, TURNS = 2, 3
HOP_S = 0.01
WARMUP = most_ahead(RANKS, TURNS)


def every_order(rank: int) -> Iterator[str]:
    """Texts of F, I and W, each so many times, none ahead of what it reads."""
    most = WARMUP[rank]

    def more(text: str) -> Iterator[str]:
        forward, inputs, weights = map(text.count, "FIW")
        if weights == TURNS:
            yield text
        if forward < TURNS and (inputs or forward < most):
            yield from more(text + "F")
        if inputs < forward:
            yield from more(text + "I")
        if weights < inputs:
            yield from more(text + "W")

    return more("")


def done_s(
    kinds: Sequence[str],
    loads: Sequence[RankLoad],
    finish_s: Sequence[float],
    hop_s: float = HOP_S,
) -> float:
    """When the last rank is done, by the simulator of pipelines; infinite where none gets on."""
    seconds: list[dict[Kind, float]] = [
        {"F": x.forward_s, "I": x.input_s, "W": x.weight_s} for x in loads
    ]
    begin_s = [load.begin_s for load in loads]
    try:
        found = simulate_pipeline(orders_of(kinds), seconds, hop_s, begin_s=begin_s)
    except ScheduleError:
        return math.inf
    return max(end + more for end, more in zip(found.finish_s(), finish_s, strict=True))


def most_held(kinds: str, load: RankLoad) -> float:
    """Bytes of microbatches in flight that a rank holds at most."""
    counts = (tuple(map(kinds[:n].count, "FIW")) for n in range(1, len(kinds) + 1))
    return max((f - i) * load.waiting + (i - w) * load.delayed for f, i, w in counts)


def random_loads(seed: int, budget: float = math.inf) -> tuple[list[RankLoad], list[float]]:
    rng = np.random.default_rng(seed)
    loads = [
        RankLoad(
            forward_s=rng.uniform(0.5, 2),
            input_s=rng.uniform(0.5, 2),
            weight_s=rng.uniform(0.5, 2),
            begin_s=rng.uniform(0, 3),
            waiting=2.0,
            delayed=1.0,
            budget=budget,
        )
        for _ in range(RANKS)
    ]
    return loads, list(rng.uniform(0, 3, RANKS))


@pytest.mark.parametrize(("budget", "near"), [(math.inf, 1e-3), (4.0, 0.01)])
def test_hardly_any_orders_are_faster(budget: float, near: float) -> None:
    """A budget stands between some orders and all that are near to them."""
    every = list(itertools.product(*(every_order(rank) for rank in range(RANKS))))
    first, shorter = kinds_of(least_held(RANKS, TURNS)), 0
    for seed in range(6):
        loads, finish_s = random_loads(seed, budget)
        found = annealed(first, loads, [HOP_S], finish_s, 0.0)
        assert max(map(most_held, found, loads)) <= budget
        fitting = [
            kinds
            for kinds in every
            if all(most_held(k, x) <= budget for k, x in zip(kinds, loads, strict=True))
        ]
        first_s, found_s = (done_s(kinds, loads, finish_s) for kinds in (first, found))
        best_s = min(done_s(kinds, loads, finish_s) for kinds in fitting)
        assert best_s * (1 - 1e-9) <= found_s <= best_s * (1 + near)
        shorter += found_s < first_s * (1 - 1e-9)
    assert shorter


def test_unlike_ranks_wait_less() -> None:
    """Eight ranks, of which the last ones have more to do before they begin."""
    ranks, turns = 8, 8
    rng = np.random.default_rng(0)
    loads = [
        RankLoad(
            forward_s=rng.uniform(0.02, 0.03),
            input_s=rng.uniform(0.02, 0.03),
            weight_s=rng.uniform(0.02, 0.03),
            begin_s=0.1 * (rank > 4),
        )
        for rank in range(ranks)
    ]
    none = [0.0] * ranks
    warmup = most_ahead(ranks, turns)
    listed = list_schedule(loads, turns, none[1:], warmup=warmup, patience=0.0)
    found = annealed(listed.kinds, loads, none[1:], none, 0.0)
    assert found == annealed(listed.kinds, loads, none[1:], none, 0.0)
    assert done_s(found, loads, none, 0.0) < 0.99 * max(listed.ends_s)
    for kinds, most in zip(found, warmup, strict=True):
        assert kinds.index("I") <= most  # what bounds of pipelines take for granted


def test_what_is_enough_ends_the_search() -> None:
    loads, finish_s = random_loads(0)
    first = kinds_of(least_held(RANKS, TURNS))
    assert annealed(first, loads, [HOP_S], finish_s, math.inf) == first


def test_orders_that_cannot_be_better_stay() -> None:
    first = kinds_of(least_held(RANKS, TURNS))
    idle = RankLoad(forward_s=0.0, input_s=0.0, weight_s=0.0)
    assert annealed(first, [idle] * RANKS, [HOP_S], [0.0] * RANKS, 0.0) == first
    loads, finish_s = random_loads(0)
    eager = ("FFFIWIWIW", "FFIWIWFIW")  # the last rank has its first gradient at once
    assert annealed(eager, loads, [HOP_S], finish_s, 0.0) == eager


def test_what_an_exchange_does_not_reach_is_as_it_was(monkeypatch) -> None:
    """The clock that goes on from there says of all orders what one from the start does."""
    clock, compared = annealed_orders._Clock, 0
    goes_on = clock.rerun

    def both(self, known, exchange):
        nonlocal compared
        found = goes_on(self, known, exchange)
        assert found == self.run(annealed_orders._exchanged(known.kinds, exchange))
        compared += found is not None
        return found

    monkeypatch.setattr(clock, "rerun", both)
    ranks, turns = 5, 6
    for seed in range(4):
        rng = np.random.default_rng(seed)
        loads = [
            RankLoad(
                forward_s=rng.uniform(0.5, 2),
                input_s=rng.uniform(0.5, 2),
                weight_s=rng.choice([0.0, 1.0]),
                begin_s=rng.choice([0.0, 3.0]),
                waiting=2.0,
                delayed=1.0,
                budget=12.0,
            )
            for _ in range(ranks)
        ]
        hops_s = list(rng.choice([0.0, 0.1], ranks - 1))
        annealed(kinds_of(least_held(ranks, turns)), loads, hops_s, [0.0] * ranks, 0.0)
    assert compared > 1000
