"""Prices a decided plan from its placements alone: seconds, bytes sent, and peak memory.

Nothing here looks at the ILP. The sum of seconds must equal the ILP's objective, which catches a
tensor that the ILP believed free, and the bytes must equal those of the emitted program.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from autopar.core.placement import Layout, Placement, Replicate, shard_factor
from autopar.core.plan import CommBytes
from autopar.core.redistribute import Move, packing_fraction, path
from autopar.core.timeline import PlannedMove, rounded
from autopar.cost_model import (
    Cluster,
    PeakMemory,
    ScheduledOp,
    host_state_bytes,
    offload_seconds,
    optimizer_state_bytes,
    peak_bytes,
)
from autopar.solver.candidates import Candidate, Pricer
from autopar.solver.step import (
    ALONE,
    Bucket,
    FoldedSpan,
    Op,
    Send,
    Step,
    Value,
    folded_spans,
    leaving,
    ordered,
    sums_of_turns,
    turning_sends,
)

__all__ = [
    "Decision",
    "Price",
    "Pricing",
    "Schedule",
    "highest",
    "input_layouts",
    "lasting_bytes",
    "price",
]


@dataclass(frozen=True, slots=True)
class Decision:
    """The candidate of every op and the storage layout of every parameter, by node name."""

    candidates: Mapping[str, Candidate]
    storages: Mapping[str, Layout]


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds and bytes of a decision.

    `phases` are seconds of the parts of a step in microbatches: "prepare" and "finish" once a step;
    "forward", "input" and "weight" (the two parts of the backward) of one microbatch.
    """

    compute_s: float
    comm_s: float
    comm_bytes: tuple[CommBytes, ...]
    peak: PeakMemory
    phases: Mapping[str, float] = field(default_factory=dict)
    offload_s: float = 0.0
    host_bytes: int = 0

    @property
    def total_s(self) -> float:
        return self.compute_s + self.comm_s + self.offload_s


class Pricing:
    """Costs of one decision, from its placements alone."""

    def __init__(self, step: Step, cluster: Cluster, decision: Decision) -> None:
        self.step = step
        self.blocks = step.blocks
        self.cluster = cluster
        self.mesh = cluster.mesh_shape
        self.decision = decision
        self.pricer = Pricer(cluster)
        self.whole: Layout = tuple(Replicate() for _ in self.mesh)
        self.sent: Counter[tuple[int, str]] = Counter()
        self.bytes: Counter[tuple[int, str]] = Counter()
        self.comm_s = 0.0
        self.planned: dict[str, list[PlannedMove]] = defaultdict(list)
        self.flight = step.blocks.traced.flight
        self.sums = sums_of_turns(step)

    def layout(self, value: Value) -> Layout:
        """Layout of a value where it is produced."""
        name, index = value
        if name in self.decision.candidates:
            return self.decision.candidates[name].outputs[index]
        return self.decision.storages.get(name, self.whole)

    def moves(self, value: Value, target: Layout) -> tuple[Move, ...]:
        found = path(self.layout(value), target, self.mesh)
        assert found is not None, f"no way for {value} to {target}"
        return found

    def local_bytes(self, value: Value, layout: Layout) -> int:
        return self.step.specs[value].num_bytes // shard_factor(layout, self.mesh)

    def add_moves(
        self, value: Value, target: Layout, times: int, op: str, of: str, bucket: Bucket = ALONE
    ) -> None:
        sent = [m for m in self.moves(value, target) if m.kind != "slice" and self.mesh[m.axis] > 1]
        for position, move in enumerate(sent):
            num_bytes = self.step.specs[value].num_bytes * move.fraction
            shared = bucket.shared(move.kind, position)
            self.add(move.kind, move.axis, num_bytes, times, op, of, shared)

    def add(
        self, kind: str, axis: int, num_bytes: float, times: int, op: str, of: str, shared: int = 1
    ) -> None:
        seconds = self.pricer.collective(kind, axis, num_bytes, shared)
        self.comm_s += seconds * times
        self.sent[axis, kind] += times
        self.bytes[axis, kind] += round(num_bytes) * times
        move = PlannedMove(axis, kind, round(num_bytes), times, rounded(seconds), of)
        self.planned[op].append(move)

    def communicate(self) -> None:
        for op in self.step.ops.values():
            candidate = self.decision.candidates[op.name]
            for value, layout in zip(op.operands, candidate.inputs, strict=True):
                times = self.blocks.edge_weight(value[0], op.name)
                bucket = self.step.bucket(value, op.name)
                self.add_moves(value, layout, times, op.name, self.step.label(value[0]), bucket)
            for comm in candidate.comm:
                times = self.blocks.weight(op.name)
                self.add(comm.kind, comm.axis, comm.num_bytes, times, op.name, "")
        last = next(reversed(self.step.ops), "")
        own = {f"gradient of {self.step.parameters[name].target}" for name in self.step.gradients}
        for value, target, times, of in self.ends():
            bucket = self.step.reductions if of in own else ALONE
            self.add_moves(
                value, target, times, value[0] if value[0] in self.step.ops else last, of, bucket
            )

    def ends(self) -> Iterator[tuple[Value, Layout, int, str]]:
        """Values that leave the step, their layout, how often, and what they are."""
        for value in self.step.required:
            yield value, self.whole, self.blocks.runs(value[0]), "result"
        for send in self.step.sends:
            layout = self.decision.storages[send.port]
            sums = send.value[0] in self.sums
            of = send.port.removeprefix("port.") if sums else "sent"
            yield send.value, layout, send.times, of
        for name, value in self.step.gradients.items():
            target = self.step.parameters[name].target
            times = self.blocks.copies(name)
            yield value, self.decision.storages[name], times, f"gradient of {target}"

    def seconds(self, op: Op) -> float:
        """Compute of one execution of an op."""
        return float(self.pricer.compute(op.call, [self.decision.candidates[op.name]])[0])

    def compute(self) -> float:
        return sum(self.seconds(op) * self.blocks.weight(op.name) for op in self.step.ops.values())


def price(step: Step, cluster: Cluster, decision: Decision, optimizer: object) -> Price:
    """Price a decision op by op."""
    pricing = Pricing(step, cluster, decision)
    pricing.communicate()
    comm = tuple(
        CommBytes(axis=axis, kind=kind, num_bytes=pricing.bytes[axis, kind], count=count)
        for (axis, kind), count in sorted(pricing.sent.items())
    )
    _, peak = highest(pricing, optimizer)
    phases = _phases(pricing) if step.in_turns else {}
    seconds, host_bytes = _offload(pricing, optimizer)
    return Price(pricing.compute(), pricing.comm_s, comm, peak, phases, seconds, host_bytes)


def _phases(pricing: Pricing) -> dict[str, float]:
    """Seconds of each part of a step in microbatches, one microbatch's where it runs at each."""
    step, blocks = pricing.step, pricing.blocks
    seconds = dict.fromkeys(("prepare", "forward", "input", "weight", "finish"), 0.0)
    first = _before_sends(step)
    runs = blocks.traced.microbatches
    for name, op in step.ops.items():
        phase = "forward" if not op.backward else "input" if name in first else "weight"
        phase = "prepare" if step.is_hoisted(name) else phase
        often = 1 if phase == "prepare" else runs
        seconds[phase] += pricing.seconds(op) * blocks.weight(name) / often
        for move in pricing.planned.get(name, ()):
            if move.once and phase != "prepare":
                seconds["finish"] += move.seconds * move.times
            else:
                seconds[phase] += move.seconds * move.times / often
    return seconds


def _before_sends(step: Step) -> set[str]:
    """Backward ops whose results go, by way of others, to the stage before."""
    traced = step.blocks.traced
    stack = [
        send.value[0]
        for send in step.sends
        if send.value[0] in step.ops
        and step.ops[send.value[0]].backward
        and send.times == traced.microbatches
        and send.value[0] not in sums_of_turns(step)
    ]
    found: set[str] = set()
    while stack:
        name = stack.pop()
        if name in step.ops and name not in found and step.ops[name].backward:
            found.add(name)
            stack.extend(value[0] for value in step.ops[name].operands)
    return found


def _offload(pricing: Pricing, optimizer: object) -> tuple[float, int]:
    """Seconds that an offloaded update adds, and bytes of states on the host."""
    seconds, num_bytes = 0.0, 0
    for name in pricing.step.gradients:
        spec = pricing.step.parameters[name]
        share = pricing.local_bytes((name, 0), pricing.decision.storages[name])
        times = pricing.blocks.copies(name)
        device = pricing.cluster.device
        seconds += offload_seconds(device, optimizer, share, spec.dtype) * times
        num_bytes += host_state_bytes(optimizer, share, spec.dtype) * times
    return seconds, num_bytes


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
    layouts = input_layouts(step, pricing.decision, len(pricing.mesh))
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

    Of a step in microbatches, one microbatch while `in_flight` are: with the sums of gradients
    from the start where it is a later one, else the first, which makes them.
    """

    def __init__(self, pricing: Pricing, later: bool = True) -> None:
        self.pricing = pricing
        self.step = pricing.step
        self.later = later
        self.in_flight = pricing.flight.later if later else pricing.flight.first
        self.order = ordered(self.step)
        self.backward = next((p for p, op in enumerate(self.order) if op.backward), len(self.order))
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
            if position == (self.backward if backward else self._first):
                factor = shard_factor(self.pricing.decision.storages[name], self.pricing.mesh)
                found.append((self._id((name, 0)), spec.num_bytes // factor))
                self.kinds[found[-1][0]] = "received"
        return found

    @property
    def _first(self) -> int:
        """Position of the first op of a microbatch."""
        return next((p for p, op in enumerate(self.order) if not self.step.is_hoisted(op.name)), 0)

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

    def build(self) -> list[ScheduledOp]:
        ending = defaultdict(list)
        arriving = {p: self._received(p) for p in {self._first, self.backward}}
        received = {buffer for found in arriving.values() for buffer, _ in found}
        for value, position in self.last_use.items():
            is_ours = value[0] in self.step.ops or self._id(value) in received
            if is_ours and value not in self.lasting:
                if self.step.is_hoisted(value[0]):  # nothing reads it when gradients are reduced
                    position = min(position, len(self.order) - 1)
                ending[position].append(self._id(value))
        read = {self._id(value) for value in self.last_use}
        sums = {} if self.later else self._sums()
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
            self._send(schedule)
            schedule.append(self._finish())
        return self._with_copies(schedule)

    def _send(self, schedule: list[ScheduledOp]) -> None:
        """Add what is on its way, from the first to the last op of the forward and backward."""
        ends = ((self._first, self.backward - 1), (self.backward, len(self.order) - 1))
        for late, (first, last) in enumerate(ends):
            num_bytes = self._on_their_way(bool(late))
            if num_bytes and first <= last < len(schedule):
                buffer = f"sent {late}"
                self.kinds[buffer] = "sent"
                op = schedule[first]
                schedule[first] = replace(op, alloc=((buffer, num_bytes), *op.alloc))
                op = schedule[last]
                schedule[last] = replace(op, free=(*op.free, buffer))

    def _finish(self) -> ScheduledOp:
        """All gradients are reduced at once, when the last microbatch is done."""
        made: list[tuple[str, int]] = []
        for name, value in self.step.gradients.items():
            if self.pricing.moves(value, self.pricing.decision.storages[name]):
                made.append((f"grad.{name}", self._share(name) * self.step.blocks.copies(name)))
        self.kinds.update((buffer, "gradients") for buffer, _ in made)
        return ScheduledOp(name="finish", alloc=tuple(made))

    def between_turns(self) -> dict[str, int]:
        """Bytes that other microbatches keep, and hoisted values of folded blocks."""
        if not self.step.in_turns:
            return {}
        held: Counter[str] = Counter()
        blocks = self.step.blocks
        for op in self.order[: self.backward]:
            hoisted = self.step.is_hoisted(op.name)
            others = blocks.copies(op.name) * (self.in_flight - 1)
            if hoisted:
                others = blocks.copies(op.name) - 1
            if not others:
                continue
            for buffer, num_bytes in self._outputs(op)[0]:
                name, _, index = buffer.rpartition(".")
                if self.last_use.get((name, int(index)), -1) >= self.backward:
                    kind = "gathered" if hoisted else "activations"
                    held[kind] += others * self._rounded(num_bytes)
        for position in {self._first, self.backward}:
            for buffer, num_bytes in self._received(position):
                name = buffer.rpartition(".")[0]
                if position < self.backward <= self.last_use.get((name, 0), -1):
                    held["received"] += (self.in_flight - 1) * self._rounded(num_bytes)
        for name, spec in self.step.ports.items():
            if (name, 0) in self.step.specs and self.step.is_hoisted(name):
                factor = shard_factor(self.pricing.decision.storages[name], self.pricing.mesh)
                held["received"] += self._rounded(spec.num_bytes // factor)
        if self.later:
            held["gradients"] = sum(n for made in self._sums().values() for _, n in made)
        return {kind: num_bytes for kind, num_bytes in held.items() if num_bytes}

    def _on_their_way(self, late: bool) -> int:
        """What other turns have sent and the receiver may not have, while one part runs."""
        flight, total = self.pricing.flight, 0
        for send, backward in turning_sends(self.step):
            kept = not backward and self.last_use.get(self._base(send.value), -1) >= self.backward
            if not (kept and not self.pricing.moves(send.value, self._port(send))):
                share = self.pricing.local_bytes(send.value, self._port(send))
                total += self._rounded(share) * (flight.down if backward else flight.up)[late]
        return total

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
            alloc: list[tuple[str, int]] = []
            for name in span.saved:
                for index in range(len(self.step.ops[name].call.outputs)):
                    buffer = self._id((name, index))
                    read = self.last_use.get((name, index), -1)
                    if buffer in size and read >= span.backward:
                        alloc.append((f"{buffer} of others", self._times(size[buffer], span)))
                        self.kinds[alloc[-1][0]] = self.kinds[buffer]
            kept = [
                (f"grad.{name} of others", self._times(self._share(name), span))
                for name in span.parameters
                if name in self.step.gradients and not self.step.in_turns
            ]
            self.kinds.update(dict.fromkeys((buffer for buffer, _ in kept), "gradients"))
            first = schedule[span.first]
            schedule[span.first] = replace(first, alloc=(*alloc, *first.alloc))
            last = schedule[span.last]
            schedule[span.last] = replace(last, free=(*last.free, *(b for b, _ in alloc)))
            if span.last + 1 == len(schedule):
                schedule.append(ScheduledOp(name="end"))
            behind = schedule[span.last + 1]
            schedule[span.last + 1] = replace(behind, alloc=(*kept, *behind.alloc))
        return schedule

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


def lasting_bytes(schedule: Schedule, optimizer: object) -> dict[str, int]:
    """Bytes by kind that live throughout, those of other microbatches in flight included."""
    total = Counter(resident_bytes(schedule.pricing, optimizer))
    total.update(schedule.between_turns())
    return dict(total)


def schedules(pricing: Pricing) -> tuple[Schedule, ...]:
    """Of a step in microbatches that of the first and of a later one, where there are such."""
    both = (Schedule(pricing, later=False), Schedule(pricing)) if pricing.step.in_turns else ()
    return tuple(s for s in both if s.in_flight) or (Schedule(pricing),)


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


def input_layouts(step: Step, decision: Decision, num_axes: int) -> dict[str, Layout]:
    """Shard an input on an axis where every use of it wants that same shard."""
    wanted: dict[str, list[Layout]] = {}
    for value, op, index in step.consumers():
        if value[0] in step.inputs:
            layout = decision.candidates[op.name].inputs[index]
            wanted.setdefault(value[0], []).append(layout)
    layouts: dict[str, Layout] = {}
    for name, spec in step.inputs.items():
        uses = wanted.get(name, [])
        layouts[name] = tuple(_common(uses, axis) for axis in range(num_axes))
        if spec.kind not in ("input", "tangent"):
            layouts[name] = tuple(Replicate() for _ in range(num_axes))
    return layouts


def _common(uses: list[Layout], axis: int) -> Placement:
    found = {layout[axis] for layout in uses}
    if len(found) == 1:
        (placement,) = found
        if placement.is_shard and placement.dim == 0 and placement.split == 1:
            return placement
    return Replicate()
