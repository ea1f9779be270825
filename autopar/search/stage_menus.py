"""The plans that equal stages of a pipeline may have, and which make the step short together.

A stage that no longer paces a step leaves others that do, so what one exchange of plans can save
is little where many ranks are done at about the same time. Each plan that was made of a stage
serves for all stages of its kind that exchange values in the same layouts. Among these, plans of
all stages are chosen at once, by what no order of the ranks' work is below
(`solver/pipelines/stage_mixture.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from autopar.codegen.stages import Staged
from autopar.core.flights import Waits
from autopar.core.graph import port_names
from autopar.core.placement import Layout
from autopar.core.plan import Plan
from autopar.cost_model.stages import rank_load
from autopar.solver.pipelines.stage_mixture import Mixture, StageLoad, best_mixture

__all__ = ["Aim", "Aims", "StageMenus"]


@dataclass(frozen=True, slots=True)
class Aim:
    """What a stage is planned for.

    Attributes:
        waits: as `Flight.waits`; None: those of its flight.
        ports: layouts of what it sends, by the names of its ports.
        free: choose the layouts of what it receives.
    """

    waits: Waits | None = None
    ports: Mapping[str, Layout] = field(default_factory=dict)
    free: bool = False


Aims: TypeAlias = Mapping[int, Aim]


class _Option(NamedTuple):
    """A plan of a stage, and what it is for its rank."""

    aim: Aim
    plan: Plan
    load: StageLoad


class StageMenus:
    """What the stages of a pipeline, one a rank, were planned for.

    Args:
        parts: the stages.
        microbatches: of the step.
        limit: bytes of a rank.
    """

    def __init__(self, parts: Staged, microbatches: int, limit: int) -> None:
        self.parts = parts
        self.microbatches = microbatches
        self.limit = limit
        self._options: dict[Hashable, list[_Option]] = defaultdict(list)

    def _key(self, stage: int, plan: Plan) -> Hashable:
        """Equal of stages that may exchange plans."""
        shared = (plan.inputs.get(name) for name in port_names(self.parts.model(stage)))
        return self.parts.kinds[stage], tuple(shared)

    def add(self, stage: int, aim: Aim, plan: Plan) -> None:
        """Note a plan of a stage."""
        known = self._options[self._key(stage, plan)]
        if not any(option.plan is plan for option in known):
            predicted = plan.predicted
            update_s = predicted.update_s + predicted.offload_s
            load = StageLoad(rank_load(plan, self.limit), predicted.phases["finish"], update_s)
            known.append(_Option(aim, plan, load))

    def of(self, stage: int, plan: Plan) -> Iterator[Plan]:
        """Plans that a stage may have in the place of one."""
        yield from (option.plan for option in self._options[self._key(stage, plan)])

    def mixture(self, plans: Sequence[Plan], transfer_s: Sequence[float]) -> Mixture:
        """What the step would take if stages could be mixtures of plans, and what that counts.

        Args:
            plans: of the stages, noted before.
            transfer_s: over the boundary behind each stage but the last.
        """
        return self._best(plans, transfer_s, whole=False)

    def better(self, plans: Sequence[Plan], transfer_s: Sequence[float]) -> dict[int, Aim]:
        """What some stages are to be planned for instead, for the step to take less.

        Where many stages have to change for that, none is better alone.

        Args:
            plans, transfer_s: as for `mixture`.
        """
        found = self._best(plans, transfer_s, whole=True)
        taken = [menu[i] for menu, i in zip(self._menus(plans), found.most, strict=True)]
        return {s: each.aim for s, each in enumerate(taken) if each.plan is not plans[s]}

    def _best(self, plans: Sequence[Plan], transfer_s: Sequence[float], whole: bool) -> Mixture:
        loads = [[option.load for option in menu] for menu in self._menus(plans)]
        return best_mixture(loads, self.microbatches, transfer_s, whole)

    def _menus(self, plans: Sequence[Plan]) -> list[list[_Option]]:
        return [self._options[self._key(stage, plan)] for stage, plan in enumerate(plans)]
