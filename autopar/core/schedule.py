"""Pipeline schedules as data: the order in which each rank computes its stages' microbatches.

A stage's work on one microbatch is a forward (F) and a backward (B), or, where the backward is
split, an input gradient (I) and a weight gradient (W). Stage s of S depends so::

    F(s) after F(s-1)        B(s) or I(s) after F(s) and B(s+1) or I(s+1)        W(s) after I(s)

With p ranks, m microbatches, v chunks a rank and B = 2F, equal stages stand idle for this share of
the step:

============  ======================  ============================================================
schedule      idle share              paper
============  ======================  ============================================================
gpipe         (p-1) / (v m+p-1)       Huang et al. 2018, arXiv 1811.06965; with chunks m >= p, and
                                      breadth first, Lamy-Poirier 2022, arXiv 2211.05953
1f1b          the same                Narayanan et al. 2020, arXiv 2006.09503
interleaved   (p-1) / (v m+p-1)       Narayanan et al. 2021, arXiv 2104.04473
zero-bubble   (p-1) / (3m+p-1)        ZB-H1 of Qi et al. 2023, arXiv 2401.10241; F = I = W, m >= p
automatic     (p-1) / (3m+p-1)        the automatic schedule of the same; F = I = W, m >= p
============  ======================  ============================================================
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast, get_args

from autopar.core import extensions
from autopar.core.list_schedule import RankLoad, list_schedule, most_ahead
from autopar.errors import ConstraintError

__all__ = [
    "AUTOMATIC",
    "SCHEDULES",
    "Action",
    "InFlight",
    "Kind",
    "Orders",
    "actions",
    "closing_action",
    "in_flight",
    "kinds_of",
    "orders_of",
    "pipeline_schedule",
    "schedules",
    "split_stages",
]

Kind: TypeAlias = Literal["F", "B", "I", "W"]

AUTOMATIC = "automatic"
"""The schedule whose orders are made for the seconds and the memory of a plan's stages."""

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", AUTOMATIC)


@dataclass(frozen=True, slots=True)
class Action:
    """One stage's work on one microbatch.

    Attributes:
        kind: "F" forward, "B" whole backward, "I" gradient of the input, "W" of the weights.
        stage: from 0; stage s lives on rank ``s % ranks``.
        microbatch: from 0.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Orders: TypeAlias = Sequence[Sequence[Action]]


@dataclass(frozen=True, slots=True)
class InFlight:
    """The most microbatches whose activations are held at once, between F and B (or W).

    Attributes:
        ranks: of all stages of a rank together.
        stages: of one stage.
    """

    ranks: tuple[int, ...]
    stages: tuple[int, ...]


Schedule: TypeAlias = Callable[[int, int, int], Orders]
_ADDED: dict[str, Schedule] = {}


def pipeline_schedule(name: str) -> Callable[[Schedule], Schedule]:
    """Register a schedule: `(ranks, microbatches, chunks) -> orders`, one order for each rank.

    Stage s lives on rank ``s % ranks``. Each stage has every microbatch's F once, and either its B
    or its I and W. What the numbers do not allow is a `ConstraintError`; an order that deadlocks
    is found when a plan is made.

    Raises:
        ValueError: there is a schedule of that name.
    """

    def register(function: Schedule) -> Schedule:
        known = _ADDED.get(name)
        if name in SCHEDULES or (known and not extensions.is_same(known, function)):
            raise ValueError(f"there is a pipeline schedule {name!r} already")
        _ADDED[name] = function
        extensions.note("schedule", [name], function)
        return function

    return register


def schedules() -> tuple[str, ...]:
    """Names of all schedules, those of other packages included."""
    extensions.load("autopar.schedules")
    return (*SCHEDULES, *sorted(_ADDED))


def actions(
    schedule: str, ranks: int, microbatches: int, chunks: int = 1
) -> tuple[tuple[Action, ...], ...]:
    """The order of each rank's work; for "automatic" that of equal stages with F = I = W.

    Args:
        schedule: one of `schedules()`.
        ranks: pipeline ranks.
        microbatches: of one step.
        chunks: stages of a rank, so there are ``ranks * chunks``; more than 1 for "interleaved"
            and "gpipe" only.

    Returns:
        For each rank its actions in order.

    Raises:
        ConstraintError: unknown schedule, or numbers that it does not take.
    """
    _check(schedule, ranks, microbatches, chunks)
    if schedule in _ADDED:
        return tuple(tuple(order) for order in _ADDED[schedule](ranks, microbatches, chunks))
    if schedule == "interleaved":
        return tuple(_interleaved(r, ranks, microbatches, chunks) for r in range(ranks))
    if schedule == "zero-bubble":
        return tuple(_zero_bubble(r, ranks, microbatches) for r in range(ranks))
    if schedule == "gpipe":
        return tuple(_breadth_first(r, ranks, microbatches, chunks) for r in range(ranks))
    if schedule == AUTOMATIC:
        return orders_of(_of_equal_stages(ranks, microbatches))
    return tuple(
        tuple(
            _one_forward_one_backward(
                [Action("F", r, i) for i in range(microbatches)],
                [Action("B", r, i) for i in range(microbatches)],
                ranks - r - 1,
            )
        )
        for r in range(ranks)
    )


def kinds_of(orders: Orders) -> tuple[str, ...]:
    """Orders of ranks with one stage each as text: `"FFIFIWW"`, each kind in order of turns."""
    return tuple("".join(action.kind for action in order) for order in orders)


def orders_of(kinds: Sequence[str]) -> tuple[tuple[Action, ...], ...]:
    """Inverse of `kinds_of`."""
    found: list[tuple[Action, ...]] = []
    for rank, text in enumerate(kinds):
        turns: dict[Kind, Iterator[int]] = {kind: itertools.count() for kind in get_args(Kind)}
        found.append(tuple(Action(k, rank, next(turns[k])) for k in cast(list[Kind], [*text])))
    return tuple(found)


def _of_equal_stages(ranks: int, microbatches: int) -> tuple[str, ...]:
    """As many microbatches in flight as ZB-H2 has, 2 p - 1."""
    unit = RankLoad(
        forward_s=1.0, input_s=1.0, weight_s=1.0, waiting=1.0, delayed=1.0, budget=2.0 * ranks - 1
    )
    ahead, loads = most_ahead(ranks, microbatches), [unit] * ranks
    none = [0.0] * (ranks - 1)
    return list_schedule(loads, microbatches, none, warmup=ahead, patience=1.0).kinds


def split_stages(orders: Orders) -> set[int]:
    """Stages whose backward is split into input and weight gradient."""
    return {action.stage for order in orders for action in order if action.kind == "I"}


def closing_action(orders: Orders, rank: int) -> Action | None:
    """The last action of a rank, if it ends a backward.

    Gradients of its stage may be reduced beside it; those of the rank's other stages are reduced
    when all are done.
    """
    last = orders[rank][-1]
    return last if last.kind == ("W" if split_stages(orders) else "B") else None


def in_flight(orders: Orders) -> InFlight:
    """How many activations each rank and each stage holds at most.

    Args:
        orders: as `actions` gives them.

    Returns:
        The greatest numbers of (stage, microbatch) pairs whose forward is done and whose backward
        (its W, where it is split) is not.
    """
    most_of_stage: dict[int, int] = defaultdict(int)
    most_of_rank = []
    for order in orders:
        live: dict[int, int] = defaultdict(int)
        most = 0
        for action in order:
            if action.kind == "F":
                live[action.stage] += 1
                most_of_stage[action.stage] = max(most_of_stage[action.stage], live[action.stage])
                most = max(most, sum(live.values()))
            elif action.kind != "I":
                live[action.stage] -= 1
        most_of_rank.append(most)
    num_stages = max(most_of_stage, default=-1) + 1
    return InFlight(tuple(most_of_rank), tuple(most_of_stage[s] for s in range(num_stages)))


def _check(schedule: str, ranks: int, microbatches: int, chunks: int) -> None:
    if schedule not in SCHEDULES and schedule not in schedules():
        raise ConstraintError(
            f"unknown pipeline schedule {schedule!r}: use one of {', '.join(schedules())}"
        )
    for name, number in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks)):
        if number < 1:
            raise ConstraintError(f"pipeline schedule {schedule!r}: {name} is {number}, need >= 1")
    if schedule in _ADDED:
        return
    if schedule == "gpipe":
        return
    if schedule != "interleaved":
        if chunks != 1:
            raise ConstraintError(
                f"pipeline schedule {schedule!r} has one stage a rank, not {chunks}: set chunks to "
                "1, or use 'interleaved'"
            )
        return
    if chunks < 2:
        raise ConstraintError(
            "pipeline schedule 'interleaved' needs chunks >= 2, not 1: use '1f1b' for one stage a "
            "rank"
        )
    if microbatches % ranks:
        raise ConstraintError(
            f"pipeline schedule 'interleaved' passes microbatches in groups of its {ranks} ranks, "
            f"and {microbatches} is no multiple: use {-(-microbatches // ranks) * ranks} "
            "microbatches, or '1f1b'"
        )


def _one_forward_one_backward(
    forwards: Sequence[Action], backwards: Sequence[Action], warmup: int
) -> Iterator[Action]:
    """`warmup` forwards, then one forward and one backward in turn, then the other backwards."""
    warmup = min(warmup, len(forwards))
    yield from forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(forwards) - warmup :]


def _breadth_first(rank: int, ranks: int, microbatches: int, chunks: int) -> tuple[Action, ...]:
    """All forwards, then all backwards; of each stage of a rank all before those of the next."""
    stages = range(rank, ranks * chunks, ranks)
    turns = range(microbatches)
    forwards = [Action("F", stage, i) for stage in stages for i in turns]
    return (*forwards, *(Action("B", stage, i) for stage in reversed(stages) for i in turns))


def _interleaved(rank: int, ranks: int, microbatches: int, chunks: int) -> tuple[Action, ...]:
    """Each chunk takes `ranks` microbatches before the next one does; backward in reverse."""

    def order(kind: Kind, stages: Iterable[int]) -> list[Action]:
        groups = range(0, microbatches, ranks)
        chunk_stages = list(stages)
        return [
            Action(kind, stage, first + i)
            for first in groups
            for stage in chunk_stages
            for i in range(ranks)
        ]

    stages = range(rank, ranks * chunks, ranks)
    warmup = 2 * (ranks - rank - 1) + (chunks - 1) * ranks
    return tuple(
        _one_forward_one_backward(order("F", stages), order("B", reversed(stages)), warmup)
    )


def _zero_bubble(rank: int, ranks: int, microbatches: int) -> tuple[Action, ...]:
    """1F1B whose weight gradients come `rank` microbatches late, into what was idle time.

    The delay lets every rank hold as many microbatches as rank 0 does in 1F1B, min(m, p).
    """
    forwards = [Action("F", rank, i) for i in range(microbatches)]
    inputs = [Action("I", rank, i) for i in range(microbatches)]
    found: list[Action] = []
    for action in _one_forward_one_backward(forwards, inputs, ranks - rank - 1):
        found.append(action)
        if action.kind == "I" and action.microbatch >= rank:
            found.append(Action("W", rank, action.microbatch - rank))
    late = range(max(0, microbatches - rank), microbatches)
    return (*found, *(Action("W", rank, i) for i in late))
