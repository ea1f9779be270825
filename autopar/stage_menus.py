"""The plans that equal stages of a pipeline may have, and which make the step short together.

A stage that no longer paces a step leaves others that do, so what one exchange of plans can save
is little where many ranks are done at about the same time. Each plan that was made of a stage
serves for all stages of its kind that exchange values in the same layouts. Among these, plans of
all stages are chosen at once: by what no order of the ranks' work is below (`core/soonest.py`), one
stage after the other while that gets less, counting ranks that are nearly the last as well.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from autopar.codegen.stages import Staged
from autopar.core.flights import Waits
from autopar.core.graph import port_names
from autopar.core.list_schedule import RankLoad
from autopar.core.placement import Layout
from autopar.core.plan import Plan
from autopar.core.soonest import forwards_ahead, soonest
from autopar.cost_model.stages import rank_load
from autopar.solver.stage_mixture import Mixture, best_mixture
from autopar.solver.step_lp import Line

__all__ = ["Aim", "Aims", "StageMenus"]

_SOFT = 3e-3  # of the step: how near to the last one a rank counts
_ROUNDING = 1e-6  # relative, of what an exchange must save


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
    load: RankLoad
    finish_s: float

    def seconds(self, turns: int) -> tuple[float, ...]:
        """Of its parts in a step of so many turns, in the order of `Waits`."""
        load = self.load
        at_turns = (turns * s for s in (load.forward_s, load.input_s, load.weight_s))
        return (load.begin_s, *at_turns, self.finish_s)


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
            load = rank_load(plan, self.limit)
            known.append(_Option(aim, plan, load, plan.predicted.phases["finish"]))

    def of(self, stage: int, plan: Plan) -> Iterator[Plan]:
        """Plans that a stage may have in the place of one."""
        yield from (option.plan for option in self._options[self._key(stage, plan)])

    def mixture(self, plans: Sequence[Plan], transfer_s: Sequence[float]) -> Mixture:
        """What the step would take if stages could be mixtures of plans, and what that counts.

        Args:
            plans: of the stages, noted before.
            transfer_s: over the boundary behind each stage but the last.
        """
        loads = [option.load for option in self._taken(plans)]
        ahead = forwards_ahead(loads, self.microbatches)
        turns = self.microbatches
        line = Line(ranks=len(plans), microbatches=turns, transfer_s=transfer_s, ahead=ahead)
        options = [[option.seconds(turns) for option in menu] for menu in self._menus(plans)]
        return best_mixture(options, line)

    def better(
        self, plans: Sequence[Plan], transfer_s: Sequence[float], mixture: Mixture
    ) -> list[dict[int, Aim]]:
        """What some stages are to be planned for instead, for the step to take less.

        Where many stages have to change for that, none is better alone: the plans that a mixture
        has most of are a second place to begin.

        Args:
            plans, transfer_s: as for `mixture`.
            mixture: of these plans.

        Returns:
            What promises most first.
        """
        near = [menu[i] for menu, i in zip(self._menus(plans), mixture.most, strict=True)]
        found = [self._descended(begun, transfer_s) for begun in (self._taken(plans), near)]
        found.sort(key=lambda taken: self._soft_seconds(taken, transfer_s))
        return [
            {s: each.aim for s, each in enumerate(taken) if each.plan is not plans[s]}
            for taken in found
        ]

    def _descended(self, begun: Sequence[_Option], transfer_s: Sequence[float]) -> list[_Option]:
        """Options of the stages, one exchanged after the other while the step gets shorter."""
        taken, moved = list(begun), True
        menus = self._menus([option.plan for option in begun])
        least_s = self._soft_seconds(taken, transfer_s)
        while moved:
            moved = False
            for stage, menu in enumerate(menus):
                for option in menu:
                    before, taken[stage] = taken[stage], option
                    seconds = self._soft_seconds(taken, transfer_s)
                    if seconds < least_s * (1 - _ROUNDING):
                        least_s, moved = seconds, True
                    else:
                        taken[stage] = before
        return taken

    def _menus(self, plans: Sequence[Plan]) -> list[list[_Option]]:
        return [self._options[self._key(stage, plan)] for stage, plan in enumerate(plans)]

    def _taken(self, plans: Sequence[Plan]) -> list[_Option]:
        return [
            next(o for o in self._options[self._key(stage, plan)] if o.plan is plan)
            for stage, plan in enumerate(plans)
        ]

    def _soft_seconds(self, taken: Sequence[_Option], transfer_s: Sequence[float]) -> float:
        """When the last rank is done at the soonest, and more the more ranks are near to it."""
        done = soonest([option.load for option in taken], self.microbatches, transfer_s)
        ends = [end + option.finish_s for end, option in zip(done, taken, strict=True)]
        last = max(ends)
        soft = _SOFT * last
        return last + soft * math.log(sum(math.exp((end - last) / soft) for end in ends))
