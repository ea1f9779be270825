"""Plans of a step in one piece: the best mesh, and as much hidden as the program really hides.

The search counts on a share of the gathers of parameters and of the reductions of gradients to
travel beside compute (`solver/overlap.py`). Where the simulated program hides much less, for memory
or for collectives over several axes, the step is solved again with the share that it hides, and the
faster of the two programs is taken.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.core.constraints import Constraints
from autopar.core.graph import TracedModel
from autopar.core.plan import Plan
from autopar.cost_model import Cluster
from autopar.errors import InfeasiblePlanError
from autopar.scheduling import scheduled
from autopar.solver.meshes import meshes
from autopar.solver.offers import Offers
from autopar.solver.overlap import EXPOSED
from autopar.solver.solve import solve

__all__ = ["OnePiece"]

_JOINED = 1e-3  # what a mesh with joined axes must save
_HIDDEN = 0.8  # of what was counted on: less, and the step is solved again


@dataclass(frozen=True, slots=True)
class OnePiece:
    """Plans a step on the whole batch, as `plan_step` has it; `kernels` as of `Plan.fusion`."""

    traced: TracedModel
    cluster: Cluster
    constraints: Constraints
    limit: int
    optimizer: object
    offers: Offers
    kernels: tuple[str, ...]

    def plan(self, memory_limit: int | None = None, exposed: float = EXPOSED) -> Plan:
        """The plan that counts least, on the mesh as given or with axes joined.

        Args:
            memory_limit: bytes per device, if not the limit.
            exposed: see `solver.solve`.

        Raises:
            ConstraintError: the constraints cannot hold.
            InfeasiblePlanError: nothing fits, on any mesh.
        """
        found: list[Plan] = []
        refused: list[InfeasiblePlanError] = []
        for cluster in meshes(self.cluster, self.constraints):
            try:
                found.append(self._solved(cluster, memory_limit or self.limit, exposed))
            except InfeasiblePlanError as error:
                refused.append(error)
        if not found:
            raise min(refused, key=lambda error: error.required_bytes or 0)
        # the given mesh is kept where joining its axes gains nothing to speak of
        best = min(found, key=lambda p: p.solver.objective * (1 - _JOINED * (p is found[0])))
        objective, bound = best.solver.objective, min(p.solver.bound for p in found)
        gap = 1 - bound / objective if objective else 0.0
        return replace(best, solver=replace(best.solver, bound=bound, gap=gap))

    def best(self, plan: Plan | None = None) -> Plan:
        """A plan within the limit with what its program hides, or a faster one.

        Args:
            plan: that counts least.

        Raises:
            ConstraintError: the constraints cannot hold.
            InfeasiblePlanError: nothing fits.
        """
        first = plan or self.plan()
        found = scheduled(first, self.traced)
        hoped_s = first.predicted.serial_time_s - first.solver.objective
        hidden_s = found.predicted.hidden_time_s
        if hidden_s >= _HIDDEN * hoped_s:
            return found
        other = scheduled(self.plan(exposed=1 - (1 - EXPOSED) * hidden_s / hoped_s), self.traced)
        return min(found, other, key=lambda p: p.predicted.step_time_s)

    def _solved(self, cluster: Cluster, limit: int, exposed: float) -> Plan:
        found = solve(
            self.traced,
            cluster,
            constraints=replace(self.constraints, pipeline=None),
            memory_limit=limit,
            optimizer=self.optimizer,
            offers=self.offers,
            exposed=exposed,
        )
        return replace(found, constraints=self.constraints.to_dict(), fusion=self.kernels)
