"""Prices a decided plan from its placements alone: seconds, bytes sent, and peak memory.

Nothing here looks at the ILP. The sum of seconds must equal the ILP's objective, which catches a
tensor that the ILP believed free, and the bytes must equal those of the emitted program.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from autopar.core.host import WITH_HOST
from autopar.core.placement import Layout, Replicate, shard_factor
from autopar.core.plan import CommBytes
from autopar.core.redistribute import Move, copied_fractions, path
from autopar.core.timeline import Packing, PlannedMove, is_once, rounded
from autopar.core.work import is_away
from autopar.cost_model import (
    Cluster,
    PeakMemory,
    host_state_bytes,
    offload_seconds,
    update_seconds,
)
from autopar.solver.candidates import Candidate
from autopar.solver.footprint import Footprint
from autopar.solver.offers import Offers
from autopar.solver.order import parts_of_turns, sums_of_turns, waits_of_parts
from autopar.solver.overlap import Weights
from autopar.solver.packing import alike, packing_seconds
from autopar.solver.row_at import RowAt
from autopar.solver.step import ALONE, Bucket, Op, Step, Value

__all__ = ["Decision", "Price", "Pricing", "price"]


@dataclass(frozen=True, slots=True)
class Decision:
    """The candidate of every op and the storage layout of every parameter, by node name."""

    candidates: Mapping[str, Candidate]
    storages: Mapping[str, Layout]


class HostCopies(NamedTuple):
    """Copies of activations to host memory and back, of a step.

    Attributes:
        total_s, exposed_s: seconds on the link, and of these what compute waits for.
        num_bytes: that are in host memory at most.
    """

    total_s: float = 0.0
    exposed_s: float = 0.0
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds and bytes of a decision.

    `pricing` and `footprint` are what they were found from. `phases` are seconds of the parts of a
    step in microbatches: "prepare" and "finish" once a step; "forward", "input" and "weight" (the
    two parts of the backward) of one microbatch. `hideable_s` are the seconds of collectives that
    may run beside compute: of parameters and gradients. `packing_s` are those of the copies on
    the way of these, a part of `compute_s`.
    """

    compute_s: float
    comm_s: float
    comm_bytes: tuple[CommBytes, ...]
    pricing: Pricing
    footprint: Footprint
    phases: Mapping[str, float] = field(default_factory=dict)
    update_s: float = 0.0
    offload_s: float = 0.0
    host_bytes: int = 0
    copies: HostCopies = field(default_factory=HostCopies)
    hideable_s: float = 0.0
    packing_s: float = 0.0

    @property
    def total_s(self) -> float:
        updated_s = self.update_s + self.offload_s
        return self.compute_s + self.comm_s + updated_s + self.copies.exposed_s

    def weighted_s(self, weights: Weights) -> float:
        """The sum that a search with these weights minimises."""
        less_s = (1.0 - weights.compute) * self.compute_s
        less_s += (1.0 - weights.hideable) * self.hideable_s
        step = self.pricing.step
        counts, once = waits_of_parts(step), ("prepare", "finish")
        for part, seconds in self.phases.items():
            runs = 1 if part in once else step.blocks.traced.microbatches
            less_s += (1.0 - counts[part]) * seconds * runs
        return self.total_s - less_s

    @property
    def peak(self) -> PeakMemory:
        """The moment at which most bytes are live; looked for when it is asked for."""
        return self.footprint.peak

    @property
    def peak_at(self) -> RowAt:
        """That moment."""
        schedule, peak = self.footprint.highest
        return RowAt(peak.index, schedule.sums)


class Pricing:
    """Costs of one decision, from its placements alone."""

    def __init__(
        self, step: Step, cluster: Cluster, decision: Decision, offers: Offers | None = None
    ) -> None:
        self.offers = offers or Offers(cluster)
        self.step = step
        self.blocks = step.blocks
        self.cluster = cluster
        self.mesh = cluster.mesh_shape
        self.decision = decision
        self.pricer = self.offers.pricer
        self.whole: Layout = tuple(Replicate() for _ in self.mesh)
        self.sent: Counter[tuple[int, str]] = Counter()
        self.bytes: Counter[tuple[int, str]] = Counter()
        self.comm_s = 0.0
        self.hideable_s = 0.0
        self.planned: dict[str, list[PlannedMove]] = defaultdict(list)
        self.packed: dict[str, Packing] = defaultdict(Packing)
        self.flight = step.blocks.traced.flight
        self.sums = sums_of_turns(step)
        self._seconds: dict[str, float] = {}

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
        self,
        value: Value,
        target: Layout,
        times: int,
        op: str,
        of: str,
        bucket: Bucket = ALONE,
        may_hide: bool = False,
    ) -> None:
        before_s = self.comm_s
        sent = [m for m in self.moves(value, target) if m.kind != "slice" and self.mesh[m.axis] > 1]
        for position, move in enumerate(sent):
            num_bytes = self.step.specs[value].num_bytes * move.fraction
            shared = bucket.shared(move.kind, position)
            self.add(move.kind, move.axis, num_bytes, times, op, of, shared)
        if may_hide:
            self.hideable_s += self.comm_s - before_s
            if of != "result":
                self.pack(value, target, times, op, of)

    def add(
        self, kind: str, axis: int, num_bytes: float, times: int, op: str, of: str, shared: int = 1
    ) -> None:
        seconds = self.pricer.collective(kind, axis, num_bytes, shared)
        self.comm_s += seconds * times
        self.sent[axis, kind] += times
        self.bytes[axis, kind] += round(num_bytes) * times
        move = PlannedMove(axis, kind, round(num_bytes), times, rounded(seconds), of)
        self.planned[op].append(move)

    def pack(self, value: Value, target: Layout, times: int, op: str, of: str) -> None:
        """Count what is copied of a parameter or a gradient on the way to a layout."""
        spec = self.step.specs[value]
        shape = alike(spec.shape, self.cluster.num_devices)
        copied = copied_fractions(self.layout(value), target, shape, self.mesh)
        seconds = packing_seconds(copied, spec, self.cluster) * times
        if seconds:
            self.packed[op] = self.packed[op].plus(seconds, is_once(of))

    def communicate(self) -> None:
        for op in self.step.ops.values():
            candidate = self.decision.candidates[op.name]
            for value, layout in zip(op.operands, candidate.inputs, strict=True):
                times = self.blocks.edge_weight(value[0], op.name)
                bucket = self.step.bucket(value, op.name)
                hides = self.step.may_hide(value, op.name) and not self.step.is_given(value)
                label = self.step.label(value[0])
                self.add_moves(value, layout, times, op.name, label, bucket, hides)
            for comm in candidate.comm:
                times = self.blocks.weight(op.name)
                self.add(comm.kind, comm.axis, comm.num_bytes, times, op.name, "")
        last = next(reversed(self.step.ops), "")
        own = {f"gradient of {self.step.parameters[name].target}" for name in self.step.gradients}
        for value, target, times, of in self.ends():
            bucket = self.step.reductions if of in own else ALONE
            op_name = value[0] if value[0] in self.step.ops else last
            hides = of in own or (of == "result" and bool(self.step.gradients))
            self.add_moves(value, target, times, op_name, of, bucket, hides)

    def ends(self) -> Iterator[tuple[Value, Layout, int, str]]:
        """Values that leave the step, their layout, how often, and what they are."""
        for value in self.step.required:
            yield value, self.whole, self.blocks.weight(value[0]), "result"
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
        """Compute of one execution of an op, with what moves break of its fused kernel.

        Of a copy with host memory, what compute waits for.
        """
        if op.name not in self._seconds:
            candidate = self.decision.candidates[op.name]
            share = self.step.shares.get(op.name)
            sources = (
                ()
                if share is None
                else tuple(
                    None if value[0] in self.step.inputs else self.layout(value)
                    for value in op.operands
                )
            )
            seconds = self.offers.seconds(op.call, candidate, share, sources)
            self._seconds[op.name] = max(0.0, seconds - self.step.beside.get(op.name, 0.0))
        return self._seconds[op.name]

    def compute(self) -> float:
        ops = (op for op in self.step.ops.values() if op.call.target not in WITH_HOST)
        return sum(self.seconds(op) * self.blocks.weight(op.name) for op in ops) + self.packing()

    def packing(self) -> float:
        """Copies on the way of parameters and gradients."""
        return sum(packed.total_s for packed in self.packed.values())

    def copies(self) -> HostCopies:
        """Copies of activations to host memory and back."""
        exposed_s = total_s = 0.0
        held = 0
        for op in self.step.ops.values():
            if op.call.target in WITH_HOST:
                candidate, times = self.decision.candidates[op.name], self.blocks.weight(op.name)
                exposed_s += self.seconds(op) * times
                total_s += self.offers.seconds(op.call, candidate) * times
                if is_away(op.call.target):
                    size = self.local_bytes((op.name, 0), candidate.outputs[0])
                    held += size * self.blocks.copies(op.name)
        return HostCopies(total_s, exposed_s, held * self.flight.microbatches)


def price(
    step: Step,
    cluster: Cluster,
    decision: Decision,
    optimizer: object,
    offers: Offers | None = None,
) -> Price:
    """Price a decision op by op.

    Args:
        step, cluster: that it was made for.
        decision: the choices.
        optimizer: whose states count in memory.
        offers: what is known of ops on this cluster.
    """
    pricing = Pricing(step, cluster, decision, offers)
    pricing.communicate()
    comm = tuple(
        CommBytes(axis=axis, kind=kind, num_bytes=pricing.bytes[axis, kind], count=count)
        for (axis, kind), count in sorted(pricing.sent.items())
    )
    phases = _phases(pricing) if step.in_turns else {}
    update_s, offload_s, host_bytes = _update(pricing, optimizer)
    copies = pricing.copies()
    return Price(
        compute_s=pricing.compute(),
        comm_s=pricing.comm_s,
        comm_bytes=comm,
        pricing=pricing,
        footprint=Footprint(pricing, optimizer),
        phases=phases,
        update_s=update_s,
        offload_s=offload_s,
        host_bytes=host_bytes + copies.num_bytes,
        copies=copies,
        hideable_s=pricing.hideable_s,
        packing_s=pricing.packing(),
    )


def _phases(pricing: Pricing) -> dict[str, float]:
    """Seconds of each part of a step in microbatches, one microbatch's where it runs at each."""
    step, blocks = pricing.step, pricing.blocks
    seconds = dict.fromkeys(("prepare", "forward", "input", "weight", "finish"), 0.0)
    parts = parts_of_turns(step)
    runs = blocks.traced.microbatches
    for name, op in step.ops.items():
        phase = parts[name]
        often = 1 if phase == "prepare" else runs
        seconds[phase] += pricing.seconds(op) * blocks.weight(name) / often
        packed = pricing.packed.get(name, Packing())
        seconds[phase] += packed.at_turns_s / often
        seconds[phase if phase == "prepare" else "finish"] += packed.once_s
        for move in pricing.planned.get(name, ()):
            if move.once and phase != "prepare":
                seconds["finish"] += move.seconds * move.times
            else:
                seconds[phase] += move.seconds * move.times / often
    return seconds


def _update(pricing: Pricing, optimizer: object) -> tuple[float, float, int]:
    """Seconds of the update, those that the host adds, and bytes of states on the host."""
    update_s, offload_s, num_bytes = 0.0, 0.0, 0
    for name in pricing.step.gradients:
        spec = pricing.step.parameters[name]
        share = pricing.local_bytes((name, 0), pricing.decision.storages[name])
        times = pricing.blocks.copies(name)
        given = (pricing.cluster.device, optimizer, share, spec.dtype)
        update_s += update_seconds(*given) * times
        offload_s += offload_seconds(*given) * times
        num_bytes += host_state_bytes(optimizer, share, spec.dtype) * times
    return update_s, offload_s, num_bytes
