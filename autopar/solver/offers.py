"""What ops may be run as on one cluster, and for how many seconds: made once for ops alike.

A rule sees the op, its arguments and the shapes of its tensors, and a few rules see more
(`facts_of`). Ops that agree in these have the same candidates, wherever they stand: in blocks of
several classes, in several stages of a pipeline, in the steps of several schedules.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import fx

from autopar.core.fused import FusedShares, Share
from autopar.core.ops import unsalted
from autopar.core.placement import Layout
from autopar.core.reshapes import view_class
from autopar.core.strategy import OpCall
from autopar.cost_model import Cluster
from autopar.solver.candidates import Candidate, Pricer, expand
from autopar.solver.discrete.problem import Array
from autopar.solver.moves import KEPT, MoveCosts
from autopar.solver.rules.joined import joined_of
from autopar.solver.rules.own_order import orders_of
from autopar.solver.rules.registry import facts_of

__all__ = ["Offer", "Offers", "likeness"]


class Offer(NamedTuple):
    """Candidates of an op, the seconds of each, and of these those of collectives inside it."""

    candidates: list[Candidate]
    seconds: Array
    inner: Array


class Offers:
    """Candidates of ops and prices of moves on a cluster, kept for the next one who asks.

    Args:
        cluster: with the mesh.
        fused: what fusion will leave of ops' work, by the name of the op in the traced graph.
    """

    def __init__(self, cluster: Cluster, fused: FusedShares | None = None) -> None:
        self.cluster = cluster
        self.fused: FusedShares = fused or {}
        self.pricer = Pricer(cluster, fuses=bool(self.fused))
        self.moves = MoveCosts(cluster)
        self._offers: dict[Hashable, Offer] = {}
        self._kept: dict[Hashable, list[Candidate]] = {}
        self._seconds: dict[Hashable, float] = {}
        self._broken: dict[Hashable, Array] = {}
        self._calls: dict[int, tuple[OpCall, Hashable]] = {}
        self._others: dict[tuple[int, ...], Offers] = {}

    def over(self, cluster: Cluster) -> Offers:
        """Those on another mesh of the same devices and links."""
        if cluster.mesh_shape == self.cluster.mesh_shape:
            return self
        if cluster.mesh_shape not in self._others:
            self._others[cluster.mesh_shape] = Offers(cluster, self.fused)
        return self._others[cluster.mesh_shape]

    def of(self, call: OpCall, share: Share | None = None) -> Offer:
        """All candidates of an op, or of one that is part of a fused kernel."""
        key = self._likeness(call), share
        known = self._offers.get(key)
        if known is None:
            candidates = self._candidates(call, key[0])
            inner = self.pricer.inner(candidates)
            seconds = self.pricer.compute(call, candidates, share) + inner
            known = self._offers[key] = Offer(candidates, seconds, inner)
        return known

    def _candidates(self, call: OpCall, likeness: Hashable) -> list[Candidate]:
        """Of those that differ in nothing but how they are run, the fastest."""
        if likeness not in self._kept:
            every = expand(call, self.cluster.mesh_shape)
            layouts = [(c.inputs, c.outputs) for c in every]
            if len(set(layouts)) < len(every):
                seconds = self.pricer.compute(call, every) + self.pricer.inner(every)
                fastest: dict[Hashable, int] = {}
                for index in np.argsort(seconds, kind="stable"):
                    fastest.setdefault(layouts[index], int(index))
                every = [every[index] for index in sorted(fastest.values())]
            self._kept[likeness] = every
        return self._kept[likeness]

    def seconds(
        self,
        call: OpCall,
        candidate: Candidate,
        share: Share | None = None,
        sources: tuple[Layout | None, ...] = (),
    ) -> float:
        """Seconds of the local compute of one candidate.

        With what the moves of its operands break of a fused kernel: `sources` are the layouts that
        these are produced in, None where nothing is lost.
        """
        key = self._likeness(call), candidate, share, sources
        if key not in self._seconds:
            seconds = float(self.pricer.compute(call, [candidate], share)[0])
            for index, source in enumerate(sources):
                if share is not None and source is not None:
                    lost = self.pricer.broken(call, share, [source], index, [candidate])
                    seconds += float(lost[0, 0])
            self._seconds[key] = seconds
        return self._seconds[key]

    def broken(
        self,
        call: OpCall,
        share: Share,
        sources: Sequence[Layout],
        index: int,
        candidates: Sequence[Candidate],
    ) -> Array:
        """`Pricer.broken`, kept."""
        targets = tuple((c.inputs[index], bool(c.comm)) for c in candidates)
        key = self._likeness(call), share, tuple(sources), index, targets
        if key not in self._broken:
            found = self.pricer.broken(call, share, sources, index, candidates)
            if found.size > KEPT:
                return found
            found.setflags(write=False)
            self._broken[key] = found
        return self._broken[key]

    def _likeness(self, call: OpCall) -> Hashable:
        """`likeness` of an op that is asked for again and again; it is kept."""
        known = self._calls.get(id(call))
        if known is None:
            known = self._calls[id(call)] = call, likeness(call)
        return known[1]


def likeness(call: OpCall) -> Hashable:
    """What two ops with the same candidates and seconds have in common."""
    numbers: dict[fx.Node, int] = {}
    arguments = _plain(unsalted(call.target, call.args), numbers), _plain(call.kwargs, numbers)
    noted = orders_of(call), joined_of(call), facts_of(call)
    return call.target, arguments, call.operands, call.outputs, noted, view_class(call)


def _plain(value: Any, numbers: dict[fx.Node, int]) -> Hashable:
    """An argument with numbers in the place of nodes."""
    if isinstance(value, fx.Node):
        return fx.Node, numbers.setdefault(value, len(numbers))
    if isinstance(value, (list, tuple)):
        return tuple(_plain(item, numbers) for item in value)
    if isinstance(value, dict):
        return tuple((key, _plain(item, numbers)) for key, item in value.items())
    # 1, 1.0 and True are equal, but not the same argument
    return type(value), value if isinstance(value, Hashable) else repr(value)
