"""What a decided plan holds in memory: allocations and frees of the local program, and their peak.

Of a step in microbatches one is followed, from its forward to its last gradient. What the stage
holds of others meanwhile is known of its schedule (`core/flights.py`) for each part::

    live(op) = lasting + live of this microbatch(op) + of the others while the part of op runs

The first microbatch makes the sums of gradients, later ones find them.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from autopar.core.flights import ALL, INPUT, NONE, Others
from autopar.core.held import Held
from autopar.core.placement import Layout, shard_factor
from autopar.core.redistribute import packing_fraction
from autopar.cost_model import PeakMemory, ScheduledOp, moments, optimizer_state_bytes, peak_bytes
from autopar.solver.input_layouts import input_layouts
from autopar.solver.order import (
    FoldedSpan,
    folded_spans,
    leaving,
    ordered,
    part_starts,
    turning_sends,
)
from autopar.solver.step import Op, Send, Value

if TYPE_CHECKING:
    from autopar.solver.price import Pricing

__all__ = ["Schedule", "held_bytes", "highest", "lasting_bytes"]

_SUMS = (NONE, INPUT, ALL)
_TWINS = " of others"


def resident_bytes(pricing: Pricing, optimizer: object) -> dict[str, int]:
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
    layouts = input_layouts(step, pricing.decision.candidates, len(pricing.mesh))
    total = step.blocks.traced.batch_bytes
    for name, spec in step.inputs.items():
        whole = step.specs[name, 0].num_bytes
        factor = shard_factor(layouts[name], pricing.mesh)
        if not step.in_turns:
            total += whole + (whole // factor if spec.kind == "input" else 0)
        elif name not in step.blocks.traced.hoisted:
            total += whole // factor if factor > 1 else 0  # else a view of the batch
        else:
            total += whole
    return total


class Schedule:
    """Allocations and frees of the local program, in execution order.

    Args:
        pricing: of the plan.
        sums: of a step in microbatches, the sums of gradients that are there when one begins; the
            weight gradients that follow find at least those of the input gradients.
        alone: without what is held of other microbatches.
    """

    def __init__(self, pricing: Pricing, sums: int = ALL, alone: bool = False) -> None:
        self.pricing = pricing
        self.step = pricing.step
        self.sums = sums
        self.alone = alone
        self.order = ordered(self.step)
        self.first, self.backward, self.weight = part_starts(self.step, self.order)
        self.kinds: dict[str, str] = {}
        self.last_use = self._last_use()
        self.gradients: dict[str, list[str]] = defaultdict(list)
        self.lasting: set[Value] = set()
        # between microbatches, gradients are added to sums, which are reduced at the end
        kept = {} if self.step.in_turns else self.step.gradients
        for name, value in kept.items():
            self.gradients[value[0]].append(name)
            if not pricing.moves(value, pricing.decision.storages[name]):
                self.lasting.add(self._base(value))

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """Where the forward, the backward and weight gradients that come later begin and end."""
        ends = (self.first, self.backward, self.weight, len(self.order))
        return tuple(itertools.pairwise(ends))

    def part(self, position: int) -> int:
        """Number of the part of an op; -1 for what is hoisted, 3 behind the last op."""
        if position < self.first:
            return -1
        return sum(position >= p for p in (self.backward, self.weight, len(self.order)))

    def others(self, part: int) -> Others | None:
        """What is held of other microbatches while a part runs; None if it never runs so."""
        flight = self.pricing.flight
        sums = max(self.sums, INPUT) if part == 2 else self.sums
        found = flight.rows[sums][part]
        return Others() if self.alone and found is not None else found

    def _base(self, value: Value) -> Value:
        """The value whose memory this one shows: views of a redistributed copy show that copy."""
        name, _ = value
        ops = self.step.ops
        while name in ops and ops[name].view:
            if self._moved(ops[name], 0):
                return name, 0
            value = ops[name].operands[0]
            name, _ = value
        return value

    def _moved(self, op: Op, index: int) -> bool:
        """True if an operand arrives by a collective, hence as a buffer of its own."""
        layout = self.pricing.decision.candidates[op.name].inputs[index]
        moves = self.pricing.moves(op.operands[index], layout)
        return any(m.kind != "slice" for m in moves)

    def _last_use(self) -> dict[Value, int]:
        """Last op that reads each buffer; a redistributed operand reads its source too."""
        last: dict[Value, int] = {}
        for position, op in enumerate(self.order):
            for value in op.operands:
                last[self._base(value)] = max(last.get(self._base(value), -1), position)
                if self.step.is_hoisted(self._base(value)[0]) and not self.step.is_hoisted(op.name):
                    last[self._base(value)] = len(self.order)  # every microbatch reads it
        for value in self.step.results:
            last[self._base(value)] = len(self.order)
        if self.step.in_turns:
            for value, position in leaving(self.step, self.order):
                base = self._base(value)
                last[base] = max(last.get(base, -1), position)
        return last

    def _received(self, position: int) -> list[tuple[str, int]]:
        """What another stage has sent for the forward or the backward that begins at an op."""
        found: list[tuple[str, int]] = []
        for name, spec in self.step.ports.items():
            if (name, 0) not in self.step.specs or self.step.is_hoisted(name):
                continue
            backward = self.step.blocks.traced.info[name].phase == "backward"
            if position == (self.backward if backward else self.first):
                factor = shard_factor(self.pricing.decision.storages[name], self.pricing.mesh)
                found.append((self._id((name, 0)), spec.num_bytes // factor))
                self.kinds[found[-1][0]] = "received"
        return found

    def _sums(self) -> dict[str, list[tuple[str, int]]]:
        """Sums of gradients, by the op that makes a contribution to them."""
        found: dict[str, list[tuple[str, int]]] = defaultdict(list)
        if self.step.in_turns:
            values = [*self.step.gradients.values(), *(s.value for s in self.step.sends)]
            for value in dict.fromkeys(v for v in values if v[0] in self.pricing.sums):
                share = self.pricing.local_bytes(value, self.pricing.layout(value))
                copies = self.step.blocks.copies(value[0])
                found[value[0]].append((f"sum of {self._id(value)}", share * copies))
        return found

    def sums_bytes(self) -> tuple[int, int]:
        """Bytes of the sums that the backward makes, and of those of weight gradients behind it."""
        late = {op.name for op in self.order[self.weight :]}
        made = [(name in late, n) for name, sums in self._sums().items() for _, n in sums]
        return sum(n for is_late, n in made if not is_late), sum(
            n for is_late, n in made if is_late
        )

    def _made(self) -> dict[str, list[tuple[str, int]]]:
        """Sums that are made while this microbatch runs, by op."""
        late = {op.name for op in self.order[self.weight :]}
        found = {} if self.sums == ALL else self._sums()
        return {op: made for op, made in found.items() if self.sums == NONE or op in late}

    def build(self) -> list[ScheduledOp]:
        ending = defaultdict(list)
        arriving = {p: self._received(p) for p in {self.first, self.backward}}
        received = {buffer for found in arriving.values() for buffer, _ in found}
        for value, position in self.last_use.items():
            is_ours = value[0] in self.step.ops or self._id(value) in received
            if is_ours and value not in self.lasting:
                if self.step.is_hoisted(value[0]):  # nothing reads it when gradients are reduced
                    position = min(position, len(self.order) - 1)
                ending[position].append(self._id(value))
        read = {self._id(value) for value in self.last_use}
        sums = self._made()
        self.kinds.update((b, "gradients") for made in sums.values() for b, _ in made)
        schedule: list[ScheduledOp] = []
        for position, op in enumerate(self.order):
            alloc, unread = self._outputs(op)
            given = arriving.get(position, [])
            unread = [*unread, *(b for b, _ in given if b not in read)]
            schedule.append(
                ScheduledOp(
                    name=op.name,
                    alloc=(*given, *alloc, *self._reduced_gradients(op), *sums.get(op.name, ())),
                    free=tuple(dict.fromkeys((*ending[position], *unread))),
                    transient_bytes=self._copies(op) + self._packed_gradients(op),
                    arriving_bytes=self._arriving(op),
                )
            )
        if self.step.in_turns:
            self._add_others(schedule)
            schedule.append(self._finish())
        return self._with_copies(schedule)

    def _add_others(self, schedule: list[ScheduledOp]) -> None:
        """Add what is held of other microbatches, from the first to the last op of each part."""
        for part, (begin, end) in enumerate(self.parts):
            others = self.others(part)
            if others is None or begin == end:
                continue
            sizes = {f"others {part} {k}": n for k, n in self.held_of(others).items() if n}
            self.kinds.update((buffer, buffer.split()[-1]) for buffer in sizes)
            op = schedule[begin]
            arriving = op.arriving_bytes and op.arriving_bytes + sum(sizes.values())
            alloc = (*sizes.items(), *op.alloc)
            schedule[begin] = replace(op, alloc=alloc, arriving_bytes=arriving)
            op = schedule[end - 1]
            schedule[end - 1] = replace(op, free=(*op.free, *sizes))

    def held_of(self, others: Others) -> dict[str, int]:
        """Bytes by kind of other microbatches."""
        total: Counter[str] = Counter()
        for times, part in ((others.waiting, 1), (others.delayed, 2)):
            if times:
                total.update({k: times * n for k, n in self.kept_for(part).items()})
        up, down = self.sent_bytes()
        total["sent"] += others.up * up + others.down * down
        return dict(total)

    def _finish(self) -> ScheduledOp:
        """All gradients are reduced at once, when the last microbatch is done."""
        made: list[tuple[str, int]] = []
        for name, value in self.step.gradients.items():
            if self.pricing.moves(value, self.pricing.decision.storages[name]):
                made.append((f"grad.{name}", self._share(name) * self.step.blocks.copies(name)))
        self.kinds.update((buffer, "gradients") for buffer, _ in made)
        return ScheduledOp(name="finish", alloc=tuple(made))

    def kept_for(self, part: int) -> dict[str, int]:
        """What a microbatch keeps for a part and later ones when the part before has run."""
        held: Counter[str] = Counter()
        cut = self.parts[part][0]
        for op in self.order[self.first : cut]:
            for buffer, num_bytes in self._outputs(op)[0]:
                if self._is_read_from(cut, buffer):
                    copies = self.step.blocks.copies(op.name)
                    held[self.kinds[buffer]] += copies * self._rounded(num_bytes)
        for position in {self.first, self.parts[part - 1][0]}:
            for buffer, num_bytes in self._received(position):
                if self._is_read_from(cut, buffer):
                    held["received"] += self._rounded(num_bytes)
        return dict(held)

    def _is_read_from(self, cut: int, buffer: str) -> bool:
        name, _, index = buffer.rpartition(".")
        return self.last_use.get((name, int(index)), -1) >= cut

    def between_turns(self) -> dict[str, int]:
        """Hoisted values of folded blocks, and the sums of gradients that are there."""
        if not self.step.in_turns:
            return {}
        held: Counter[str] = Counter()
        for op in self.order[: self.first]:
            others = self.step.blocks.copies(op.name) - 1
            for buffer, num_bytes in self._outputs(op)[0] if others else ():
                if self._is_read_from(self.backward, buffer):
                    held["gathered"] += others * self._rounded(num_bytes)
        for name, spec in self.step.ports.items():
            if (name, 0) in self.step.specs and self.step.is_hoisted(name):
                factor = shard_factor(self.pricing.decision.storages[name], self.pricing.mesh)
                held["received"] += self._rounded(spec.num_bytes // factor)
        held["gradients"] = sum(self.sums_bytes()[: self.sums])
        return {kind: num_bytes for kind, num_bytes in held.items() if num_bytes}

    def hoisted_bytes(self) -> dict[str, int]:
        """What is computed before the microbatches and read by them, once for folded blocks."""
        held: Counter[str] = Counter()
        for op in self.order[: self.first]:
            for buffer, num_bytes in self._outputs(op)[0]:
                if self._is_read_from(self.first, buffer):
                    held[self.kinds[buffer]] += self._rounded(num_bytes)
        return dict(held)

    def stored_bytes(self) -> int:
        """Gradients as they are left, and sums that went to other stages."""
        total = sum(self._share(n) * self.step.blocks.copies(n) for n in self.step.gradients)
        mine = {self._id(value) for value in self.step.gradients.values()}
        made = (m for sums in self._sums().values() for m in sums)
        return total + sum(n for name, n in made if name.removeprefix("sum of ") not in mine)

    def sent_bytes(self) -> tuple[int, int]:
        """What a microbatch sends up and down that is not kept anyway."""
        total = [0, 0]
        for send, backward in turning_sends(self.step):
            kept = not backward and self.last_use.get(self._base(send.value), -1) >= self.backward
            if not (kept and not self.pricing.moves(send.value, self._port(send))):
                share = self.pricing.local_bytes(send.value, self._port(send))
                total[backward] += self._rounded(share)
        return total[0], total[1]

    def _port(self, send: Send) -> Layout:
        return self.pricing.decision.storages[send.port]

    def _rounded(self, num_bytes: int) -> int:
        unit = self.pricing.cluster.device.allocation_granularity_bytes
        return -(-num_bytes // unit) * unit

    def _with_copies(self, schedule: list[ScheduledOp]) -> list[ScheduledOp]:
        """Add what the other instances of folded blocks keep while the one in the graph runs.

        It is the last to run forward and the first backward: the others' saved activations are
        there from its first op to its last, their gradients after its last.
        """
        size = {buffer: num_bytes for op in schedule for buffer, num_bytes in op.alloc}
        for span in folded_spans(self.step, self.order):
            alloc = self._of_others(span, span.saved, span.backward, size)
            late = self._of_others(span, span.inputs, span.weight, size)
            kept = [
                (f"grad.{name}{_TWINS}", self._times(self._share(name), span))
                for name in span.parameters
                if name in self.step.gradients and not self.step.in_turns
            ]
            self.kinds.update(dict.fromkeys((buffer for buffer, _ in kept), "gradients"))
            if span.last + 1 == len(schedule):
                schedule.append(ScheduledOp(name="end"))
            _insert(schedule, span.first, alloc=alloc)
            # what weight gradients read is there when all instances have had their input gradients
            _insert(schedule, span.middle + 1, alloc=late)
            for buffer, read in (*self._reads(alloc), *self._reads(late)):
                _insert(schedule, span.middle if read < span.weight else span.last, free=[buffer])
            _insert(schedule, span.last + 1, alloc=kept)
        return schedule

    def _of_others(
        self, span: FoldedSpan, ops: Iterable[str], cut: int, size: Mapping[str, int]
    ) -> list[tuple[str, int]]:
        """Buffers of the instances that are not in the graph which ops from a position on read."""
        found: list[tuple[str, int]] = []
        for name in ops:
            for index in range(len(self.step.ops[name].call.outputs)):
                buffer = self._id((name, index))
                if buffer in size and self._is_read_from(cut, buffer):
                    found.append((f"{buffer}{_TWINS}", self._times(size[buffer], span)))
                    self.kinds[found[-1][0]] = self.kinds[buffer]
        return found

    def _reads(self, buffers: Iterable[tuple[str, int]]) -> Iterable[tuple[str, int]]:
        """Buffers of other instances, and the position up to which they are read."""
        for buffer, _ in buffers:
            name, _, index = buffer.removesuffix(_TWINS).rpartition(".")
            yield buffer, self.last_use[name, int(index)]

    def _share(self, name: str) -> int:
        return self.pricing.local_bytes((name, 0), self.pricing.decision.storages[name])

    def _times(self, num_bytes: int, span: FoldedSpan) -> int:
        return (span.times - 1) * self._rounded(num_bytes)

    def _id(self, value: Value) -> str:
        return f"{value[0]}.{value[1]}"

    def _outputs(self, op: Op) -> tuple[list[tuple[str, int]], list[str]]:
        """Buffers that an op creates, and those of them that nobody reads."""
        alloc: list[tuple[str, int]] = []
        unread: list[str] = []
        candidate = self.pricing.decision.candidates[op.name]
        if op.view:
            value = (op.name, 0)
            kept = value in self.lasting
            if self._base(value) == value and (kept or value in self.last_use):
                copy = self.pricing.local_bytes(op.operands[0], candidate.inputs[0])
                alloc.append((self._id(value), copy))
                self.kinds[self._id(value)] = "gradients" if kept else "gathered"
            return alloc, unread
        for index in range(len(op.call.outputs)):
            value = (op.name, index)
            size = self.pricing.local_bytes(value, candidate.outputs[index])
            alloc.append((self._id(value), size))
            self.kinds[self._id(value)] = "activations" if not op.backward else "backward"
            if value in self.lasting:
                self.kinds[self._id(value)] = "gradients"
            elif value not in self.last_use:
                unread.append(self._id(value))
        return alloc, unread

    def _reduced_gradients(self, op: Op) -> list[tuple[str, int]]:
        """Gradients that an op completes and that a redistribution turns into new buffers."""
        kept: list[tuple[str, int]] = []
        for name in self.gradients[op.name]:
            if self._base(self.step.gradients[name]) in self.lasting:
                continue
            layout = self.pricing.decision.storages[name]
            buffer = f"grad.{name}"
            kept.append((buffer, self.pricing.local_bytes((name, 0), layout)))
            self.kinds[buffer] = "gradients"
        return kept

    def _packed_gradients(self, op: Op) -> int:
        """What a gradient is packed into while it is reduced to its storage layout."""
        return max(
            (
                self._packing(self.step.gradients[name], self.pricing.decision.storages[name])
                for name in self.gradients[op.name]
            ),
            default=0,
        )

    def _packing(self, value: Value, target: Layout) -> int:
        fraction = packing_fraction(self.pricing.moves(value, target))
        return round(self.step.specs[value].num_bytes * fraction)

    def _arriving(self, op: Op) -> int:
        """Redistributed operands, and the largest buffer that one of them is packed into."""
        candidate = self.pricing.decision.candidates[op.name]
        copies = packing = 0
        for index, (value, layout) in enumerate(zip(op.operands, candidate.inputs, strict=True)):
            if self._moved(op, index):
                copies += self.pricing.local_bytes(value, layout)
                packing = max(packing, self._packing(value, layout))
        return copies + packing if packing else 0

    def _copies(self, op: Op) -> int:
        """Redistributed operands, which live while the op runs."""
        candidate = self.pricing.decision.candidates[op.name]
        total = 0
        if op.view:
            return total  # counted as a buffer
        for index, (value, layout) in enumerate(zip(op.operands, candidate.inputs, strict=True)):
            if self._moved(op, index):
                total += self.pricing.local_bytes(value, layout)
        return total


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


def lasting_bytes(schedule: Schedule, optimizer: object) -> dict[str, int]:
    """Bytes by kind that live throughout; of a step in microbatches, between them too."""
    total = Counter(resident_bytes(schedule.pricing, optimizer))
    total.update(schedule.between_turns())
    return dict(total)


def schedules(pricing: Pricing, alone: bool = False) -> tuple[Schedule, ...]:
    """Of a step in microbatches, one for each state of the sums in which a microbatch begins."""
    if not pricing.step.in_turns:
        return (Schedule(pricing),)
    rows = pricing.flight.rows
    return tuple(Schedule(pricing, sums, alone) for sums in _SUMS if any(rows[sums]))


def highest(pricing: Pricing, optimizer: object) -> tuple[Schedule, PeakMemory]:
    """The schedule that peaks highest, and its peak."""
    found = []
    for schedule in schedules(pricing):
        ops = schedule.build()
        peak = peak_bytes(
            ops,
            resident=lasting_bytes(schedule, optimizer),
            granularity_bytes=pricing.cluster.device.allocation_granularity_bytes,
            kinds=schedule.kinds,
        )
        found.append((schedule, peak))
    return max(found, key=lambda pair: pair[1].peak_bytes)


def held_bytes(pricing: Pricing, optimizer: object) -> Held | None:
    """What a stage holds at the moments of a step in microbatches; None without such."""
    if not pricing.step.in_turns:
        return None
    tops: dict[tuple[int, int], dict[str, int]] = {}
    for schedule in schedules(pricing, alone=True):
        for position, _, totals in moments(
            schedule.build(),
            resident=lasting_bytes(schedule, optimizer),
            granularity_bytes=pricing.cluster.device.allocation_granularity_bytes,
            kinds=schedule.kinds,
        ):
            key = schedule.sums, schedule.part(position)
            if sum(totals.values()) > sum(tops.get(key, {}).values()):
                tops[key] = totals
    one = Schedule(pricing, NONE)
    resident = resident_bytes(pricing, optimizer)
    idle = Counter(resident)
    idle.update(one.between_turns())
    idle.update(one.hoisted_bytes())
    up, down = one.sent_bytes()
    return Held(
        batch=pricing.step.blocks.traced.batch_bytes,
        idle=dict(idle),
        waiting=one.kept_for(1),
        delayed=one.kept_for(2),
        up=up,
        down=down,
        sums=one.sums_bytes(),
        tops=tops,
        after={**resident, "gradients": one.stored_bytes()},
    )
