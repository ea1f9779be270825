"""Clocks of the streams of a simulated step: compute, communication, each way to the host.

Collectives inside a node and between nodes use different links, and process groups have streams of
their own: each link is a stream. On one link they run one behind the other.

A collective may take a share s of the device's compute while it runs (`LinkProfile.compute_share`).
Ops beside it then get on at the rate 1 - s, and what they lose counts as the collective's exposed
seconds.

A node may run several times; each time has a number.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from torch import fx

from autopar.core.host import FROM_HOST, TO_HOST

__all__ = ["Streams"]


@dataclass(frozen=True, slots=True)
class _Busy:
    """What a stream does from `start_s` to `end_s`, and the share of compute that this takes."""

    start_s: float
    end_s: float
    node: fx.Node
    taken: float = 0.0


class Streams:
    """Clocks of the streams, and the collectives and copies in flight.

    Attributes:
        compute_s: when the compute stream is free.
        exposed: seconds that compute lost to a collective or a copy, all times together.
    """

    def __init__(self) -> None:
        self.compute_s = 0.0
        self.exposed: dict[fx.Node, float] = defaultdict(float)
        self._ends: dict[tuple[fx.Node, int], float] = {}
        self._latest: dict[fx.Node, float] = {}
        self._copying: dict[object, list[_Busy]] = {TO_HOST: [], FROM_HOST: []}
        self._free: dict[Hashable, float] = defaultdict(float)  # when each link is
        self._sending: dict[Hashable, deque[_Busy]] = defaultdict(deque)  # in order, by link

    def run(self, seconds: float) -> float:
        """Run an op; returns when it starts."""
        start = now_s = self.compute_s
        left_s = seconds
        self._forget()
        slowing = [b for sending in self._sending.values() for b in sending if b.taken]
        while left_s > 0 and any(b.end_s > now_s for b in slowing):
            beside = [b for b in slowing if b.start_s <= now_s < b.end_s]
            rate = 1.0 - min(1.0, sum(b.taken for b in beside))
            until_s = min(t for b in slowing for t in (b.start_s, b.end_s) if t > now_s)
            done_s = rate * (until_s - now_s)
            ends = done_s >= left_s
            lasts_s = left_s / rate if ends else until_s - now_s
            for b in beside:
                self.exposed[b.node] += lasts_s * b.taken
            now_s = now_s + lasts_s if ends else until_s
            left_s = 0.0 if ends else left_s - done_s
        self.compute_s = now_s + left_s
        return start

    def send(
        self, node: fx.Node, link: Hashable, seconds: float, taken: float, number: int = 0
    ) -> float:
        """Start a collective that takes a share of compute; returns when it starts."""
        start = max(self.compute_s, self._free[link])
        self._free[link] = start + seconds
        self._end(node, number, start + seconds)
        self._sending[link].append(_Busy(start, start + seconds, node, taken))
        return start

    def call(self, node: fx.Node, link: Hashable, compute_s: float, exposed_s: float) -> float:
        """Run an op that sends while it computes; returns when it starts."""
        self._wait(link, self._free[link])
        start = self.run(compute_s + exposed_s)
        self._free[link] = self.compute_s
        self.exposed[node] += exposed_s
        return start

    def copy(self, node: fx.Node, seconds: float, number: int = 0) -> float:
        """Start a copy to or from host memory; returns when it starts."""
        way, there_s = self._copying[node.target], self._latest.get(node.all_input_nodes[0], 0.0)
        start = max(self.compute_s, way[-1].end_s if way else 0.0, there_s)
        way.append(_Busy(start, start + seconds, node))
        self._end(node, number, start + seconds)
        return start

    def _end(self, node: fx.Node, number: int, end_s: float) -> None:
        self._ends[node, number] = self._latest[node] = end_s

    def end_s(self, node: fx.Node, number: int = 0) -> float:
        """When a collective or a copy ends; the latest one, where there is none of this number."""
        return self._ends.get((node, number), self._latest.get(node, 0.0))

    def stand_for(self, copy: fx.Node, number: int = 0) -> None:
        """Stop the compute stream until a copy has been made.

        What comes back meanwhile is exposed; where nothing does yet, what still goes to the host.
        """
        end_s = self.end_s(copy, number)
        now = self.compute_s
        for back in self._copying[FROM_HOST]:
            if back.end_s > now and now < end_s:
                self._expose(self._copying[TO_HOST], now, min(back.start_s, end_s))
                self._expose([back], now, end_s)
                now = back.end_s
        self.compute_s = max(self.compute_s, end_s)

    def wait(self, start: fx.Node, link: Hashable, number: int = 0) -> None:
        """Stop the compute stream until a collective has ended.

        What its link sends meanwhile is exposed: that one, and those that it stood behind.
        """
        self._wait(link, self.end_s(start, number))

    def finish(self) -> None:
        """Stop until all collectives have ended."""
        for link, end_s in sorted(self._free.items(), key=lambda each: each[1]):
            self._wait(link, end_s)

    def _wait(self, link: Hashable, end_s: float) -> None:
        self._forget()
        if end_s > self.compute_s:
            self._expose(self._sending[link], self.compute_s, end_s)
            self.compute_s = end_s

    def _forget(self) -> None:
        """Let go of what has ended, which nobody can wait for again."""
        for sending in self._sending.values():
            while sending and sending[0].end_s <= self.compute_s:
                sending.popleft()

    def _expose(self, busy: Iterable[_Busy], from_s: float, to_s: float) -> None:
        for b in busy:
            if b.start_s >= to_s:
                break
            self.exposed[b.node] += max(0.0, min(b.end_s, to_s) - max(b.start_s, from_s))
