"""`StepPlans`: plans of one step under any memory limit, from the cache or solved."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopar.cache import PlanCache
from autopar.codegen.fusion import Fusion
from autopar.core.collector import paused_collector
from autopar.core.constraints import Constraints
from autopar.core.graph import TracedModel
from autopar.core.plan import Plan
from autopar.cost_model import Cluster
from autopar.search.scheduling import scheduled

if TYPE_CHECKING:
    from autopar.search.step_limits import StepLimits

__all__ = ["StepPlans"]


class StepPlans:
    """Plans of one step under any memory limit; what they have in common is found once.

    They come from the cache, or are solved and kept there; ops are priced as they will be fused.
    The programs of a plan that is solved are written for their schedule, and checked against it.
    """

    def __init__(
        self,
        traced: TracedModel,
        cluster: Cluster,
        constraints: Constraints,
        optimizer: object,
        cache: bool,
        fusion: Fusion,
        *,
        several: bool = False,
        time_limit: float | None = None,
    ) -> None:
        self.traced = traced
        self.given = (cluster, constraints, optimizer, fusion)
        self.several = several
        self.time_limit = time_limit
        self.plans = PlanCache() if cache else None
        self._known: StepLimits | None = None

    @paused_collector()
    def under(self, limit: int | None) -> Plan:
        """The plan under a limit in bytes per device; default: the device's memory."""
        cluster, constraints, optimizer, fusion = self.given
        keys: list[str] = []
        if self.plans is not None:
            asked = (self.traced, cluster, constraints, limit, optimizer, fusion.kernels)
            # that of a search that ran to its end serves under any time limit
            times = dict.fromkeys((None, self.time_limit))
            keys = [self.plans.key(*asked, self.several, seconds) for seconds in times]
            for key in keys:
                known = self.plans.get(key)
                if known is not None:
                    return known
        from autopar.search.pipelining import plan_within
        from autopar.search.step_limits import StepLimits

        if self._known is None:
            given = (self.traced, cluster, constraints, optimizer, fusion)
            self._known = StepLimits(*given, several=self.several)
        within = cluster.memory_bytes if limit is None else limit
        found = plan_within(self._known, within, self.time_limit)
        found = scheduled(found, self.traced)
        if self.plans is not None:
            self.plans.put(keys[-1], found)
        return found
