"""Clocks of the streams of a simulated step: compute, communication, each way to the host.

A collective may take a share s of the device's compute while it runs (`LinkProfile.compute_share`).
Ops beside it then get on at the rate 1 - s, and what they lose counts as the collective's exposed
seconds.
"""

from __future__ import annotations

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
        exposed: seconds that compute lost to a collective or a copy.
        ends: when a collective ends.
    """

    def __init__(self) -> None:
        self.compute_s = self.comm_free_s = 0.0
        self.exposed: dict[fx.Node, float] = {}
        self.ends: dict[fx.Node, float] = {}
        self._links: dict[object, list[_Busy]] = {TO_HOST: [], FROM_HOST: []}
        self._copied: dict[fx.Node, float] = {}
        self._sending: list[_Busy] = []  # in order; no two at once

    def run(self, seconds: float) -> float:
        """Run an op; returns when it starts."""
        start, now_s, left_s = self.compute_s, self.compute_s, seconds
        for busy in self._sending:
            begin_s = max(now_s, busy.start_s)
            if not busy.taken or busy.end_s <= now_s or now_s + left_s <= begin_s:
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

    def send(self, node: fx.Node, seconds: float, taken: float) -> float:
        """Start a collective that takes a share of compute; returns when it starts."""
        start = max(self.compute_s, self.comm_free_s)
        self.comm_free_s = self.ends[node] = start + seconds
        self._sending.append(_Busy(start, start + seconds, node, taken))
        self.exposed[node] = 0.0
        return start

    def copy(self, node: fx.Node, seconds: float) -> float:
        """Start a copy to or from host memory; returns when it starts."""
        link, there_s = self._links[node.target], self._copied.get(node.all_input_nodes[0], 0.0)
        start = max(self.compute_s, link[-1].end_s if link else 0.0, there_s)
        link.append(_Busy(start, start + seconds, node))
        self._copied[node] = start + seconds
        self.exposed[node] = 0.0
        return start

    def stand_for(self, copy: fx.Node) -> None:
        """Stop the compute stream until a copy has been made.

        What comes back meanwhile is exposed; where nothing does yet, what still goes to the host.
        """
        end_s = self._copied.get(copy, 0.0)
        now = self.compute_s
        for back in self._links[FROM_HOST]:
            if back.end_s > now and now < end_s:
                self._expose(self._links[TO_HOST], now, min(back.start_s, end_s))
                self._expose([back], now, end_s)
                now = back.end_s
        self.compute_s = max(self.compute_s, end_s)

    def wait(self, end_s: float) -> None:
        """Stop the compute stream until `end_s`; who was sending meanwhile is exposed."""
        # what ended before now can never be waited for again
        self._sending = [b for b in self._sending if b.end_s > self.compute_s]
        if end_s > self.compute_s:
            self._expose(self._sending, self.compute_s, end_s)
            self.compute_s = end_s

    def _expose(self, busy: Iterable[_Busy], from_s: float, to_s: float) -> None:
        for b in busy:
            self.exposed[b.node] += max(0.0, min(b.end_s, to_s) - max(b.start_s, from_s))
