"""Where mixtures of two plans are looked for, and where not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from autopar.solver.found import Met
from autopar.solver.mixture import _meet, _share
from autopar.solver.solve import StepSearch
from tests.test_mixed_bound import cluster, most, traced


def test_one_block_more_than_there_is_room_for_is_cheap_but_not_all() -> None:
    assert _share(0.3, 0.01) == pytest.approx(0.31)
    assert _share(0.97, 0.5) == pytest.approx(0.75)


def test_what_is_told_of_plans_at_a_price_none_is_below() -> None:
    limit = int(0.6 * most("wide"))
    search = StepSearch(traced("wide"), cluster(), memory_limit=limit)
    search.glance()
    (variants,) = search.search._known.values()
    for variant in variants:
        memory = variant.search.memory
        price = 0.1 * memory.approximate().objective / limit
        told = memory.meet(price)
        assert told is not None
        assert memory.meet(price) is None  # nothing new
        costs = [met.seconds + price * (met.peak - limit) for met in memory.met()]
        assert told <= min(costs) * (1 + 1e-9)
        assert told >= 0.9 * min(costs), "it says little"


class _Memory:
    """Plans of one kind, and what is told of them at any price."""

    def __init__(self, told: float) -> None:
        self.told = told
        self.asked: list[float] = []

    def met(self) -> list[Met]:
        more = len(self.asked)
        return [Met({}, 1.0, 20.0 + more), Met({}, 2.0 + more, 5.0)]

    def meet(self, price: float) -> float | None:
        self.asked.append(price)
        return self.told


@pytest.mark.parametrize(("below_s", "rounds"), [(1.0, 1), (1.9, 4)])
def test_no_other_price_is_tried_where_no_mixture_may_help(below_s: float, rounds: int) -> None:
    memories = [_Memory(1.5), _Memory(1.6)]
    variants: list[Any] = [SimpleNamespace(search=SimpleNamespace(memory=m)) for m in memories]
    _meet(variants, 10.0, below_s, 0.01)
    assert [len(m.asked) for m in memories] == [rounds] * 2
