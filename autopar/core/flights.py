"""What a schedule keeps in memory: microbatches in flight, sums of gradients, values on their way.

A value that was sent is held until its receiver is known to have it. What a rank knows is found by
vector clocks (Mattern 1989): a message tells how far its sender had come, and how far that one knew
others had. So what is held does not depend on timing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autopar.core.schedule import Action, Orders

__all__ = ["Flight", "arrived", "flights", "most"]


@dataclass(frozen=True, slots=True)
class Flight:
    """What one stage holds at most.

    Attributes:
        first: microbatches in flight until its first backward has ended.
        later: microbatches in flight after that, when sums of gradients are there.
        up: values of other turns that are on their way to the next stage while a forward runs, and
            while a backward does.
        down: the same to the stage before.
    """

    first: int = 1
    later: int = 0
    up: tuple[int, int] = (0, 0)
    down: tuple[int, int] = (0, 0)


def most(held: Iterable[Flight]) -> Flight:
    """What holds no less than any of these."""
    found = list(held)
    ways = [
        (max(pair[0] for pair in pairs), max(pair[1] for pair in pairs))
        for pairs in ([f.up for f in found], [f.down for f in found])
    ]
    return Flight(max(f.first for f in found), max(f.later for f in found), ways[0], ways[1])


def _source(action: Action, num_stages: int) -> tuple[str, int, int] | None:
    """Way, stage and microbatch of the action whose result this one receives."""
    if action.kind == "F":
        return ("up", action.stage - 1, action.microbatch) if action.stage else None
    if action.kind == "W" or action.stage + 1 == num_stages:
        return None
    return "down", action.stage + 1, action.microbatch


def _sent(action: Action, num_stages: int) -> tuple[str, int, int] | None:
    """Way, stage and microbatch of what an action sends."""
    if action.kind == "F":
        last = action.stage + 1 == num_stages
        return None if last else ("up", action.stage, action.microbatch)
    return None if action.kind == "W" or not action.stage else (
        "down", action.stage, action.microbatch
    )  # fmt: skip


def arrived(orders: Orders) -> tuple[tuple[tuple[Action, ...], ...], ...]:
    """For each rank and action: what of its own sends is known to have arrived when it begins.

    Args:
        orders: as `core.schedule.actions` gives them.

    Returns:
        By rank and position in its order, the actions whose results arrived, each once. An action
        begins when its own receives are done.
    """
    stages = 1 + max((a.stage for order in orders for a in order), default=-1)
    receiver = {
        _source(a, stages): (rank, i)
        for rank, order in enumerate(orders)
        for i, a in enumerate(order)
        if _source(a, stages) is not None
    }
    clocks = [[0] * len(orders) for _ in orders]
    told: dict[tuple[str, int, int], list[int]] = {}
    waiting: list[list[Action]] = [[] for _ in orders]
    found: list[list[tuple[Action, ...]]] = [[] for _ in orders]
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while len(found[rank]) < len(order):
                action = order[len(found[rank])]
                source = _source(action, stages)
                if source is not None and source not in told:
                    break
                clock = clocks[rank] = [*clocks[rank]]
                for other, position in enumerate(told[source] if source is not None else ()):
                    clock[other] = max(clock[other], position)
                clock[rank] = len(found[rank]) + 1
                there = tuple(a for a in waiting[rank] if _is_there(a, stages, receiver, clock))
                waiting[rank] = [a for a in waiting[rank] if a not in there]
                found[rank].append(there)
                sent = _sent(action, stages)
                if sent is not None:
                    told[sent] = clock
                    waiting[rank].append(action)
                moved = True
    return tuple(map(tuple, found))


def _is_there(
    action: Action,
    stages: int,
    receiver: dict[tuple[str, int, int] | None, tuple[int, int]],
    clock: Sequence[int],
) -> bool:
    """True if the receiver is known to have begun the action that takes the value."""
    where = receiver.get(_sent(action, stages))
    return where is not None and clock[where[0]] > where[1]


def flights(orders: Orders) -> tuple[Flight, ...]:
    """What each stage holds at most, from the orders of all ranks."""
    stages = 1 + max((a.stage for order in orders for a in order), default=-1)
    first, later = [0] * stages, [0] * stages
    ahead = {(s, way): [0, 0] for s in range(stages) for way in ("up", "down")}
    known = arrived(orders)
    for rank, order in enumerate(orders):
        live = [0] * stages
        summed = [False] * stages
        held: list[Action] = []
        for position, action in enumerate(order):
            s = action.stage
            held = [a for a in held if a not in known[rank][position]]
            for (other, way), most in ahead.items():
                number = sum(_way(a, stages) == (other, way) for a in held)
                late = action.kind != "F"
                most[late] = max(most[late], number)
            live[s] += action.kind == "F"
            counts = later if summed[s] else first
            counts[s] = max(counts[s], live[s])
            summed[s] = summed[s] or action.kind != "F"
            live[s] -= action.kind in ("B", "W")
            if _sent(action, stages) is not None:
                held.append(action)
    return tuple(
        Flight(first[s], later[s], _pair(ahead[s, "up"]), _pair(ahead[s, "down"]))
        for s in range(stages)
    )


def _way(action: Action, stages: int) -> tuple[int, str] | None:
    sent = _sent(action, stages)
    return None if sent is None else (sent[1], sent[0])


def _pair(counts: list[int]) -> tuple[int, int]:
    return counts[0], counts[1]
