"""Searches of a step in one piece on each mesh that it may take."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from autopar.core.constraints import Constraints
from autopar.core.graph import TracedModel
from autopar.cost_model import Cluster
from autopar.errors import InfeasiblePlanError
from autopar.solver.fit import UNLIMITED
from autopar.solver.meshes import meshes
from autopar.solver.offers import Offers
from autopar.solver.overlap import NotBelow
from autopar.solver.solve import KnownVariants, StepSearch

__all__ = ["ALL_EXPOSED", "MeshSearches", "Searches"]

ALL_EXPOSED = 1.0  # share of what may hide that does not
_FEW = 2  # axes

Searches: TypeAlias = list[tuple[Cluster, StepSearch]]


@dataclass(frozen=True, slots=True)
class MeshSearches:
    """Begins the searches of a step, on all meshes or on those of some shapes.

    Attributes:
        traced: the step on the whole batch.
        cluster: all devices.
        constraints: of the user.
        optimizer: whose states count in memory.
        offers: what is known of ops on these devices.
        searches: of this step under other limits, to go on with; None: none are kept.
        only: shapes of the meshes; default: all.
        free_s: least seconds without a limit, by mesh; what searches have told for the next ones.
        told_t: t of the greatest sum, by mesh; the same.
    """

    traced: TracedModel
    cluster: Cluster
    constraints: Constraints
    optimizer: object
    offers: Offers
    searches: KnownVariants | None = None
    only: tuple[tuple[int, ...], ...] | None = None
    free_s: dict[tuple[int, ...], float] = field(default_factory=dict)
    told_t: dict[tuple[int, ...], float] = field(default_factory=dict)

    def _begun(
        self,
        limit: int,
        exposed: float,
        below_s: float,
        proved_within: int | None,
        glance: bool = False,
        glanced: Callable[[StepSearch], None] | None = None,
    ) -> Searches:
        """A search on each mesh, that first which says what others must beat.

        Few axes are soon searched. Under a limit, that goes first where a plan that is soon found
        is the fastest; with `glance`, one is looked for where there is but one mesh, too. `glanced`
        is called with each search that was looked at.
        """
        found: list[tuple[float, Cluster, StepSearch]] = []
        given = self._meshes()
        least_s = below_s
        free_s = {c.mesh_shape: self.free_s.get(c.mesh_shape, 0.0) for c in given}
        # many axes are soon done with once they must be below what few have
        given.sort(key=lambda c: (len(c.mesh_shape) > _FEW, free_s[c.mesh_shape]))
        for cluster in given:
            search = self._search(cluster, limit, exposed, proved_within)
            seconds = free_s[cluster.mesh_shape]
            # many axes take long: where few have a plan, that is searched first in any case
            if len(cluster.mesh_shape) > _FEW and least_s < below_s:
                seconds = math.inf
            elif limit < UNLIMITED and (glance or len(given) > 1) and seconds < least_s:
                try:
                    seconds = search.glance(least_s)
                except (InfeasiblePlanError, NotBelow):
                    seconds = math.inf
                else:
                    if glanced is not None:
                        glanced(search)
                least_s = min(least_s, seconds)
            found.append((seconds, cluster, search))
        if limit < UNLIMITED:
            found.sort(key=lambda row: row[0])
        return [(cluster, search) for _, cluster, search in found]

    def _meshes(self) -> list[Cluster]:
        """What may be searched, the mesh as given last."""
        given = reversed(meshes(self.cluster, self.constraints))
        return [c for c in given if self.only is None or c.mesh_shape in self.only]

    def _search(
        self, cluster: Cluster, limit: int, exposed: float, proved_within: int | None
    ) -> StepSearch:
        return StepSearch(
            self.traced,
            cluster,
            constraints=replace(self.constraints, pipeline=None),
            memory_limit=limit,
            optimizer=self.optimizer,
            offers=self.offers,
            exposed=exposed,
            known=None if limit >= UNLIMITED else self.searches,
            proved_within=proved_within,
            # neither a limit nor a share that is exposed moves the greatest sum far
            first=self.told_t.get(cluster.mesh_shape, 0.0) if exposed < ALL_EXPOSED else 0.0,
        )
