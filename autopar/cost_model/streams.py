"""Clocks of the streams of a simulated step: compute, communication, each way to the host.

A collective may take a share s of the device's compute while it runs (`LinkProfile.compute_share`).
Ops beside it then get on at the rate 1 - s, and what they lose counts as the collective's exposed
seconds.

A node may run several times; each time has a number.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
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
        compute_s, comm_free_s: when the compute and the communication stream are free.
        exposed: seconds that compute lost to a collective or a copy, all times together.
    """

    def __init__(self) -> None:
        self.compute_s = self.comm_free_s = 0.0
        self.exposed: dict[fx.Node, float] = defaultdict(float)
        self._ends: dict[tuple[fx.Node, int], float] = {}
        self._latest: dict[fx.Node, float] = {}
        self._links: dict[object, list[_Busy]] = {TO_HOST: [], FROM_HOST: []}
        self._sending: deque[_Busy] = deque()  # in order; no two at once

    def run(self, seconds: float) -> float:
        """Run an op; returns when it starts."""
        start, now_s, left_s = self.compute_s, self.compute_s, seconds
        self._forget()
        for busy in self._sending:
            begin_s = max(now_s, busy.start_s)
            if now_s + left_s <= begin_s:
                break
            if not busy.taken or busy.end_s <= now_s:
                continue
            left_s -= begin_s - now_s
            beside_s = busy.end_s - begin_s
            if left_s < beside_s * (1 - busy.taken):
                beside_s = left_s / (1 - busy.taken)
            left_s -= beside_s * (1 - busy.taken)
            self.exposed[busy.node] += beside_s * busy.taken
            now_s = begin_s + beside_s
        self.compute_s = now_s + max(0.0, left_s)
        return start

    def send(self, node: fx.Node, seconds: float, taken: float, number: int = 0) -> float:
        """Start a collective that takes a share of compute; returns when it starts."""
        start = max(self.compute_s, self.comm_free_s)
        self.comm_free_s = start + seconds
        self._end(node, number, start + seconds)
        self._sending.append(_Busy(start, start + seconds, node, taken))
        return start

    def call(self, node: fx.Node, compute_s: float, exposed_s: float) -> float:
        """Run an op that sends while it computes; returns when it starts."""
        self.wait(self.comm_free_s)
        start = self.run(compute_s + exposed_s)
        self.comm_free_s = self.compute_s
        self.exposed[node] += exposed_s
        return start

    def copy(self, node: fx.Node, seconds: float, number: int = 0) -> float:
        """Start a copy to or from host memory; returns when it starts."""
        link, there_s = self._links[node.target], self._latest.get(node.all_input_nodes[0], 0.0)
        start = max(self.compute_s, link[-1].end_s if link else 0.0, there_s)
        link.append(_Busy(start, start + seconds, node))
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
        for back in self._links[FROM_HOST]:
            if back.end_s > now and now < end_s:
                self._expose(self._links[TO_HOST], now, min(back.start_s, end_s))
                self._expose([back], now, end_s)
                now = back.end_s
        self.compute_s = max(self.compute_s, end_s)

    def wait(self, end_s: float) -> None:
        """Stop the compute stream until `end_s`; who was sending meanwhile is exposed."""
        self._forget()
        if end_s > self.compute_s:
            self._expose(self._sending, self.compute_s, end_s)
            self.compute_s = end_s

    def _forget(self) -> None:
        """Let go of what has ended, which nobody can wait for again."""
        while self._sending and self._sending[0].end_s <= self.compute_s:
            self._sending.popleft()

    def _expose(self, busy: Iterable[_Busy], from_s: float, to_s: float) -> None:
        for b in busy:
            if b.start_s >= to_s:
                break
            self.exposed[b.node] += max(0.0, min(b.end_s, to_s) - max(b.start_s, from_s))
