"""Peak memory of the ranks of a pipeline, from what each of their stages holds when.

Stages of a rank do not peak at once: while an action of stage s runs, the others hold what the
schedule leaves them with. With n microbatches waiting for their backward, d for their weight
gradients and u, w values on their way up and down,

    between(s) = idle(s) + others(s) + sums(s)
    others(s)  = n waiting(s) + d delayed(s) + u up(s) + w down(s)
    peak(rank) = max over its actions of  top(s, action) + others(s) + Σ_t≠s between(t)

where top is the highest moment of the action's own microbatch, `idle` and sums included. The batch
is held once a rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from autopar.core.flights import ALL, INPUT, NONE, Moment, Others, moments, parts_of
from autopar.core.held import Held
from autopar.core.schedule import Orders

__all__ = ["RankMoment", "rank_memory", "rank_moments", "rank_peak"]


class RankMoment(NamedTuple):
    """What a rank holds for some time.

    Attributes:
        kind: an action of the schedule; P before the microbatches, R behind them (as in
            `PipelineSlot`); "" while the rank waits for the action that follows, or for the end.
        stage, microbatch: of the action; 0 for the end.
        memory: bytes by kind, the most while the action runs.
    """

    kind: str
    stage: int
    microbatch: int
    memory: Mapping[str, int]


def rank_memory(orders: Orders, held: Sequence[Held | None]) -> tuple[dict[str, int], ...]:
    """Bytes by kind of each rank at its highest moment.

    Args:
        orders: of each rank, as `core.schedule.actions` gives them.
        held: of each stage.
    """
    known = [h for h in held if h is not None]
    assert len(known) == len(held), "a stage does not know what it holds"
    size = len(orders)
    return tuple(
        max(_of_rank(rank, known[r::size], r, size), key=lambda kinds: sum(kinds.values()))
        for r, rank in enumerate(moments(orders))
    )


def rank_peak(orders: Orders, held: Sequence[Held], rank: int) -> dict[str, int]:
    """Bytes by kind of one rank at its highest moment.

    Args:
        orders: of each rank.
        held: of each stage of this rank.
        rank: its number.
    """
    found = _of_rank(moments(orders)[rank], held, rank, len(orders))
    return max(found, key=lambda kinds: sum(kinds.values()))


def rank_moments(orders: Orders, held: Sequence[Held], rank: int) -> Iterator[RankMoment]:
    """What one rank holds over the step, in order; arguments as for `rank_peak`.

    The highest of it is the rank's peak.
    """
    size = len(orders)
    stages = {rank + index * size: h for index, h in enumerate(held)}
    shared = held[0].batch * (len(held) - 1)
    own = moments(orders)[rank]
    splits = {m.action.stage for m in own if m.action.kind == "I"}
    for s, h in stages.items():
        yield RankMoment("P", s, 0, _once(_hoisting(stages, s, h), shared))
    for moment in own:
        kind, s, i = moment.action.kind, moment.action.stage, moment.action.microbatch
        yield RankMoment("", s, i, _once(_waiting(stages, moment), shared))
        parts = parts_of(moment.action, s in splits)
        found = [_once(_running(stages, moment, part), shared) for part in parts]
        yield RankMoment(kind, s, i, max(found, key=lambda kinds: sum(kinds.values())))
    for s, h in reversed(stages.items()):
        yield RankMoment("R", s, 0, _once(_finishing(stages, s, h), shared))
    end: Counter[str] = Counter()
    for h in stages.values():
        end.update(h.after)
    yield RankMoment("", 0, 0, _once(end, shared))


def _of_rank(
    rank: Sequence[Moment], held: Sequence[Held], first: int, size: int
) -> Iterator[dict[str, int]]:
    """What a rank holds at each moment that may be its highest."""
    stages = {first + index * size: h for index, h in enumerate(held)}
    shared = held[0].batch * (len(held) - 1)
    splits = {m.action.stage for m in rank if m.action.kind == "I"}
    seen: set[object] = set()
    for moment in rank:
        s = moment.action.stage
        for part in parts_of(moment.action, s in splits):
            key = (s, part, tuple(moment.held.items()), tuple(moment.sums.items()))
            if key in seen:
                continue
            seen.add(key)
            yield _once(_running(stages, moment, part), shared)
    for s, h in stages.items():
        yield _once(_hoisting(stages, s, h), shared)
        yield _once(_finishing(stages, s, h), shared)


def _running(stages: Mapping[int, Held], moment: Moment, part: int) -> Counter[str]:
    """What all stages of a rank hold at most while a part of an action runs."""
    s = moment.action.stage
    total = Counter(_acting(stages[s], moment.held[s], moment.sums[s], part))
    for other, h in stages.items():
        if other != s:
            total.update(_between(h, moment.held[other], moment.sums[other]))
    return total


def _waiting(stages: Mapping[int, Held], moment: Moment) -> Counter[str]:
    """What they hold before an action, whose microbatch is then one of those that wait."""
    s, kind = moment.action.stage, moment.action.kind
    total: Counter[str] = Counter()
    for other, h in stages.items():
        total.update(_between(h, moment.held[other], moment.sums[other]))
        if other == s and kind != "F":
            total.update(h.delayed if kind == "W" else h.waiting)
    return total


def _once(total: Mapping[str, int], shared: int) -> dict[str, int]:
    """Without the batch of all stages but one."""
    found = {kind: n - (shared if kind == "inputs" else 0) for kind, n in total.items()}
    return {kind: n for kind, n in found.items() if n}


def _between(held: Held, others: Others, sums: int) -> Counter[str]:
    """What a stage holds of its microbatches while another one of the rank works."""
    total = Counter(held.idle)
    total.update(_of_others(held, others))
    total["gradients"] += sum(held.sums[:sums])
    return total


def _of_others(held: Held, others: Others) -> Counter[str]:
    total: Counter[str] = Counter()
    for times, kinds in ((others.waiting, held.waiting), (others.delayed, held.delayed)):
        total.update({kind: times * n for kind, n in kinds.items()})
    total["sent"] += others.up * held.up + others.down * held.down
    return total


def _acting(held: Held, others: Others, sums: int, part: int) -> Counter[str]:
    """What a stage holds at most while a part of a microbatch runs."""
    begun = sums
    if part == 2 and sums < ALL:
        begun = INPUT if (INPUT, 2) in held.tops else NONE
    top = held.tops.get((begun, part))
    if top is None:  # a part without ops: nothing is made, what is kept stays
        kept = Others(waiting=1) if part == 1 else Others(delayed=1) if part == 2 else Others()
        top = _between(held, kept, sums)
    total = Counter(top)
    total.update(_of_others(held, others))
    return total


def _hoisting(stages: Mapping[int, Held], acting: int, held: Held) -> Counter[str]:
    """What a rank holds at most before its first microbatch, while a stage prepares."""
    total: Counter[str] = Counter()
    for s, h in stages.items():
        total.update(h.idle if s != acting else _any_sums(held, -1) or h.idle)
    return total


def _finishing(stages: Mapping[int, Held], acting: int, held: Held) -> Counter[str]:
    """What a rank holds at most behind its last, while a stage reduces its sums; the last first."""
    total: Counter[str] = Counter()
    for s, h in stages.items():
        if s > acting:
            total.update(h.after)
        elif s < acting:
            total.update(_between(h, Others(), ALL))
        else:
            total.update(_any_sums(held, 3) or _between(h, Others(), ALL))
    return total


def _any_sums(held: Held, part: int) -> Mapping[str, int] | None:
    """The highest moment of what runs once: a part that begins without sums, or ends with all."""
    order = (NONE, INPUT, ALL) if part < 0 else (ALL, INPUT, NONE)
    return next((held.tops[sums, part] for sums in order if (sums, part) in held.tops), None)
