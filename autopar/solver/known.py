"""Searches of one step that go on with what others of it have found.

The searches of a step with one kind of recomputation and the optimizer in one place differ in what
seconds count (`overlap`) and in the limit. States, rows of memory and the plans met are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from autopar.core.block_kinds import Checkpoint
from autopar.core.constraints import AxisRole, Constraints
from autopar.core.graph import TracedModel
from autopar.core.placement import Layout
from autopar.cost_model import Cluster, Offloaded, can_offload, optimizer_state_bytes
from autopar.solver.mixture import uniform_checkpoints
from autopar.solver.offers import Offers
from autopar.solver.overlap import Weights
from autopar.solver.variant import Variant

__all__ = ["KnownVariants", "Variants", "may_leave", "variants_of"]

KnownVariants: TypeAlias = dict[tuple[str, bool, tuple[int, ...], Weights], Variant]
"""Searches by recomputation of all blocks, offload of the optimizer, mesh and weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variants:
    """Makes the variants of a step on one mesh under one limit.

    Args:
        traced, offers, wanted, roles, limit, ports: see `Variant.search_for`.
        known: searches to go on with, to which new ones are added.
    """

    traced: TracedModel
    offers: Offers
    wanted: Constraints
    roles: tuple[AxisRole, ...]
    limit: int
    ports: Mapping[str, Layout] | None
    known: KnownVariants

    def make(self, weights: Weights, held: object, checkpoint: Checkpoint) -> Variant:
        """The variant of a checkpoint, with the optimizer in some place."""
        if not isinstance(checkpoint, str):
            return self._made(weights, held, checkpoint)
        mesh = self.offers.cluster.mesh_shape
        key = (checkpoint, isinstance(held, Offloaded), mesh, weights)
        if key in self.known:
            self.known[key].search.renew(self.limit)
            return self.known[key]
        same = [v for k, v in self.known.items() if k[:3] == key[:3]]
        alike = [v for k, v in self.known.items() if (k[0], k[2]) == (checkpoint, mesh)]
        if same:
            found = same[-1].reweighted(weights, self.limit)
        else:
            found = self._made(weights, held, checkpoint, alike[-1] if alike else None)
        self.known[key] = found
        return found

    def _made(
        self, weights: Weights, held: object, checkpoint: Checkpoint, like: Variant | None = None
    ) -> Variant:
        return Variant.search_for(
            self.traced,
            self.offers,
            self.wanted,
            self.roles,
            held,
            checkpoint,
            self.limit,
            self.ports,
            weights,
            like,
        )


def variants_of(
    traced: TracedModel, cluster: Cluster, wanted: Constraints, optimizer: object
) -> list[tuple[Checkpoint, object]]:
    """Kinds of recomputation, each with the optimizer where it is; offloaded ones come last."""
    if not traced.training:
        return [("none", optimizer)]
    kinds = uniform_checkpoints(traced, wanted.checkpoint, may_leave(cluster, wanted))
    return [(kind, which) for which in places_of(cluster, wanted, optimizer) for kind in kinds]


def places_of(cluster: Cluster, wanted: Constraints, optimizer: object) -> list[object]:
    """The optimizer in each place where its states may be."""
    held: list[object] = [] if wanted.offload == "optimizer" else [optimizer]
    chosen = wanted.offload is None and can_offload(cluster.device)
    if wanted.offload == "optimizer" or (chosen and optimizer_state_bytes(optimizer, 1024)):
        held.append(Offloaded(optimizer))
    return held


def may_leave(cluster: Cluster, wanted: Constraints) -> bool:
    """True if activations may be sent to host memory where no pin says so."""
    return can_offload(cluster.device) and wanted.offload != "none"
