"""What a schedule keeps in memory: microbatches in flight, sums of gradients, values on their way.

A value that was sent is held until its receiver is known to have it. What a rank knows is found by
vector clocks (Mattern 1989): a message tells how far its sender had come, and how far that one knew
others had. So what is held does not depend on timing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from autopar.core.schedule import Action, Orders, orders_of, split_stages

__all__ = ["ALL", "ALONE", "INPUT", "NONE", "Flight", "Moment", "Others", "Waits", "arrived",
           "checked_orders", "flights", "in_any_order", "moments", "most", "parts_of"]  # fmt: skip

NONE, INPUT, ALL = range(3)
"""Which sums of gradients a stage has: none, those that input gradients yield by the way, all."""


class Waits(NamedTuple):
    """What a second of each part of a stage's step adds to the step, by microbatch at turns.

    With other ranks that wait for it, more than a second; while it would wait itself, less.

    Attributes:
        prepare: of what runs once, in front of the turns.
        forward, inputs, weights: of the parts of a turn.
        finish: of what runs once, behind the turns.
    """

    prepare: float = 1.0
    forward: float = 1.0
    inputs: float = 1.0
    weights: float = 1.0
    finish: float = 1.0

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Waits:
        """From all of them, or from those of the parts of a turn."""
        once = () if len(numbers) == len(cls._fields) else (1.0,)
        return cls._make((*once, *numbers, *once))


ALONE = Waits()
"""A second counts as one (`Flight.waits`)."""


@dataclass(frozen=True, slots=True)
class Others:
    """What one stage holds of other microbatches than the one that runs.

    Attributes:
        waiting: microbatches whose backward has not begun.
        delayed: microbatches whose backward has run but for the weight gradients.
        up: values on their way to the next stage.
        down: values on their way to the stage before.
    """

    waiting: int = 0
    delayed: int = 0
    up: int = 0
    down: int = 0

    def most(self, other: Others | None) -> Others:
        """What is no less than either."""
        if other is None:
            return self
        return Others(
            max(self.waiting, other.waiting),
            max(self.delayed, other.delayed),
            max(self.up, other.up),
            max(self.down, other.down),
        )


@dataclass(frozen=True, slots=True)
class Flight:
    """What one stage holds at most of other microbatches, while each part of one runs.

    Attributes:
        splits: the backward runs in two parts.
        rows: by the sums that there are (`NONE`, `INPUT`, `ALL`), for the forward, the backward
            (its input gradients if it is split) and the weight gradients; None for a part that
            never runs with such sums.
        waits: what a second of each part counts.
    """

    splits: bool = False
    rows: tuple[tuple[Others | None, ...], ...] = (
        (Others(), Others(), None),
        (None, None, None),
        (None, None, None),
    )
    waits: Waits = ALONE

    def part(self, part: int) -> Others:
        """The most while a part runs, whatever sums there are."""
        found = Others()
        for row in self.rows:
            found = found.most(row[part])
        return found

    @property
    def microbatches(self) -> int:
        """Microbatches that are in flight at once."""
        parts = [self.part(part) for part in range(3)]
        return 1 + max(p.waiting + p.delayed for p in parts)


def most(held: Iterable[Flight]) -> Flight:
    """What holds no less than any of these."""
    found = list(held)
    best: dict[tuple[int, int], Others] = {}
    for flight in found:
        _join(best, {(s, p): o for s, row in enumerate(flight.rows) for p, o in enumerate(row)})
    waits = Waits(*(max(row) for row in zip(*(f.waits for f in found), strict=True)))
    return Flight(any(f.splits for f in found), _rows(best), waits)


def _join(
    best: dict[tuple[int, int], Others], more: Mapping[tuple[int, int], Others | None]
) -> None:
    for key, others in more.items():
        if others is not None:
            best[key] = others.most(best.get(key))


def _rows(best: Mapping[tuple[int, int], Others]) -> tuple[tuple[Others | None, ...], ...]:
    return tuple(tuple(best.get((sums, part)) for part in range(3)) for sums in range(3))


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


def checked_orders(kinds: Sequence[str], ranks: int, microbatches: int) -> tuple[str, ...]:
    """Orders as text (`core.schedule.kinds_of`), if all ranks come to their end.

    Raises:
        ValueError: a rank lacks an action or repeats one, or waits for ever.
    """
    wanted = sorted("FIW" * microbatches)
    for rank, text in enumerate(kinds):
        if sorted(text) != wanted:
            raise ValueError(f"the order of pipeline rank {rank} has not F, I, W once a microbatch")
    orders = orders_of(kinds)
    early = any(
        text[:n].count("W") > text[:n].count("I") or text[:n].count("I") > text[:n].count("F")
        for text in kinds
        for n in range(len(text))
    )
    ran = [len(done) for done in arrived(orders)]
    if len(kinds) != ranks or early or ran != [len(order) for order in orders]:
        raise ValueError(f"the orders of {len(kinds)} pipeline ranks wait for each other for ever")
    return tuple(kinds)


def _is_there(
    action: Action,
    stages: int,
    receiver: dict[tuple[str, int, int] | None, tuple[int, int]],
    clock: Sequence[int],
) -> bool:
    """True if the receiver is known to have begun the action that takes the value."""
    where = receiver.get(_sent(action, stages))
    return where is not None and clock[where[0]] > where[1]


@dataclass(frozen=True, slots=True)
class Moment:
    """What a rank holds while an action runs.

    Attributes:
        action: that runs.
        held: of each stage of the rank, without the microbatch that runs.
        sums: of each, which sums of gradients there are.
    """

    action: Action
    held: Mapping[int, Others]
    sums: Mapping[int, int] = field(default_factory=dict)


def moments(orders: Orders) -> tuple[tuple[Moment, ...], ...]:
    """What each rank holds while each of its actions runs."""
    return _moments_of(tuple(map(tuple, orders)))


@lru_cache(maxsize=4)  # the stages of a pipeline ask one by one
def _moments_of(orders: tuple[tuple[Action, ...], ...]) -> tuple[tuple[Moment, ...], ...]:
    stages = 1 + max((a.stage for order in orders for a in order), default=-1)
    known = arrived(orders)
    return tuple(
        tuple(_moments(order, there, stages)) for order, there in zip(orders, known, strict=True)
    )


def _moments(
    order: Sequence[Action], there: Sequence[Sequence[Action]], stages: int
) -> Iterator[Moment]:
    held = {a.stage: Others() for a in order}
    sums = dict.fromkeys(held, NONE)
    for action, landed in zip(order, there, strict=True):
        for sent in landed:
            held[sent.stage] = _moved(held[sent.stage], sent, -1, stages)
        s = action.stage
        if action.kind == "W":
            held[s] = replace(held[s], delayed=held[s].delayed - 1)
        elif action.kind != "F":
            held[s] = replace(held[s], waiting=held[s].waiting - 1)
        yield Moment(action, dict(held), dict(sums))
        if action.kind == "F":
            held[s] = replace(held[s], waiting=held[s].waiting + 1)
        elif action.kind == "I":
            held[s] = replace(held[s], delayed=held[s].delayed + 1)
        if action.kind != "F":
            sums[s] = max(sums[s], INPUT if action.kind == "I" else ALL)
        held[s] = _moved(held[s], action, 1, stages)


def _moved(others: Others, action: Action, by: int, stages: int) -> Others:
    """With one more or less value on its way that an action has sent."""
    sent = _sent(action, stages)
    if sent is None:
        return others
    if sent[0] == "up":
        return replace(others, up=others.up + by)
    return replace(others, down=others.down + by)


def flights(orders: Orders) -> tuple[Flight, ...]:
    """What each stage holds at most, from the orders of all ranks."""
    stages = 1 + max((a.stage for order in orders for a in order), default=-1)
    splits = split_stages(orders)
    best: list[dict[tuple[int, int], Others]] = [{} for _ in range(stages)]
    for rank in moments(orders):
        for moment in rank:
            s = moment.action.stage
            for part in parts_of(moment.action, s in splits):
                # the sums of weights are made beside those that their input gradients made
                sums = max(moment.sums[s], INPUT) if part == 2 else moment.sums[s]
                _join(best[s], {(sums, part): moment.held[s]})
    microbatches = 1 + max((a.microbatch for order in orders for a in order), default=-1)
    waits = _waits(len(orders), stages, microbatches, bool(splits))
    return tuple(Flight(s in splits, _rows(best[s]), waits) for s in range(stages))


def _waits(ranks: int, stages: int, microbatches: int, splits: bool) -> Waits:
    """About what a second of each part of equal stages adds to a step, by microbatch.

    With p ranks of v stages and m microbatches they take v m (F + B) + (p - 1) (F + B). Where the
    backward is split, weight gradients run while a rank would wait: (m + p - 1) (F + I) +
    (m - p + 1) W, but no less than m (F + I + W), when the time to fill is full. Half of each is
    counted of these two.
    """
    if not microbatches:
        return ALONE
    around = (ranks - 1) * ranks / (stages * microbatches)
    if splits:
        return Waits.of((1.0 + around / 2, 1.0 + around / 2, max(1.0 - around / 2, 0.5)))
    return Waits.of((1.0 + around, 1.0 + around, 1.0 + around))


def in_any_order(held: Iterable[Flight], ranks: int, microbatches: int) -> tuple[Flight, ...]:
    """Flights of stages whose orders are not settled: with every sum that there may be.

    Where there are microbatches enough to begin with, the rank with most to do never waits for
    gradients, and all that it does counts alike.
    """
    short = max(0.0, (2 * ranks - 1 - microbatches) / ranks)
    wait = short * (ranks - 1) / (2 * microbatches)
    waits = Waits.of((1.0 + wait, 1.0 + wait, max(1.0 - wait, 0.5)))
    none = Others()
    return tuple(
        Flight(
            True,
            tuple(
                tuple(row[part] or (none if part < 2 or sums else None) for part in range(3))
                for sums, row in enumerate(flight.rows)
            ),
            waits,
        )
        for flight in held
    )


def parts_of(action: Action, splits: bool) -> tuple[int, ...]:
    """Parts of a microbatch that an action runs: 0 forward, 1 backward, 2 weight gradients."""
    if action.kind == "B" and splits:
        return 1, 2
    return ({"F": 0, "B": 1, "I": 1, "W": 2}[action.kind],)
