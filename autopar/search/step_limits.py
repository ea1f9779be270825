"""What the searches of one step under several memory limits have in common.

Ops' offers, the plan in one piece without a limit, and what `StagePlanner` knows of microbatches,
cuts, bounds and stages without a limit depend on no limit. They are made once.
"""

from __future__ import annotations

import math

from autopar.codegen.fusion import Fusion
from autopar.codegen.shares import fused_shares
from autopar.core.constraints import Constraints
from autopar.core.folding import every_instance
from autopar.core.graph import TracedModel
from autopar.core.plan import Plan
from autopar.cost_model import Cluster
from autopar.search.one_piece import OnePiece
from autopar.search.stage_planning import StagePlanner
from autopar.solver.fit import UNLIMITED
from autopar.solver.offers import Offers
from autopar.solver.solve import KnownVariants

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
        self._free: tuple[int, Plan] | None = None  # bytes within which it is proved
        self._program: Plan | None = None
        self._several = several
        searches: KnownVariants | None = {} if several else None
        self.whole = OnePiece(
            traced, cluster, constraints, optimizer, self.offers, searches, kernels=self.kernels
        )

    def planner(self, limit: int) -> StagePlanner:
        """Of pipelines under a limit.

        Raises:
            ConstraintError: the recomputation of a block is pinned that there is not.
        """
        if self._planner is None:
            given = (self.traced, self.cluster, self.constraints, limit, self.optimizer)
            self._planner = StagePlanner(*given, self.offers)
            self._planner.searches = {} if self._several else None
        return self._planner.under(limit)

    def free(self, limit: int) -> Plan:
        """The plan in one piece without a limit, not simulated; well proved if it keeps to one."""
        proved = UNLIMITED if self._several else limit
        if self._free is None or self._free[0] < proved:
            self._free = proved, self.whole.plan(UNLIMITED, proved_within=proved)
        return self._free[1]

    def free_bound_s(self) -> float:
        """Seconds that no plan in one piece counts less than, as far as is known yet."""
        return 0.0 if self._free is None else self._free[1].solver.bound

    def free_program(self, limit: int) -> Plan:
        """The best plan in one piece without a limit, as its program is simulated."""
        if self._program is None:
            self._program = self.whole.best(UNLIMITED, self.free(limit))
        return self._program

    def holds_parameters(self, limit: int) -> bool:
        """False where all devices cannot hold parameters and gradients, however they are split."""
        sizes = {s.target: math.prod(s.shape) * s.dtype.itemsize for s in self.traced.parameters()}
        # parameters may share a gradient, which is held once
        made = {s.node: s.target for s in self.traced.outputs if s.kind == "gradient" and s.node}
        every = every_instance(sizes, self.traced.repeats).values()
        gradients = every_instance({t: sizes[t] for t in made.values()}, self.traced.repeats)
        return limit * self.cluster.num_devices >= sum(every) + sum(gradients.values())
