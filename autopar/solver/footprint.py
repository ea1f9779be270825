"""What a decided plan holds in memory: allocations and frees of the local program, and their peak.

Of a step in microbatches one is followed, from its forward to its last gradient. What the stage
holds of others meanwhile is known of its schedule (`core/flights.py`) for each part::

    live(op) = lasting + live of this microbatch(op) + of the others while the part of op runs

The first microbatch makes the sums of gradients, later ones find them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from autopar.core.flights import ALL, INPUT, NONE, Others
from autopar.core.held import Held
from autopar.core.placement import shard_factor
from autopar.cost_model import PeakMemory, ScheduledOp, levels, optimizer_state_bytes
from autopar.solver.buffers import Buffers
from autopar.solver.input_layouts import input_layouts

if TYPE_CHECKING:
    from autopar.solver.price import Pricing

__all__ = ["Footprint", "Schedule"]

_SUMS = (NONE, INPUT, ALL)


@dataclass(frozen=True, slots=True)
class _Top:
    """The moment of a part at which most bytes of one microbatch are live."""

    index: int
    name: str
    num_bytes: int
    kinds: dict[str, int]


class Schedule:
    """Allocations and frees of one microbatch's local program, in execution order.

    Args:
        buffers: of the plan.
        sums: of a step in microbatches, the sums of gradients that are there when one begins; the
            weight gradients that follow find at least those of the input gradients.
        resident: bytes that live throughout a step, by kind.
    """

    def __init__(self, buffers: Buffers, sums: int, resident: dict[str, int]) -> None:
        self.buffers = buffers
        self.step = buffers.step
        self.sums = sums
        total = Counter(resident)
        if self.step.in_turns:
            total.update(buffers.hoisted_of_others())
            total["gradients"] += sum(buffers.sums_bytes[:sums])
        self.lasting = {kind: num_bytes for kind, num_bytes in total.items() if num_bytes}
        self.lasting = {**dict.fromkeys(resident, 0), **self.lasting}
        self.ops = self._build()

    @cached_property
    def kinds(self) -> dict[str, str]:
        """Kind of each buffer."""
        sums = (buffer for made in self.buffers.sums.values() for buffer, _ in made)
        finish = (f"grad.{name}" for name in self.step.gradients if self.step.in_turns)
        return {**self.buffers.kinds, **dict.fromkeys((*sums, *finish), "gradients")}

    def levels(self) -> Iterator[tuple[int, str, int, Mapping[str, int]]]:
        """The moments of this microbatch alone, as `cost_model.levels` gives them."""
        unit = self.buffers.pricing.cluster.device.allocation_granularity_bytes
        return levels(self.ops, resident=self.lasting, granularity_bytes=unit, kinds=self.kinds)

    @cached_property
    def tops(self) -> dict[int, _Top]:
        """By part, the first moment at which most bytes of this microbatch are live."""
        found: dict[int, _Top] = {}
        for index, name, num_bytes, kinds in self.levels():
            part = self.buffers.part(index)
            known = found.get(part)
            # resident bytes alone are the top of an empty schedule only
            if known is None or num_bytes > known.num_bytes or known.index < 0:
                found[part] = _Top(index, name, num_bytes, dict(kinds))
        return found

    def of_others(self, part: int) -> dict[str, int]:
        """Bytes by kind that are held of other microbatches while a part runs."""
        if not self.step.in_turns or part not in range(3):
            return {}
        sums = max(self.sums, INPUT) if part == 2 else self.sums
        others = self.buffers.pricing.flight.rows[sums][part]
        return {} if others is None else self._held_of(others)

    def _held_of(self, others: Others) -> dict[str, int]:
        total: Counter[str] = Counter()
        for times, part in ((others.waiting, 1), (others.delayed, 2)):
            if times:
                total.update({k: times * n for k, n in self.buffers.kept_for(part).items()})
        up, down = self.buffers.sent_bytes
        total["sent"] += others.up * up + others.down * down
        return {kind: num_bytes for kind, num_bytes in total.items() if num_bytes}

    def _made(self) -> dict[str, list[tuple[str, int]]]:
        """Sums that are made while this microbatch runs, by op."""
        if self.sums == ALL:
            return {}
        late = {op.name for op in self.buffers.order[self.buffers.weight :]}
        made = self.buffers.sums.items()
        return {op: sums for op, sums in made if self.sums == NONE or op in late}

    def _build(self) -> list[ScheduledOp]:
        made = self._made()
        schedule = [
            replace(op, alloc=(*op.alloc, *made[op.name])) if op.name in made else op
            for op in self.buffers.ops
        ]
        if self.step.in_turns:
            schedule += self._finish() or [ScheduledOp(name="finish")]
        for twins in self.buffers.twins:
            span = twins.span
            if span.last + 1 == len(schedule):
                schedule.append(ScheduledOp(name="end"))
            _insert(schedule, span.first, alloc=twins.alloc)
            # what weight gradients read is there when all instances have had their input gradients
            _insert(schedule, span.middle + 1, alloc=twins.late)
            for buffer, position in twins.freed:
                _insert(schedule, position, free=[buffer])
            _insert(schedule, span.last + 1, alloc=twins.kept)
        return schedule

    def _finish(self) -> list[ScheduledOp]:
        """Gradients are reduced one after the other, when the last microbatch is done.

        A sum goes when it has been reduced, so an op allocates what there is beyond all sums.
        """
        sums_last = {value: name for name, value in self.step.gradients.items()}
        found: list[ScheduledOp] = []
        level = 0
        for name, value in self.step.gradients.items():
            share, packed, total = self.buffers.reduction(name)
            if share:
                copies = self.step.blocks.copies(name)
                kept = share - (total if sums_last[value] == name else 0)
                beyond = max(level, level + (copies - 1) * kept) + share + packed
                level += copies * kept
                buffer = (f"grad.{name}", max(beyond, 0))
                found.append(ScheduledOp(name="finish", alloc=(buffer,), free=(buffer[0],)))
            else:
                found.append(ScheduledOp(name="finish"))
        return found


def _insert(
    schedule: list[ScheduledOp],
    position: int,
    *,
    alloc: Iterable[tuple[str, int]] = (),
    free: Iterable[str] = (),
) -> None:
    """Let an op of a schedule allocate more before its own, and free more."""
    op = schedule[position]
    schedule[position] = replace(op, alloc=(*alloc, *op.alloc), free=(*op.free, *free))


class Footprint:
    """The memory of a decided plan.

    Args:
        pricing: of the plan.
        optimizer: whose states count.
    """

    def __init__(self, pricing: Pricing, optimizer: object) -> None:
        self.pricing = pricing
        self.step = pricing.step
        self.buffers = Buffers(pricing)
        self.resident = _resident_bytes(pricing, optimizer)

    @cached_property
    def schedules(self) -> tuple[Schedule, ...]:
        """Of a step in microbatches, one for each state of the sums in which one begins."""
        rows = self.pricing.flight.rows
        sums = [s for s in _SUMS if any(rows[s])] if self.step.in_turns else [ALL]
        return tuple(Schedule(self.buffers, s, self.resident) for s in sums)

    @cached_property
    def highest(self) -> tuple[Schedule, PeakMemory]:
        """The schedule that peaks highest, and its peak."""
        found = [(schedule, _peak(schedule)) for schedule in self.schedules]
        return max(found, key=lambda pair: pair[1].peak_bytes)

    @property
    def peak(self) -> PeakMemory:
        """The moment at which most bytes are live."""
        return self.highest[1]

    def held(self) -> Held | None:
        """What a stage holds at the moments of a step in microbatches; None without such."""
        if not self.step.in_turns:
            return None
        one = self.buffers
        tops = {
            (schedule.sums, part): top.kinds
            for schedule in self.schedules
            for part, top in schedule.tops.items()
        }
        idle = Counter(self.resident)
        idle.update(one.hoisted_of_others())
        idle.update(one.hoisted_bytes())
        up, down = one.sent_bytes
        return Held(
            batch=self.step.blocks.traced.batch_bytes,
            idle=dict(idle),
            waiting=one.kept_for(1),
            delayed=one.kept_for(2),
            up=up,
            down=down,
            sums=one.sums_bytes,
            tops=tops,
            after={**self.resident, "gradients": one.stored_bytes()},
        )


def _peak(schedule: Schedule) -> PeakMemory:
    """The first highest moment: those of a part have the same bytes of others."""
    best: _Top | None = None
    for part, top in sorted(schedule.tops.items()):
        kinds = Counter(top.kinds)
        kinds.update(schedule.of_others(part))
        total = sum(kinds.values())
        if best is None or total > best.num_bytes or best.index < 0:
            best = _Top(top.index, top.name, total, dict(kinds))
    assert best is not None
    return PeakMemory.of(best.index, best.name, best.kinds)


def _resident_bytes(pricing: Pricing, optimizer: object) -> dict[str, int]:
    """Bytes that live throughout: parameters, optimizer states and the batch."""
    parameters = states = 0
    for name, spec in pricing.step.parameters.items():
        layout = pricing.decision.storages[name]
        share = pricing.local_bytes((name, 0), layout)
        times = pricing.blocks.copies(name)
        parameters += share * times
        if name in pricing.step.gradients:
            numel = share // spec.dtype.itemsize
            states += optimizer_state_bytes(optimizer, numel, spec.dtype) * times
    return {"parameters": parameters, "optimizer": states, "inputs": _input_bytes(pricing)}


def _input_bytes(pricing: Pricing) -> int:
    """The global batch, which the caller holds, and the share of it that the step reads."""
    step = pricing.step
    layouts = input_layouts(step, pricing.decision.candidates, pricing.mesh)
    total = step.blocks.traced.batch_bytes
    for name, spec in step.inputs.items():
        whole = step.specs[name, 0].num_bytes * step.blocks.copies(name)
        factor = shard_factor(layouts[name], pricing.mesh)
        if not step.in_turns:
            total += whole + (whole // factor if spec.kind == "input" else 0)
        elif name not in step.blocks.traced.hoisted:
            total += whole // factor if factor > 1 else 0  # else a view of the batch
        else:
            total += whole
    return total
