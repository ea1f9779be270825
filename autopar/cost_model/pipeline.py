"""Seconds of a pipelined step by simulating its schedule, action by action.

An action starts when its rank is free and what it depends on has arrived (`core/schedule.py` lists
the dependencies). What a stage sends to another rank leaves when the action ends, at once if the
sender's link in that direction is free, and computing goes on meanwhile::

    start(a) = max(end of the rank's action before, arrival(d) for d that a needs)
    arrival(d) = end(d) + (wait for the link) + transfer_s

A schedule that stops because every rank waits for another one is an error, so the simulation is
the dry run of a schedule too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.core.schedule import Action, Kind, Orders
from autopar.errors import AutoparError

__all__ = ["PipelineSimulation", "PipelineSpan", "ScheduleError", "simulate_pipeline"]

_Key = tuple[str, int, int]


class ScheduleError(AutoparError, ValueError):
    """A pipeline schedule deadlocks, or lacks or repeats an action."""


@dataclass(frozen=True, slots=True)
class PipelineSpan:
    """When one action ran, in seconds from the start of the step.

    Attributes:
        cause: what it waited for last; None if it ran as soon as its rank might begin.
    """

    rank: int
    action: Action
    start_s: float
    end_s: float
    cause: PipelineSpan | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSimulation:
    """A simulated step.

    Attributes:
        step_s: up to the last end, with what ranks do before they begin.
        busy_s, idle_s: of each rank, its actions and the rest; they add up to `step_s`.
        spans: every action, in order of start.
    """

    step_s: float
    busy_s: tuple[float, ...]
    idle_s: tuple[float, ...]
    spans: tuple[PipelineSpan, ...]

    @property
    def bubble_fraction(self) -> float:
        """The share of all ranks' time in which they stand idle."""
        whole_s = self.step_s * len(self.busy_s)
        return sum(self.idle_s) / whole_s if whole_s else 0.0

    def finish_s(self) -> list[float]:
        """When each rank ends its last action, from where its gradients can be reduced."""
        ends = [0.0] * len(self.busy_s)
        for span in self.spans:
            ends[span.rank] = max(ends[span.rank], span.end_s)
        return ends

    def critical_path(self, rank: int) -> list[PipelineSpan]:
        """What a rank's last action waited for, each waiting for the one before."""
        now = max((s for s in self.spans if s.rank == rank), key=lambda s: s.end_s, default=None)
        path: list[PipelineSpan] = []
        while now is not None:
            path.append(now)
            now = now.cause
        return path[::-1]


def simulate_pipeline(
    orders: Orders,
    seconds: Sequence[Mapping[Kind, float]],
    transfer_s: float | Sequence[float] = 0.0,
    *,
    begin_s: Sequence[float] = (),
    blocking: bool = False,
) -> PipelineSimulation:
    """Run a schedule on the clock.

    Args:
        orders: of each rank, as `actions` gives them.
        seconds: of each stage, by the kind of action.
        transfer_s: to send a microbatch over the boundary behind stage s, either way; one number
            for all, or one for each of the ``len(seconds) - 1`` boundaries. Stages on one rank
            send nothing.
        begin_s: of each rank, when its first action may begin; default: at once.
        blocking: a rank computes nothing while it sends.

    Returns:
        When everything ran.

    Raises:
        ScheduleError: a deadlock, an action that is there twice or has no seconds, or a forward
            without a whole backward.
    """
    begin_s = begin_s or (0.0,) * len(orders)
    clock = _Clock(orders, seconds, transfer_s, begin_s, blocking)
    _check_complete(orders, len(seconds))
    pending = list(range(len(orders)))
    while pending:
        pending = clock.advance(pending.pop(), pending)
    clock.check_done()
    spans = sorted(clock.spans, key=lambda s: (s.start_s, s.rank))
    step_s = max((s.end_s for s in spans), default=0.0)
    busy = clock.busy_s
    return PipelineSimulation(
        step_s=step_s,
        busy_s=tuple(busy),
        idle_s=tuple(step_s - b for b in busy),
        spans=tuple(spans),
    )


class _Clock:
    """Each rank's position in its order, and what has arrived where."""

    def __init__(
        self,
        orders: Orders,
        seconds: Sequence[Mapping[Kind, float]],
        transfer_s: float | Sequence[float],
        begin_s: Sequence[float],
        blocking: bool,
    ) -> None:
        self.blocking = blocking
        self.orders, self.seconds = orders, seconds
        self.num_stages = len(seconds)
        num_boundaries = max(0, self.num_stages - 1)
        if isinstance(transfer_s, int | float):
            transfer_s = [float(transfer_s)] * num_boundaries
        if len(transfer_s) != num_boundaries:
            raise ScheduleError(
                f"{self.num_stages} stages have {num_boundaries} boundaries, and transfer_s has "
                f"{len(transfer_s)} numbers"
            )
        self.transfer_s = transfer_s
        self.next = [0] * len(orders)
        self.free_s = list(begin_s)
        self.last: list[PipelineSpan | None] = [None] * len(orders)
        self.busy_s = [0.0] * len(orders)
        self.link_free_s: dict[tuple[int, bool], float] = defaultdict(float)
        self.arrived: dict[_Key, float] = {}  # when what a (kind, stage, microbatch) needs is there
        self.maker: dict[_Key, PipelineSpan] = {}  # of what has arrived
        self.waiting: dict[_Key, int] = {}
        self.spans: list[PipelineSpan] = []

    def advance(self, rank: int, pending: list[int]) -> list[int]:
        """Run a rank until it has to wait; returns `pending` with the ranks that it woke."""
        order = self.orders[rank]
        while self.next[rank] < len(order):
            action = order[self.next[rank]]
            start_s, cause = self.free_s[rank], self.last[rank]
            for key in self._needs(action):
                if key not in self.arrived:
                    self.waiting[key] = rank
                    return pending
                if self.arrived[key] > start_s:
                    start_s, cause = self.arrived[key], self.maker[key]
            self._run(rank, action, start_s, cause)
            self.next[rank] += 1
            pending += [self.waiting.pop(key) for key in self._feeds(action) if key in self.waiting]
        return pending

    def _needs(self, action: Action) -> list[_Key]:
        """What must have arrived: ("x", s, i) the input, ("g", s, i) the gradient of the output,
        ("f", s, i) and ("i", s, i) the stage's own forward and input gradient."""
        stage, i = action.stage, action.microbatch
        if action.kind == "F":
            return [("x", stage, i)] if stage > 0 else []
        if action.kind == "W":
            return [("i", stage, i)]
        own = ("f", stage, i)
        return [own, ("g", stage, i)] if stage + 1 < self.num_stages else [own]

    def _feeds(self, action: Action) -> list[_Key]:
        """What an action makes available, in the words of `_needs`."""
        stage, i = action.stage, action.microbatch
        if action.kind == "F":
            return [("f", stage, i), ("x", stage + 1, i)]
        return [("i", stage, i), ("g", stage - 1, i)] if action.kind != "W" else []

    def _run(self, rank: int, action: Action, start_s: float, cause: PipelineSpan | None) -> None:
        end_s = start_s + self.seconds[action.stage][action.kind]
        self.free_s[rank] = end_s
        self.busy_s[rank] += end_s - start_s
        span = self.last[rank] = PipelineSpan(rank, action, start_s, end_s, cause)
        self.spans.append(span)
        for key in self._feeds(action):
            self.arrived[key], self.maker[key] = end_s, span
        forward = action.kind == "F"
        there = action.stage + (1 if forward else -1)
        if action.kind != "W" and 0 <= there < self.num_stages:
            key = ("x" if forward else "g", there, action.microbatch)
            if there % len(self.orders) != rank:
                link = (rank, forward)
                sent_s = max(end_s, self.link_free_s[link])
                sent_s += self.transfer_s[min(action.stage, there)]
                self.link_free_s[link] = self.arrived[key] = sent_s
                if self.blocking:
                    self.free_s[rank] = sent_s

    def check_done(self) -> None:
        stuck = [
            f"rank {r} at {order[n]}"
            for r, (order, n) in enumerate(zip(self.orders, self.next, strict=True))
            if n < len(order)
        ]
        if stuck:
            shown = ", ".join(stuck[:4]) + (", ..." if len(stuck) > 4 else "")
            raise ScheduleError(
                f"the schedule deadlocks: {len(stuck)} of {len(self.orders)} ranks wait for an "
                f"action that no rank reaches ({shown})"
            )


def _check_complete(orders: Orders, num_stages: int) -> None:
    """Every stage has each microbatch's F once, and either B or both I and W, on its rank."""
    found: dict[tuple[int, int], str] = defaultdict(str)
    for rank, order in enumerate(orders):
        for action in order:
            if action.stage % len(orders) != rank or action.stage >= num_stages:
                raise ScheduleError(
                    f"{action} is on rank {rank}: stage s of {num_stages} lives on rank "
                    f"s % {len(orders)}"
                )
            found[action.stage, action.microbatch] += action.kind
    microbatches = {i for _, i in found}
    for stage in range(num_stages):
        for i in microbatches:
            kinds = "".join(sorted(found[stage, i]))
            if kinds not in ("BF", "FIW"):
                raise ScheduleError(
                    f"stage {stage}, microbatch {i} has {kinds or 'nothing'}: needs F and B, or "
                    "F, I and W, each once"
                )
