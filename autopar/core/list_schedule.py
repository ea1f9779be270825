"""Orders of a pipeline's work that are made for its own seconds and memory, by list scheduling.

On the clock, each rank that is free takes what it can begin with: a forward, as long as it has not
begun more of them than it may; else an input gradient; else a weight gradient, which fills the time
until the next of the others arrives. Memory bounds how many microbatches are in flight: before a
forward that would exceed it, weight gradients are made up for.

This is the automatic schedule of Qi et al. 2023 (arXiv 2401.10241, section 3), with the choices of
their heuristic as `warmup` and `patience`: with ``2 (p - r) - 1`` forwards ahead of the first
gradient it is their ZB-H2 for equal stages.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Listed", "RankLoad", "list_schedule", "most_ahead"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoad:
    """What a rank with one stage does and holds.

    Attributes:
        forward_s, input_s, weight_s: seconds of one microbatch.
        begin_s: when its first action may begin.
        waiting: bytes of a microbatch between its forward and its input gradient.
        delayed: of one between its input gradient and its weight gradient.
        budget: for microbatches in flight; one is always let in.
    """

    forward_s: float
    input_s: float
    weight_s: float
    begin_s: float = 0.0
    waiting: float = 0.0
    delayed: float = 0.0
    budget: float = math.inf


def most_ahead(ranks: int, microbatches: int) -> tuple[int, ...]:
    """Forwards that each rank may begin ahead of its first gradient, those of ZB-H2."""
    return tuple(min(microbatches, 2 * (ranks - r) - 1) for r in range(ranks))


def list_schedule(
    loads: Sequence[RankLoad],
    microbatches: int,
    transfer_s: Sequence[float],
    *,
    warmup: Sequence[int],
    patience: float,
) -> Listed:
    """The order of each rank's work; every kind takes the microbatches in turn.

    Args:
        loads: of each rank.
        microbatches: of the step.
        transfer_s: over the boundary behind each rank but the last.
        warmup: forwards of each rank, at most, whose gradient has not run.
        patience: a rank stands idle for what is known to come within this share of a weight
            gradient, rather than begin one.
    """
    clock = _Clock(loads, microbatches, transfer_s, warmup, patience)
    while clock.events:
        clock.step()
    ends_s = tuple(rank.free_s for rank in clock.ranks)
    return Listed(tuple("".join(kinds) for kinds in clock.kinds), ends_s)


class Listed(NamedTuple):
    """Orders by kinds of action, such as `"FFIFIWW"`, and when each rank ends its last one."""

    kinds: tuple[str, ...]
    ends_s: tuple[float, ...]


@dataclass(slots=True)
class _Rank:
    """How far a rank is, and what has been sent to it: arrivals, in order of microbatches."""

    load: RankLoad
    free_s: float
    forwards: int = 0
    backwards: int = 0  # their input gradients
    weights: int = 0
    inputs: list[float] = field(default_factory=list)
    gradients: list[float] = field(default_factory=list)

    def has_room(self) -> bool:
        """True if memory lets another microbatch in."""
        if self.forwards == self.weights:
            return True
        load, waiting = self.load, self.forwards - self.backwards + 1
        held = waiting * load.waiting + (self.backwards - self.weights) * load.delayed
        return held <= load.budget


class _Clock:
    def __init__(
        self,
        loads: Sequence[RankLoad],
        microbatches: int,
        transfer_s: Sequence[float],
        warmup: Sequence[int],
        patience: float,
    ) -> None:
        self.transfer_s = transfer_s
        self.warmup = warmup
        self.patience = patience
        self.ranks = [_Rank(load, load.begin_s) for load in loads]
        self.ranks[0].inputs = [0.0] * microbatches
        self.kinds: list[list[str]] = [[] for _ in loads]
        self.events = [(rank.free_s, r) for r, rank in enumerate(self.ranks)]
        heapq.heapify(self.events)

    def step(self) -> None:
        """Let the next rank that is free begin something, or wait for what is known to come."""
        now_s, r = heapq.heappop(self.events)
        rank = self.ranks[r]
        if now_s < rank.free_s:
            return  # it has begun something meanwhile
        kind, coming_s = self._choice(r, now_s)
        if kind is not None:
            self._run(r, kind, now_s)
        elif coming_s < math.inf:
            heapq.heappush(self.events, (coming_s, r))

    def _choice(self, r: int, now_s: float) -> tuple[str | None, float]:
        """What to begin, or when something comes, as far as it is known."""
        rank, next_s = self.ranks[r], math.inf
        if (
            rank.forwards < len(rank.inputs)
            and rank.forwards - rank.backwards < self.warmup[r]
            and rank.has_room()
        ):
            next_s = rank.inputs[rank.forwards]
            if next_s <= now_s:
                return "F", now_s
        if rank.backwards < len(rank.gradients):
            there_s = rank.gradients[rank.backwards]
            if there_s <= now_s:
                return "I", now_s
            next_s = min(next_s, there_s)
        if rank.weights < rank.backwards:
            if next_s - now_s >= self.patience * rank.load.weight_s:
                return "W", now_s
        return None, next_s

    def _run(self, r: int, kind: str, now_s: float) -> None:
        rank, load = self.ranks[r], self.ranks[r].load
        self.kinds[r].append(kind)
        if kind == "W":
            rank.weights += 1
            rank.free_s = now_s + load.weight_s
        elif kind == "F":
            rank.forwards += 1
            rank.free_s = end_s = now_s + load.forward_s
            if r == len(self.ranks) - 1:
                rank.gradients.append(end_s)
            else:
                self._send(self.ranks[r + 1].inputs, r + 1, end_s, self.transfer_s[r])
        else:
            rank.backwards += 1
            rank.free_s = end_s = now_s + load.input_s
            if r:
                self._send(self.ranks[r - 1].gradients, r - 1, end_s, self.transfer_s[r - 1])
        heapq.heappush(self.events, (rank.free_s, r))

    def _send(self, arrivals: list[float], there: int, end_s: float, transfer_s: float) -> None:
        """A link carries one value at a time."""
        arrivals.append(max(end_s, arrivals[-1] if arrivals else 0.0) + transfer_s)
        heapq.heappush(self.events, (max(self.ranks[there].free_s, arrivals[-1]), there))
