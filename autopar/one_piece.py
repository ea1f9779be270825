"""Plans of a step in one piece: the best mesh, and as much hidden as the program really hides.

The search counts on a share of the gathers of parameters and of the reductions of gradients to
travel beside compute (`solver/overlap.py`). Where the simulated program hides much less, for memory
or for collectives over several axes, the step is solved again with the share that it hides, and the
faster of the two programs is taken. Where it hides about that, and is still slower than the bound,
programs of plain data parallelism are simulated, too: the rule does not know how each overlaps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from autopar.core.constraints import Constraints, assign_mesh
from autopar.core.graph import TracedModel
from autopar.core.plan import Plan
from autopar.cost_model import Cluster
from autopar.errors import ConstraintError, InfeasiblePlanError
from autopar.scheduling import scheduled
from autopar.solver.fit import UNLIMITED
from autopar.solver.meshes import meshes
from autopar.solver.offers import Offers
from autopar.solver.overlap import EXPOSED
from autopar.solver.solve import KnownVariants, NotBelow, solve

__all__ = ["OnePiece"]

_JOINED = 1e-3  # what a mesh with joined axes must save
_HIDDEN = 0.8  # of what was counted on: less, and the step is solved again
_SLOWER = 0.01  # than the bound: more, and other programs are looked at
_STAGES = (0, 1, 3)  # of ZeRO


@dataclass(frozen=True, slots=True)
class OnePiece:
    """Plans a step on the whole batch, as `plan_step` has it; `kernels` as of `Plan.fusion`."""

    traced: TracedModel
    cluster: Cluster
    constraints: Constraints
    optimizer: object
    offers: Offers
    kernels: tuple[str, ...]
    searches: KnownVariants | None = None

    def plan(self, limit: int, exposed: float = EXPOSED, below_s: float = math.inf) -> Plan:
        """The plan that counts least, on the mesh as given or with axes joined.

        Args:
            limit: bytes per device.
            exposed, below_s: see `solver.solve`.

        Raises:
            ConstraintError: the constraints cannot hold.
            InfeasiblePlanError: nothing fits, on any mesh.
            NotBelow: nothing is below `below_s`.
        """
        best: Plan | None = None
        bound = math.inf
        refused: list[InfeasiblePlanError] = []
        # the given mesh comes last: few axes are soon searched, and say what it must beat
        for cluster in reversed(meshes(self.cluster, self.constraints)):
            own = cluster.mesh_shape == self.cluster.mesh_shape
            # it is kept where joining its axes gains nothing to speak of
            to_beat_s = min(below_s, _objective(best) * (1 + _JOINED * own))
            try:
                found = self._solved(cluster, limit, exposed, to_beat_s)
            except NotBelow as error:
                bound = min(bound, error.bound)
            except InfeasiblePlanError as error:
                refused.append(error)
            else:
                bound = min(bound, found.solver.bound)
                best = found if found.solver.objective < to_beat_s else best
        if best is None and math.isfinite(bound):
            raise NotBelow(bound)
        if best is None:
            raise min(refused, key=lambda error: error.required_bytes or 0)
        return _proved(best, bound)

    def best(self, limit: int, plan: Plan | None = None) -> Plan:
        """A plan within the limit with what its program hides, or a faster one.

        Args:
            limit: bytes per device.
            plan: that counts least.

        Raises:
            ConstraintError: the constraints cannot hold.
            InfeasiblePlanError: nothing fits.
        """
        first = plan or self.plan(limit)
        best = scheduled(first, self.traced)
        hoped_s = first.predicted.serial_time_s - first.solver.objective
        hidden_s = best.predicted.hidden_time_s
        share = 1 - (1 - EXPOSED) * hidden_s / hoped_s if hidden_s < _HIDDEN * hoped_s else EXPOSED
        others = [(pinned, EXPOSED) for pinned in self._data_parallel()]
        if share > EXPOSED:
            others.append((self.constraints, share))
        for constraints, exposed in others:
            now_s = best.predicted.step_time_s
            if now_s <= (1 + _SLOWER) * first.solver.bound:
                break
            # searches of other constraints are of other problems
            searches = self.searches if constraints is self.constraints else None
            pinned = replace(self, constraints=constraints, searches=searches)
            with suppress(ConstraintError, InfeasiblePlanError, NotBelow):
                other = scheduled(pinned.plan(limit, exposed, now_s), self.traced)
                if exposed == EXPOSED:
                    other = _proved(other, first.solver.bound)  # the pins are not the user's
                other = replace(other, constraints=self.constraints.to_dict())
                best = min(best, other, key=lambda p: p.predicted.step_time_s)
        return best

    def _data_parallel(self) -> Iterator[Constraints]:
        """Those that split the batch over all devices, if no axis is pinned."""
        free = all(r.name == "free" for r in assign_mesh(self.constraints, self.cluster.mesh_shape))
        if not free or self.constraints.params or not self.traced.training:
            return
        for stage in _STAGES:
            yield replace(self.constraints, data=self.cluster.num_devices, zero=stage)

    def _solved(self, cluster: Cluster, limit: int, exposed: float, below_s: float) -> Plan:
        found = solve(
            self.traced,
            cluster,
            constraints=replace(self.constraints, pipeline=None),
            memory_limit=limit,
            optimizer=self.optimizer,
            offers=self.offers,
            exposed=exposed,
            below_s=below_s,
            known=None if limit >= UNLIMITED else self.searches,
        )
        return replace(found, constraints=self.constraints.to_dict(), fusion=self.kernels)


def _proved(plan: Plan, bound: float) -> Plan:
    """A plan with a bound of the seconds that it counts."""
    objective = plan.solver.objective
    bound = min(bound, objective)
    gap = 1 - bound / objective if objective else 0.0
    return replace(plan, solver=replace(plan.solver, bound=bound, gap=gap))


def _objective(plan: Plan | None) -> float:
    return math.inf if plan is None else plan.solver.objective
