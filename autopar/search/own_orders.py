"""Orders of a pipeline's ranks that are made for the seconds and the memory of its stages.

Stages are planned for the orders that hold least. What they leave of each rank's memory bounds how
many microbatches may be in flight. Orders are made by list scheduling (`core/list_schedule.py`)
with several choices of how much to begin with and when to wait; the fastest on the clock whose
ranks fit is taken. ZB-H1 is one of those that are tried. Where the fastest is not near to what no
order is below, its actions are exchanged (`annealed_orders.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from autopar.core.list_schedule import RankLoad, list_schedule, most_ahead
from autopar.core.plan import Plan
from autopar.core.schedule import Orders, actions, kinds_of, orders_of
from autopar.core.soonest import soonest
from autopar.cost_model.rank_memory import rank_memory
from autopar.cost_model.stages import action_seconds, rank_load, ranks_time
from autopar.search.annealed_orders import annealed

__all__ = ["fastest_orders", "least_held", "least_seconds"]

_PATIENCE = (0.0, 0.5, 1.0)
_TIGHTENED = 3  # times that budgets are cut by what their orders are over
_CLOSE = 2e-3  # relative, to what no order is below


def least_held(ranks: int, microbatches: int) -> Orders:
    """1F1B with each weight gradient behind its input gradient: the least in flight."""
    whole = kinds_of(actions("1f1b", ranks, microbatches))
    return orders_of([kinds.replace("B", "IW") for kinds in whole])


def least_seconds(plans: Sequence[Plan], microbatches: int) -> float:
    """When the last of the first ranks is done at the soonest, in any order of its work."""
    there_s = least_s = 0.0
    for plan in plans:
        seconds, phases = action_seconds(plan), plan.predicted.phases
        begun_s = max(there_s, phases["prepare"])
        turns_s = microbatches * (seconds["F"] + seconds["B"])
        least_s = max(least_s, begun_s + turns_s + phases["finish"])
        there_s = begun_s + seconds["F"]
    return least_s


def fastest_orders(
    plans: Sequence[Plan],
    transfer_s: Sequence[float],
    microbatches: int,
    limit: int | None,
    known: Orders | None = None,
    quick: bool = False,
    search: bool = False,
) -> Orders | None:
    """The orders with which a step takes least.

    Args:
        plans: of the stages, one a rank.
        transfer_s: of a microbatch over each cut.
        microbatches: of the step.
        limit: bytes of each rank, if there is one.
        known: orders to compare with.
        quick: try few, and take what they leave of memory for granted.
        search: exchange actions of the fastest that fits.

    Returns:
        None if none fits.
    """
    clock, ranks = _Clock(plans, transfer_s, microbatches, limit), len(plans)
    fixed = [] if known is None else [known]
    if not quick:
        fixed.extend(_standard(ranks, microbatches))
    made = [clock.listed(way, clock.loads) for way in _ways(ranks, microbatches, quick)]
    open_ = [*map(clock.timed, fixed), *made]
    while open_:
        best = min(open_, key=_seconds)
        orders = orders_of(best.kinds)
        over = [0] if limit is None or quick else _excess(plans, orders, limit)
        if not any(over):
            return clock.exchanged(best, limit) if search else orders
        open_.remove(best)
        if best.way is not None and best.way.tightened < _TIGHTENED:
            way = best.way._replace(tightened=best.way.tightened + 1)
            open_.append(clock.listed(way, _tightened(best.loads, over)))
    return None


def _standard(ranks: int, microbatches: int) -> Iterator[Orders]:
    """Orders that do not depend on seconds."""
    yield least_held(ranks, microbatches)
    if microbatches >= ranks:
        yield actions("zero-bubble", ranks, microbatches)


class _Way(NamedTuple):
    """How orders are made by list scheduling.

    Attributes:
        warmup: forwards that each rank begins with.
        patience: see `list_schedule`.
        tightened: how often budgets were cut by what the orders were over.
    """

    warmup: tuple[int, ...]
    patience: float
    tightened: int = 0


class _Timed(NamedTuple):
    """Orders with the seconds of a step, and how they were made if by list scheduling."""

    step_s: float
    kinds: tuple[str, ...]
    way: _Way | None = None
    loads: Sequence[RankLoad] = ()


class _Clock:
    """What a step takes in some orders; arguments as of `fastest_orders`."""

    def __init__(
        self,
        plans: Sequence[Plan],
        transfer_s: Sequence[float],
        microbatches: int,
        limit: int | None,
    ) -> None:
        self.plans = plans
        self.transfer_s = transfer_s
        self.microbatches = microbatches
        self.loads = tuple(rank_load(plan, limit) for plan in plans)
        self.updated_s = max(p.predicted.update_s + p.predicted.offload_s for p in plans)

    def timed(self, orders: Orders) -> _Timed:
        """Orders that are known."""
        found = ranks_time(self.plans, orders, self.transfer_s)
        return _Timed(found.step_s, kinds_of(orders))

    def listed(self, way: _Way, loads: Sequence[RankLoad]) -> _Timed:
        """Orders made by list scheduling."""
        found = list_schedule(
            loads, self.microbatches, self.transfer_s, warmup=way.warmup, patience=way.patience
        )
        return _Timed(self._ended(found.ends_s), found.kinds, way, loads)

    def _ended(self, ends_s: Sequence[float]) -> float:
        finish = (plan.predicted.phases["finish"] for plan in self.plans)
        return max(end + more for end, more in zip(ends_s, finish, strict=True)) + self.updated_s

    def near_s(self) -> float:
        """Little more than what no order is below."""
        done_s = soonest(self.loads, self.microbatches, self.transfer_s)
        return self._ended(done_s) * (1 + _CLOSE)

    def exchanged(self, known: _Timed, limit: int | None) -> Orders:
        """Orders with actions exchanged, if they are faster and fit, or else those."""
        finish_s = [plan.predicted.phases["finish"] for plan in self.plans]
        near_s, loads, orders = self.near_s(), self.loads, orders_of(known.kinds)
        for _ in range(_TIGHTENED if known.step_s > near_s else 0):
            enough_s = near_s - self.updated_s
            found = annealed(known.kinds, loads, self.transfer_s, finish_s, enough_s)
            made = orders_of(found)
            over = [0] if limit is None else _excess(self.plans, made, limit)
            if not any(over):
                # what sends take of compute is not in `known`
                return min(orders, made, key=lambda each: self.timed(each).step_s)
            loads = _tightened(loads, over)
        return orders


def _tightened(loads: Sequence[RankLoad], over: Sequence[int]) -> tuple[RankLoad, ...]:
    """Loads with budgets that are less by what orders were over."""
    pairs = zip(loads, over, strict=True)
    return tuple(replace(load, budget=load.budget - more) for load, more in pairs)


def _seconds(found: _Timed) -> float:
    return found.step_s


def _ways(ranks: int, microbatches: int, quick: bool) -> Iterator[_Way]:
    """How much to begin with, and when to wait."""
    most = most_ahead(ranks, microbatches)
    # later ranks have less to fill, and what they begin early delays the first gradients
    shares = (1.0, None) if quick else (1.0, None, 0.5, 0.0)
    for share, patience in itertools.product(shares, _PATIENCE[quick:]):
        found: list[int] = []
        for r, high in enumerate(most):
            low = min(microbatches, ranks - r)
            part = 1 - r / ranks if share is None else share
            found.append(low + round(part * (high - low)))
        yield _Way(tuple(found), patience)


def _excess(plans: Sequence[Plan], orders: Orders, limit: int) -> list[int]:
    """Bytes of each rank that exceed a limit."""
    memory = rank_memory(orders, [p.predicted.held for p in plans])
    return [max(0, sum(kinds.values()) - limit) for kinds in memory]
