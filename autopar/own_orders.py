"""Orders of a pipeline's ranks that are made for the seconds and the memory of its stages.

Stages are planned for the orders that hold least. What they leave of each rank's memory bounds how
many microbatches may be in flight. Orders are made by list scheduling (`core/list_schedule.py`)
with several choices of how much to begin with and when to wait; the fastest on the clock whose
ranks fit is taken. ZB-H1 is one of those that are tried.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.core.list_schedule import RankLoad, list_schedule, most_ahead
from autopar.core.plan import Plan
from autopar.core.schedule import Orders, actions, kinds_of, orders_of
from autopar.cost_model.rank_memory import rank_memory
from autopar.cost_model.stages import action_seconds, ranks_time

__all__ = ["fastest_orders", "least_held"]

_PATIENCE = (0.0, 0.5, 1.0)
_TIGHTENED = 4  # times that budgets are cut by what their orders are over
_SHARE = 0.5  # of the forwards between those that 1F1B and ZB-H2 begin with


def least_held(ranks: int, microbatches: int) -> Orders:
    """1F1B with each weight gradient behind its input gradient: the least in flight."""
    whole = kinds_of(actions("1f1b", ranks, microbatches))
    return orders_of([kinds.replace("B", "IW") for kinds in whole])


def fastest_orders(
    plans: Sequence[Plan],
    transfer_s: Sequence[float],
    microbatches: int,
    limit: int | None,
    known: Orders | None = None,
    quick: bool = False,
) -> Orders | None:
    """The orders with which a step takes least.

    Args:
        plans: of the stages, one a rank.
        transfer_s: of a microbatch over each cut.
        microbatches: of the step.
        limit: bytes of each rank, if there is one.
        known: orders to compare with.
        quick: try few, and take what they leave of memory for granted.

    Returns:
        None if none fits.
    """
    candidates = [] if known is None else [kinds_of(known)]
    candidates += _made(plans, transfer_s, microbatches, limit, quick)
    if microbatches >= len(plans) and not quick:
        candidates.append(kinds_of(actions("zero-bubble", len(plans), microbatches)))
    if not quick:
        candidates.append(kinds_of(least_held(len(plans), microbatches)))
    timed = [(ranks_time(plans, orders_of(k), transfer_s).step_s, k) for k in _unlike(candidates)]
    for _, kinds in sorted(timed, key=lambda found: found[0]):
        orders = orders_of(kinds)
        if limit is None or quick or not any(_excess(plans, orders, limit)):
            return orders
    return None


def _unlike(candidates: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    return list(dict.fromkeys(candidates))


def _made(
    plans: Sequence[Plan],
    transfer_s: Sequence[float],
    microbatches: int,
    limit: int | None,
    quick: bool,
) -> Iterator[tuple[str, ...]]:
    """By list scheduling, within budgets that are cut until the ranks fit."""
    ranks = len(plans)
    loads = [_load(plan, limit) for plan in plans]
    most = most_ahead(ranks, microbatches)
    least = [min(microbatches, ranks - r) for r in range(ranks)]
    # later ranks have less to fill, and what they begin early delays the first gradients
    falling = [
        a + round((1 - r / ranks) * (b - a))
        for r, (a, b) in enumerate(zip(least, most, strict=True))
    ]
    between = [a + round(_SHARE * (b - a)) for a, b in zip(least, most, strict=True)]
    tried = (most, falling) if quick else (most, falling, between, least)
    for warmup, patience in itertools.product(tried, _PATIENCE[quick:]):
        own = loads
        for _ in range(_TIGHTENED):
            kinds = list_schedule(
                own, microbatches, transfer_s, warmup=warmup, patience=patience
            ).kinds
            over = [0] * ranks
            if limit is not None and not quick:
                over = _excess(plans, orders_of(kinds), limit)
            if not any(over):
                yield kinds
                break
            own = [
                replace(load, budget=load.budget - more)
                for load, more in zip(own, over, strict=True)
            ]


def _excess(plans: Sequence[Plan], orders: Orders, limit: int) -> list[int]:
    """Bytes of each rank that exceed a limit."""
    memory = rank_memory(orders, [p.predicted.held for p in plans])
    return [max(0, sum(kinds.values()) - limit) for kinds in memory]


def _load(plan: Plan, limit: int | None) -> RankLoad:
    seconds, held = action_seconds(plan), plan.predicted.held
    load = RankLoad(
        forward_s=seconds["F"],
        input_s=seconds["I"],
        weight_s=seconds["W"],
        begin_s=plan.predicted.phases["prepare"],
    )
    if limit is None:
        return load
    assert held is not None
    waiting = sum(held.waiting.values()) + held.up
    delayed = sum(held.delayed.values())
    tops = {
        part: max(sum(kinds.values()) for (_, p), kinds in held.tops.items() if p == part)
        for _, part in held.tops
    }
    own = {0: waiting, 1: waiting, 2: delayed}  # a part's microbatch is in its highest moment
    budget = min(limit - tops[part] + own[part] for part in own if part in tops)
    return replace(load, waiting=waiting, delayed=delayed, budget=budget)
