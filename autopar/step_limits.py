"""What the searches of one step under several memory limits have in common.

Ops' offers, the plan in one piece without a limit, and what `StagePlanner` knows of microbatches,
cuts, bounds and stages without a limit depend on no limit. They are made once.
"""

from __future__ import annotations

import math
from dataclasses import replace

from autopar.codegen.fusion import Fusion
from autopar.codegen.shares import fused_shares
from autopar.core.constraints import Constraints
from autopar.core.folding import every_instance
from autopar.core.graph import TracedModel
from autopar.core.plan import Plan
from autopar.cost_model import Cluster
from autopar.solver.fit import UNLIMITED
from autopar.solver.offers import Offers
from autopar.solver.solve import KnownVariants, solve
from autopar.stage_planning import StagePlanner

__all__ = ["StepLimits"]


class StepLimits:
    """A step that is planned under several memory limits.

    Args:
        traced: the step on the whole batch, folded or not.
        cluster: all devices.
        constraints: what is pinned, of the pipeline and inside its stages.
        optimizer: whose states count in memory.
        fusion: the kernels that ops will be fused in, and are priced in; default: none.
        several: keep searches under a limit for others, which takes memory.
    """

    def __init__(
        self,
        traced: TracedModel,
        cluster: Cluster,
        constraints: Constraints,
        optimizer: object = "adamw",
        fusion: Fusion | None = None,
        *,
        several: bool = False,
    ) -> None:
        self.traced = traced
        self.cluster = cluster
        self.constraints = constraints
        self.optimizer = optimizer
        self.fusion = fusion or Fusion(kernels=frozenset())
        self.kernels = tuple(sorted(self.fusion.kernels))
        self.offers = Offers(cluster, fused_shares(traced, self.fusion))
        self._planner: StagePlanner | None = None
        self._free: Plan | None = None
        self._searches: KnownVariants | None = {} if several else None

    def planner(self, limit: int) -> StagePlanner:
        """Of pipelines under a limit.

        Raises:
            ConstraintError: the recomputation of a block is pinned that there is not.
        """
        if self._planner is None:
            given = (self.traced, self.cluster, self.constraints, limit, self.optimizer)
            self._planner = StagePlanner(*given, self.offers)
            self._planner.searches = None if self._searches is None else {}
        return self._planner.under(limit)

    def in_one_piece(self, limit: int) -> Plan:
        """The plan without a pipeline and microbatches.

        Raises:
            ConstraintError: the constraints cannot hold.
            InfeasiblePlanError: nothing fits.
        """
        if limit < UNLIMITED:
            return self._solved(limit)
        if self._free is None:
            self._free = self._solved(limit)
        return self._free

    def _solved(self, limit: int) -> Plan:
        found = solve(
            self.traced,
            self.cluster,
            constraints=replace(self.constraints, pipeline=None),
            memory_limit=limit,
            optimizer=self.optimizer,
            offers=self.offers,
            known=None if limit >= UNLIMITED else self._searches,
        )
        return replace(found, constraints=self.constraints.to_dict(), fusion=self.kernels)

    def holds_parameters(self, limit: int) -> bool:
        """False where all devices together cannot hold the parameters, however they are split."""
        sizes = {s.target: math.prod(s.shape) * s.dtype.itemsize for s in self.traced.parameters()}
        whole = sum(every_instance(sizes, self.traced.repeats).values())
        return limit * self.cluster.num_devices >= whole
