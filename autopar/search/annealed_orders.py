"""Orders of a pipeline's ranks, annealed: actions on the critical path change places.

A step takes as long as its critical path: actions that each wait for the one before, on their own
rank or for what another one sends. As in other job shops, it gets shorter only if actions that it
runs one behind the other on a rank change places (van Laarhoven, Aarts and Lenstra 1992, "Job shop
scheduling by simulated annealing"): two neighbours, or one of a run with its first or last one.
Such an exchange is kept if the step gets no longer, and else with a probability that falls with
what it adds and as the search goes on.

All microbatches are alike, so that every kind of action takes them in turn, and orders are texts
such as ``"FFIFIWIW"``.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

from autopar.core.list_schedule import RankLoad, most_ahead
from autopar.solver.discrete.time_limit import check_time

__all__ = ["annealed"]

_TRIES = 8_000
_ACTIONS = 6_000_000  # that are run on the clock in all of them
_WARM = 0.25  # of the mean seconds of an action: what an exchange may add at first
_LATER = 1e-3  # of what all ranks end later, beside the last of them

Kinds: TypeAlias = tuple[str, ...]


def annealed(
    kinds: Kinds,
    loads: Sequence[RankLoad],
    transfer_s: Sequence[float],
    finish_s: Sequence[float],
    enough_s: float,
) -> Kinds:
    """Orders with which all ranks are done sooner, if such are found.

    Ranks begin with no more forwards than `most_ahead` says, and hold no more than the larger of
    their budgets and what they hold in the given orders.

    Args:
        kinds: of the actions of each rank, one stage a rank.
        loads: of the ranks.
        transfer_s: over the boundary behind each rank but the last.
        finish_s: of each rank, behind its last action.
        enough_s: when the last rank may be done for the search to end.
    """
    clock = _Clock(kinds, loads, transfer_s, finish_s)
    now = best = clock.run(kinds)
    warm_s = _WARM * sum(x.forward_s + x.input_s + x.weight_s for x in loads) / (3 * len(loads))
    if now is None or best is None or not warm_s:
        return kinds  # which begin with more than is looked for, or take no time
    rng, tries = random.Random(0), min(_TRIES, _ACTIONS // sum(map(len, kinds)))
    open_ = list(clock.exchanges(now))
    for number in range(tries):
        if best.done_s <= enough_s or not open_:
            break
        check_time()
        found = clock.rerun(now, rng.choice(open_))
        if found is None:
            continue
        more_s = found.value_s - now.value_s
        degrees_s = warm_s * (1 - number / tries)
        if more_s <= 0 or rng.random() < math.exp(-more_s / degrees_s):
            now, open_ = found, list(clock.exchanges(found))
            best = now if now.done_s < best.done_s else best
    return best.kinds


class _Exchange(NamedTuple):
    """An action of a rank goes to the place of another one."""

    rank: int
    source: int
    place: int


def _exchanged(kinds: Kinds, exchange: _Exchange) -> Kinds:
    rank, source, place = exchange
    left = kinds[rank][:source] + kinds[rank][source + 1 :]
    return (
        *kinds[:rank],
        left[:place] + kinds[rank][source] + left[place:],
        *kinds[rank + 1 :],
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """Orders on the clock.

    Attributes:
        kinds: of each rank's actions.
        ranks: at the end of their work.
        ends_s: when each rank is done.
    """

    kinds: Kinds
    ranks: list[_Rank]
    ends_s: list[float]

    @property
    def done_s(self) -> float:
        return max(self.ends_s)

    @property
    def value_s(self) -> float:
        """Of two orders with one end, those are better whose other ranks are done sooner."""
        return self.done_s + _LATER * sum(self.ends_s) / len(self.ends_s)


@dataclass(slots=True)
class _Rank:
    """How far a rank is.

    Attributes:
        load: of the rank.
        free_s: when its last action ended.
        forwards, gradients: when what its forwards and input gradients read arrives.
        forward, backward, weight: how many of its forwards, input and weight gradients are done.
        ended_s: when each of its actions ended.
        waited: of each action, if it waited for what another rank sent.
    """

    load: RankLoad
    free_s: float
    forwards: list[float]
    gradients: list[float]
    forward: int = 0
    backward: int = 0
    weight: int = 0
    ended_s: list[float] = field(default_factory=list)
    waited: list[bool] = field(default_factory=list)

    def held(self) -> float:
        """Bytes of its microbatches in flight."""
        waiting, delayed = self.forward - self.backward, self.backward - self.weight
        return waiting * self.load.waiting + delayed * self.load.delayed


class _Clock:
    """Runs orders of the ranks, as `simulate_pipeline` does, which is slow where thousands are run.

    Arguments as of `annealed`.
    """

    def __init__(
        self,
        kinds: Kinds,
        loads: Sequence[RankLoad],
        transfer_s: Sequence[float],
        finish_s: Sequence[float],
    ) -> None:
        self.transfer_s = transfer_s
        self.finish_s = finish_s
        self.microbatches = kinds[0].count("F")
        self.ahead = most_ahead(len(loads), self.microbatches)
        self.loads = [
            replace(load, budget=max(load.budget, _most_held(each, load)))
            for each, load in zip(kinds, loads, strict=True)
        ]

    def run(self, kinds: Kinds) -> _Run | None:
        """The orders on the clock; None of such as do not end, or are not looked for."""
        ranks = [_Rank(load, load.begin_s, [], []) for load in self.loads]
        ranks[0].forwards = [0.0] * self.microbatches
        return self._run(kinds, ranks)

    def rerun(self, known: _Run, exchange: _Exchange) -> _Run | None:
        """The orders after an exchange; what ended before the first action of it is as it was."""
        kinds, place = _exchanged(known.kinds, exchange), min(exchange.source, exchange.place)
        ended_s = known.ranks[exchange.rank].ended_s
        begun_s = ended_s[place - 1] if place else self.loads[exchange.rank].begin_s
        done = [bisect_left(rank.ended_s, begun_s) for rank in known.ranks]
        done[exchange.rank] = place
        before = [order[:count] for order, count in zip(known.kinds, done, strict=True)]
        last, ranks = len(done) - 1, []
        for r, (rank, kept, count) in enumerate(zip(known.ranks, before, done, strict=True)):
            arrived = before[r - 1].count("F") if r else self.microbatches
            forward, backward = kept.count("F"), kept.count("I")
            gradients = forward if r == last else before[r + 1].count("I")
            ranks.append(
                _Rank(
                    load=rank.load,
                    free_s=rank.ended_s[count - 1] if count else rank.load.begin_s,
                    forwards=rank.forwards[:arrived],
                    gradients=rank.gradients[:gradients],
                    forward=forward,
                    backward=backward,
                    weight=count - forward - backward,
                    ended_s=rank.ended_s[:count],
                    waited=rank.waited[:count],
                )
            )
        return self._run(kinds, ranks)

    def _run(self, kinds: Kinds, ranks: list[_Rank]) -> _Run | None:
        """Run ranks that are some way through their orders to the end."""
        waiting = list(range(len(kinds) - 1, -1, -1))
        while waiting:
            r = waiting.pop()
            woken = self._advance(r, ranks, kinds[r])
            if woken is None:
                return None
            waiting += woken
        if any(len(rank.waited) < len(order) for rank, order in zip(ranks, kinds, strict=True)):
            return None
        ends_s = [rank.free_s + s for rank, s in zip(ranks, self.finish_s, strict=True)]
        return _Run(kinds, ranks, ends_s)

    def _advance(self, r: int, ranks: list[_Rank], kinds: str) -> list[int] | None:
        """Run a rank until it has to wait; the ranks that it woke, or None (`run`)."""
        rank, load, now_s = ranks[r], ranks[r].load, ranks[r].free_s
        last, woken = r == len(ranks) - 1, []
        for kind in kinds[len(rank.waited) :]:
            late = False
            if kind == "F":
                if rank.forward == len(rank.forwards):
                    break
                there_s = rank.forwards[rank.forward]
                late, rank.forward = there_s > now_s, rank.forward + 1
                if not rank.backward and rank.forward > self.ahead[r]:
                    return None
                if rank.held() > load.budget and rank.forward > rank.weight + 1:
                    return None
                now_s = max(there_s, now_s) + load.forward_s
                if last:
                    rank.gradients.append(now_s)
                else:
                    self._send(ranks[r + 1].forwards, now_s, r)
                    woken.append(r + 1)
            elif kind == "I":
                if rank.backward == len(rank.gradients):
                    break
                there_s = rank.gradients[rank.backward]
                late, rank.backward = there_s > now_s, rank.backward + 1
                now_s = max(there_s, now_s) + load.input_s
                if r:
                    self._send(ranks[r - 1].gradients, now_s, r - 1)
                    woken.append(r - 1)
            else:
                if rank.weight == rank.backward:
                    return None
                rank.weight += 1
                now_s += load.weight_s
            rank.waited.append(late)
            rank.ended_s.append(now_s)
        rank.free_s = now_s
        return woken

    def _send(self, arrivals: list[float], end_s: float, boundary: int) -> None:
        """A link carries one value at a time."""
        sent_s = max(end_s, arrivals[-1]) if arrivals else end_s
        arrivals.append(sent_s + self.transfer_s[boundary])

    def exchanges(self, run: _Run) -> Iterator[_Exchange]:
        """Those that may make the critical path shorter."""
        by_rank = defaultdict[int, set[int]](set)
        for rank, place in self._critical_path(run):
            by_rank[rank].add(place)
        for rank, places in by_rank.items():
            kinds, waited = run.kinds[rank], run.ranks[rank].waited
            # of actions of the path that do not wait for others, but for the one before
            begun = 0
            for place in sorted(places):
                follows = place - 1 in places and not waited[place]
                begun = begun if follows else place
                if place == begun:
                    continue
                if kinds[place] != kinds[place - 1]:
                    yield _Exchange(rank, place, place - 1)
                if place - begun > 1 and kinds[place] != kinds[begun]:
                    yield _Exchange(rank, place, begun)
                    yield _Exchange(rank, begun, place)

    def _critical_path(self, run: _Run) -> Iterator[tuple[int, int]]:
        """Ranks and places of actions that each wait for the next, from the last one to end."""
        where = [
            {kind: [i for i, k in enumerate(kinds) if k == kind] for kind in "FIW"}
            for kinds in run.kinds
        ]
        rank = max(range(len(where)), key=run.ends_s.__getitem__)
        place = len(run.kinds[rank]) - 1
        while place >= 0:
            yield rank, place
            if not run.ranks[rank].waited[place]:
                place -= 1
                continue
            kind = run.kinds[rank][place]
            number = where[rank][kind].index(place)
            rank += -1 if kind == "F" else 1
            place = where[rank][kind][number]


def _most_held(kinds: str, load: RankLoad) -> float:
    """Bytes of microbatches in flight that a rank holds in an order."""
    rank, most = _Rank(load, 0.0, [], []), 0.0
    for kind in kinds:
        rank.forward += kind == "F"
        rank.backward += kind == "I"
        rank.weight += kind == "W"
        most = max(most, rank.held())
    return most
