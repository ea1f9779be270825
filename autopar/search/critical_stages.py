"""Plans anew those stages of a pipeline that are on the critical path of its schedule.

At first all stages are planned for the same: a second of a turn counts what it adds to a step of
equal stages (`Flight.waits`). But the ranks that begin and that end a step stand idle between, so
what they do once costs a step more than what they do at each turn; and the rank with the most to do
at a turn sets the pace of all. So, as long as the step gets shorter,

1. the schedule is run on the clock, and what the last action to end waited for is followed back to
   the start (`PipelineSimulation.critical_path`);
2. of the stages on that path, those where it ends and begins and the one with most actions on it
   are planned for what the path counts: so many forwards, input and weight gradients, and what runs
   once in front of all or behind all. A path that is made shorter leaves others, so a stage goes
   half of the way from the weights that it was planned for, and if that helps, all of it; else a
   quarter, or all where a turn may take less. One with which the step would hardly be shorter even
   if it took no more than the bounds of its blocks is planned once, or stays as it is;
3. a stage keeps the layouts of what it exchanges with others. Where those that it receives cost
   much, it chooses them, and the stages before are planned to send them.

That is a descent, not an optimum: the bound of a plan does not come from here. Where stages are
planned within the memory limit, which takes much longer, only the first half of step 2 is done.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from autopar.core.flights import Waits
from autopar.core.placement import Layout
from autopar.core.plan import Plan
from autopar.cost_model.stages import RanksTime, ranks_time, transfer_seconds
from autopar.errors import ConstraintError, InfeasiblePlanError
from autopar.search.stage_menus import Aim, Aims, StageMenus

if TYPE_CHECKING:
    from autopar.search.pipeline_stages import Pipeliner

__all__ = ["CriticalStages"]

_HALF = 0.5  # of the way from the weights of a stage to those of the critical path
_LEAST = 1e-3  # of the step: what an exchange of plans must save
_AGAIN = 3e-3  # of the step: what a stage may save at best, to be planned more than once
_NEAR = 0.02  # of the least that a turn can take
_MOST = 64  # exchanges
_PROMISED = 0.005  # of the step: what a mixture must promise to save
_MISSED = 2  # stages that are planned in a row for mixtures, to no use
_REFUSED = (ConstraintError, InfeasiblePlanError)  # of layouts that do not go together


class CriticalStages:
    """Exchanges the plans of stages for others with which the step takes less.

    Args:
        pipeliner: that plans them; ranks must hold the memory limit in the end.
        aims: what each stage was planned for.
    """

    def __init__(self, pipeliner: Pipeliner, aims: Aims) -> None:
        self.pipeliner = pipeliner
        self.parts = pipeliner.parts
        self.aims = dict(aims)
        self.plans = pipeliner.solve_for(self.aims)
        self.time = self._time(self.plans)
        shape = pipeliner.shape
        self.menus = StageMenus(self.parts, shape.microbatches, pipeliner.planner.limit)
        self._note(self.aims, self.plans)

    def suited(self) -> list[Plan]:
        """Plans of all stages, which fit the memory limit if the first ones did."""
        for _ in range(_MOST):
            if not any(self._exchanged(*each) for each in self._critical()):
                break
        if self.pipeliner.automatic and self.pipeliner.free:
            self._regroup()
        return self.plans

    # --- where the step takes long -------------------------------------------------------------
    def _time(self, plans: Sequence[Plan]) -> RanksTime:
        return ranks_time(plans, self.pipeliner.orders, self._transfer_seconds(plans))

    def _transfer_seconds(self, plans: Sequence[Plan]) -> list[float]:
        p = self.pipeliner
        return transfer_seconds(self.parts.crossings(), plans, p.cluster, p.shape.size)

    def _critical(self) -> list[tuple[int, Waits, bool]]:
        """Stages to plan anew, what the critical path counts, and whether most of it is in them.

        That is how often their parts are on it, beside once in each turn or step.
        """
        size, turns = self.pipeliner.shape.size, self.pipeliner.shape.microbatches
        last = max(range(size), key=self.time.ends_s.__getitem__)
        path = [s.action for s in self.time.simulated.critical_path(last)]
        counts = Counter((a.stage, a.kind) for a in path)
        runs = Counter(a.stage for a in path)
        first = path[0].stage % size
        longest = max(runs, key=lambda s: (runs[s], -s))
        ends = sorted((s for s in runs if s % size == last), reverse=True)
        found: list[tuple[int, Waits, bool]] = []
        for stage in dict.fromkeys([*ends, longest, path[0].stage]):
            prepare, finish = stage % size == first, stage % size == last
            whole = counts[stage, "B"]
            shares = Waits(
                prepare=float(prepare),
                forward=counts[stage, "F"] / turns,
                inputs=(counts[stage, "I"] + whole) / turns,
                weights=(counts[stage, "W"] + whole) / turns,
                finish=float(finish),
            )
            found.append((stage, shares, stage == longest))
        return found

    def _on_path(self, plan: Plan, counts: Waits) -> float:
        """Seconds of the critical path in a stage."""
        phases, turns = plan.predicted.phases, self.pipeliner.shape.microbatches
        once_s = counts.prepare * phases["prepare"] + counts.finish * phases["finish"]
        parts = (phases["forward"], phases["input"], phases["weight"])
        return once_s + turns * sum(n * s for n, s in zip(counts[1:4], parts, strict=True))

    def _at_best(self, stage: int) -> float:
        """Seconds of the step if each part of a stage took no more than its bound."""
        plans = list(self.plans)
        plans[stage] = self._bounded(stage, plans[stage])
        return self._time(plans).step_s

    def _bounded(self, stage: int, plan: Plan) -> Plan:
        """A plan as if each part of its stage took no more than its bound."""
        names = {"forward": "forward", "input": "inputs", "weight": "weights"}
        least = {phase: self._least_of_turn(stage, name) for phase, name in names.items()}
        phases = {**plan.predicted.phases, **least, "prepare": 0.0, "finish": 0.0}
        return replace(plan, predicted=replace(plan.predicted, phases=phases))

    # --- exchanges -----------------------------------------------------------------------------
    def _exchanged(self, stage: int, counts: Waits, paces: bool) -> bool:
        """Plan a stage for other weights; False if that does not make the step shorter.

        Args:
            stage: to plan anew.
            counts: of the critical path.
            paces: it has most actions on that path.
        """
        hoped = 1 - self._at_best(stage) / self.time.step_s
        if hoped <= _LEAST:
            return False
        aims = self._towards(stage, counts, _HALF)
        plans = self._planned(aims)
        if self._kept(aims, plans):
            return True
        # within a limit each plan takes seconds, and most of them gain nothing
        if hoped < _AGAIN or not self.pipeliner.free:
            return False
        if paces and stage and self._may_gain(stage):
            aims = self._towards(stage, counts, 1.0)
            wanted = self._wanted(stage, aims[stage])
            return self._tried(aims) or (wanted is not None and self._tried(aims | wanted))
        # the less the weights change, the less the path does
        now_s = self._on_path(self.plans[stage], counts)
        if plans is None or now_s - self._on_path(plans[stage], counts) < _LEAST * self.time.step_s:
            return False
        return self._tried(self._towards(stage, counts, _HALF**2))

    def _may_gain(self, stage: int) -> bool:
        """True if a turn of a stage may take less, up to what the stage before waits for."""
        phases = self.plans[stage].predicted.phases
        now_s = phases["forward"] + phases["input"]
        return self._least_of_turn(stage, "onward") < now_s * (1 - _NEAR)

    def _least_of_turn(self, stage: int, name: str) -> float:
        """Seconds of a part of a stage's turn, by its name in `Turn.found`, that none is below."""
        planner, cuts = self.pipeliner.planner, self.pipeliner.cuts
        run = slice(*planner.work.run_of(cuts, stage))
        return float(planner.turn(self.pipeliner.shape).of_turn(name)[run].sum())

    def _tried(self, aims: Aims) -> bool:
        """Plan the stages for other aims, and keep that if the step gets shorter."""
        return self._kept(aims, self._planned(aims))

    def _planned(self, aims: Aims) -> list[Plan] | None:
        """Plans of the stages for other aims; None if these are the same, or cannot be met."""
        if aims == self.aims:
            return None
        try:
            plans = self.pipeliner.solve_for(aims)
        except _REFUSED:
            return None
        self._note(aims, plans)
        return plans

    def _note(self, aims: Aims, plans: Sequence[Plan]) -> None:
        """Keep plans that stages of an automatic order may have later."""
        if self.pipeliner.automatic:
            for stage, plan in enumerate(plans):
                self.menus.add(stage, aims[stage], plan)

    def _kept(self, aims: Aims, plans: list[Plan] | None, search: bool = False) -> bool:
        """Keep the plans of other aims if the step gets shorter.

        Args:
            aims, plans: of all stages.
            search: for their orders.
        """
        if plans is None:
            return False
        orders = self.pipeliner.orders
        if self.pipeliner.automatic:
            self.pipeliner.order(plans, quick=not search, search=search)
        time = self._time(plans)
        holds = self._shorter(time) and self.pipeliner.holds(plans)
        if self._shorter(time) and not holds and self.pipeliner.automatic:
            self.pipeliner.order(plans)  # in one that holds less
            time, holds = self._time(plans), self.pipeliner.holds(plans)
        if holds and self._shorter(time):
            self.aims, self.plans, self.time = dict(aims), plans, time
            return True
        self.pipeliner.orders = orders
        return False

    def _shorter(self, time: RanksTime) -> bool:
        return time.step_s < self.time.step_s * (1 - _LEAST)

    def _towards(self, stage: int, counts: Waits, share: float) -> dict[int, Aim]:
        """Aims with other weights of one stage, on the way to what the critical path counts."""
        aim = self._between(self.plans[stage].solver.waits, counts, share)
        if aim == self.plans[stage].solver.waits:
            return dict(self.aims)
        return self.aims | {stage: Aim(aim, self._sent(stage))}

    def _between(self, waits: Waits, counts: Waits, share: float) -> Waits:
        """Weights some of the way from some to others, of which the largest is 1."""
        least = max(counts) / (2 * self.pipeliner.shape.microbatches)  # none counts nothing
        found = [
            round((1 - share) * math.log2(a) + share * math.log2(max(b, least)))  # stages share
            for a, b in zip(waits, counts, strict=True)
        ]
        return Waits(*(2.0 ** (n - max(found)) for n in found))

    def _sent(self, stage: int) -> dict[str, Layout]:
        """Layouts of what a stage sends at each turn, as they are."""
        sent = (o for o in self.parts.model(stage).outputs if o.kind == "sent")
        return {o.port: self.plans[stage].inputs[o.port] for o in sent if not o.accumulated}

    def _regroup(self) -> None:
        """Exchange plans of several stages at once, while mixtures of plans promise much less."""
        self.pipeliner.order(self.plans, search=True)
        self.time = self._time(self.plans)
        missed, tried, before_s = 0, set[tuple[int, ...]](), math.inf
        while missed <= _MISSED:
            transfer_s = self._transfer_seconds(self.plans)
            mixture = self.menus.mixture(self.plans, transfer_s)
            if mixture.step_s > self.time.step_s * (1 - _PROMISED):
                return
            better = self.menus.better(self.plans, transfer_s)
            if self._regrouped(self.aims | better, tried):
                missed = 0
                continue
            if not self._extended(mixture.waits):
                return
            missed = 0 if mixture.step_s < before_s * (1 - _LEAST) else missed + 1
            before_s = min(before_s, mixture.step_s)

    def _regrouped(self, aims: Aims, tried: set[tuple[int, ...]]) -> bool:
        """Keep other plans of several stages, which were not tried, if the step gets shorter."""
        plans = self._planned(aims)
        if plans is None or (group := tuple(map(id, plans))) in tried:
            return False
        tried.add(group)
        return self._kept(aims, plans, search=True)

    def _extended(self, waits: Sequence[Waits]) -> bool:
        """Plan the stage that promises most for what a mixture counts; False if none does."""
        promised: dict[int, float] = {}
        aims: dict[int, Aim] = {}
        for stage, (plan, counts) in enumerate(zip(self.plans, waits, strict=True)):
            if max(counts) == 0.0:
                continue
            known = list(self.menus.of(stage, plan))
            aim = self._between(plan.solver.waits, counts, 1.0)
            if all(aim != other.solver.waits for other in known):
                now_s = min(self._on_path(other, counts) for other in known)
                promised[stage] = now_s - self._on_path(self._bounded(stage, plan), counts)
                aims[stage] = Aim(aim, self._sent(stage))
        stage = max(promised, key=promised.__getitem__, default=-1)
        if promised.get(stage, 0.0) < _LEAST * self.time.step_s:
            return False
        return self._planned(self.aims | {stage: aims[stage]}) is not None

    def _wanted(self, stage: int, aim: Aim) -> dict[int, Aim] | None:
        """What the senders of a stage would be planned for if it chose what it receives."""
        free = Aim(aim.waits, aim.ports, free=True)
        try:
            wished = self.pipeliner.solve_for(self.aims | {stage: free}, stage)[stage]
        except _REFUSED:
            return None
        found: dict[int, Aim] = {}
        for value, sender, name in self._senders(stage):
            if (
                value not in wished.inputs
                or wished.inputs[value] == self.plans[stage].inputs[value]
            ):
                continue
            model = self.parts.model(sender)
            port = next(o.port for o in model.outputs if o.kind == "sent" and o.target == name)
            known = found.get(sender) or self.aims.get(sender) or Aim()
            ports = self._sent(sender) | dict(known.ports) | {port: wished.inputs[value]}
            found[sender] = Aim(known.waits, ports)
        return found or None

    def _senders(self, stage: int) -> Iterator[tuple[str, int, str]]:
        """What a stage receives on the way forward, who sends it, and how that one calls it."""
        kinds = self.parts.kinds
        kind, below = kinds[stage], kinds[stage - 1]
        ours = self.parts.crossing(kind - 1, kind, "forward")
        theirs = self.parts.crossing(below, below + 1, "forward")
        for mine, other in zip(ours, theirs, strict=True):
            yield mine.value, stage - 1, other.value
        for transfer in self.parts.stages.transfers:
            if transfer.phase == "hoist" and transfer.target == kind:
                yield transfer.value, kinds.index(transfer.source), transfer.value
