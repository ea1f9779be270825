"""Buffers of the local program of a decided plan: who creates them, how large, who reads them last.

What is here holds for any microbatch of a step; which sums of gradients one finds, and what is held
of others meanwhile, `footprint` adds.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from autopar.core.placement import Layout, shard_factor
from autopar.core.redistribute import packing_fraction
from autopar.core.work import is_away, lays_out_contiguously
from autopar.cost_model import ScheduledOp
from autopar.solver.candidates import has_scratch, scratch_bytes
from autopar.solver.fetched import fetched_ahead
from autopar.solver.kernels import PlannedKernels
from autopar.solver.order import (
    leaving,
    ordered,
    part_starts,
    turning_sends,
)
from autopar.solver.step import Op, Send, Value
from autopar.solver.twins import Twins, twins_of

if TYPE_CHECKING:
    from autopar.solver.price import Pricing

__all__ = ["Buffers"]

Sizes = list[tuple[str, int]]


class _Operand(NamedTuple):
    """An operand as it arrives.

    Attributes:
        moved: by a collective, hence as a buffer of its own.
        num_bytes: of that buffer.
        packing: bytes of the largest buffer that it is packed into on its way.
    """

    moved: bool
    num_bytes: int
    packing: int


class Buffers:
    """What each op of a decided plan creates, copies and packs, and what is read until when.

    Args:
        pricing: of the plan.
    """

    def __init__(self, pricing: Pricing) -> None:
        self.pricing = pricing
        self.step = pricing.step
        self.order = ordered(self.step)
        self.first, self.backward, self.weight = part_starts(self.step, self.order)
        self.kinds: dict[str, str] = {}
        self.operands = {op.name: self._operands(op) for op in self.order}
        self.kernels = PlannedKernels(pricing)
        self.last_use = self._last_use()
        self.gradients: dict[str, list[str]] = defaultdict(list)
        self.lasting: set[Value] = set()
        # between microbatches, gradients are added to sums, which are reduced at the end
        kept = {} if self.step.in_turns else self.step.gradients
        for name, value in kept.items():
            self.gradients[value[0]].append(name)
            if self._stays(name, value):
                self.lasting.add(self.base(value))
        self.created = {op.name: self._created(op) for op in self.order}
        self._kept: dict[int, dict[str, int]] = {}

    # --- parts of a microbatch -----------------------------------------------------------------
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

    # --- operands and last uses ----------------------------------------------------------------
    def _operands(self, op: Op) -> list[_Operand]:
        found: list[_Operand] = []
        wanted = self.pricing.decision.candidates[op.name].inputs
        for value, layout in zip(op.operands, wanted, strict=True):
            moves = self.pricing.moves(value, layout)
            if any(m.kind != "slice" for m in moves):
                size = self.pricing.local_bytes(value, layout)
                packing = round(self.step.specs[value].num_bytes * packing_fraction(moves))
                found.append(_Operand(True, size, packing))
            else:
                found.append(_Operand(False, 0, 0))
        return found

    def base(self, value: Value) -> Value:
        """The value whose memory this one shows: views of a redistributed copy show that copy."""
        name, _ = value
        ops = self.step.ops
        while name in ops and ops[name].view:
            if self.operands[name][0].moved:
                return name, 0
            value = ops[name].operands[0]
            name, _ = value
        return value

    def _last_use(self) -> dict[Value, int]:
        """Last op that reads each buffer; a redistributed operand reads its source too."""
        last: dict[Value, int] = {}
        hoisted = self.step.is_hoisted
        for position, op in enumerate(self.order):
            for value in self.kernels.reads(op):
                base = self.base(value)
                last[base] = max(last.get(base, -1), position)
                if hoisted(base[0]) and not hoisted(op.name):
                    last[base] = len(self.order)  # every microbatch reads it
        for value in self.step.results:
            last[self.base(value)] = len(self.order)
        if self.step.in_turns:
            for value, position in leaving(self.step, self.order):
                base = self.base(value)
                last[base] = max(last.get(base, -1), position)
        return last

    def is_read_from(self, cut: int, buffer: str) -> bool:
        """True if an op at a position or behind it reads a buffer."""
        name, _, index = buffer.rpartition(".")
        return self.last_use.get((name, int(index)), -1) >= cut

    # --- what ops create -----------------------------------------------------------------------
    @staticmethod
    def id(value: Value) -> str:
        """Name of the buffer of a value."""
        return f"{value[0]}.{value[1]}"

    def rounded(self, num_bytes: int) -> int:
        """Bytes as the allocator gives them."""
        unit = self.pricing.cluster.device.allocation_granularity_bytes
        return -(-num_bytes // unit) * unit

    def share(self, name: str) -> int:
        """A rank's bytes of a parameter, hence of its gradient."""
        return self.pricing.local_bytes((name, 0), self.pricing.decision.storages[name])

    def _created(self, op: Op) -> tuple[Sizes, list[str]]:
        """Buffers that an op creates, and those of them that nobody reads."""
        alloc: Sizes = []
        unread: list[str] = []
        candidate = self.pricing.decision.candidates[op.name]
        if op.view:
            value = (op.name, 0)
            kept = value in self.lasting
            if self.base(value) == value and (kept or value in self.last_use):
                copy = self.pricing.local_bytes(op.operands[0], candidate.inputs[0])
                alloc.append((self.id(value), copy))
                self.kinds[self.id(value)] = "gradients" if kept else "gathered"
            return alloc, unread
        for index in range(len(op.call.outputs)):
            value = (op.name, index)
            size = self.pricing.local_bytes(value, candidate.outputs[index])
            inside = value not in self.last_use and not self.step.is_written(value)
            size = 0 if is_away(op.call.target) or inside else size
            alloc.append((self.id(value), size))
            self.kinds[self.id(value)] = "activations" if not op.backward else "backward"
            if value in self.lasting:
                self.kinds[self.id(value)] = "gradients"
            elif value not in self.last_use:
                unread.append(self.id(value))
        return alloc, unread

    def _stays(self, name: str, value: Value) -> bool:
        """True if a gradient is left where its op has put it, or is reduced there."""
        moves = self.pricing.moves(value, self.pricing.decision.storages[name])
        if any(m.kind != "all_reduce" for m in moves):
            return False
        op = self.step.ops.get(value[0])
        if not moves or op is None or value in self.last_use:
            return not moves
        alone = sum(self.base(v) == value for v in self.step.gradients.values()) == 1
        return alone and self._is_contiguous(value)

    def _is_contiguous(self, value: Value) -> bool:
        """True if a value is known to be contiguous, by the ops that it is made by."""
        stack, seen = [value], {value}
        while stack:
            here = stack.pop()
            if sum(size > 1 for size in self.step.specs[here].shape) <= 1:
                continue
            op = self.step.ops.get(here[0])
            known = False if op is None else lays_out_contiguously(op.call.target, op.call.args)
            if known is False:
                return False
            fresh = [v for v in op.operands if v not in seen] if op and known is None else []
            stack += fresh
            seen.update(fresh)
        return True

    def _reduced_gradients(self, op: Op) -> Sizes:
        """Gradients that an op completes and that a redistribution turns into new buffers."""
        kept: Sizes = []
        for name in self.gradients[op.name]:
            if self.base(self.step.gradients[name]) in self.lasting:
                continue
            buffer = f"grad.{name}"
            kept.append((buffer, self.share(name)))
            self.kinds[buffer] = "gradients"
        return kept

    def _packed_gradients(self, op: Op) -> int:
        """What a gradient is packed into while it is reduced to its storage layout."""
        return max((self.reduction(name)[1] for name in self.gradients[op.name]), default=0)

    def reduction(self, name: str) -> tuple[int, int, int]:
        """Bytes of a gradient, of what it is packed into, and of what it is reduced from.

        All are 0 where it is left as it arises.
        """
        value = self.step.gradients[name]
        moves = self.pricing.moves(value, self.pricing.decision.storages[name])
        if not moves:
            return 0, 0, 0
        packed = round(self.step.specs[value].num_bytes * packing_fraction(moves))
        return self.share(name), packed, self.pricing.local_bytes(value, self.pricing.layout(value))

    def _arriving(self, op: Op) -> int:
        """Redistributed operands, and the largest buffer that one of them is packed into."""
        operands = self.operands[op.name]
        packing = max((o.packing for o in operands), default=0)
        return sum(o.num_bytes for o in operands) + packing if packing else 0

    def _copies(self, op: Op) -> int:
        """Redistributed operands, which live while the op runs; of a view, a buffer."""
        return 0 if op.view else sum(o.num_bytes for o in self.operands[op.name])

    def _transient(self, op: Op) -> int:
        """What is there while an op runs: copies, and what its lowering needs."""
        chosen, found = self.pricing.decision.candidates[op.name], self._copies(op)
        if has_scratch(op.call, [chosen]):
            found += round(float(scratch_bytes(op.call, [chosen], self.pricing.mesh)[0]))
        return found + self._packed_gradients(op)

    @cached_property
    def ops(self) -> tuple[ScheduledOp, ...]:
        """What each op allocates and frees, without sums of gradients."""
        ending = defaultdict(list)
        arriving = {p: self.received(p) for p in {self.first, self.backward}}
        received = {buffer for found in arriving.values() for buffer, _ in found}
        ahead: dict[str, Sizes] = defaultdict(list)
        for fetched in fetched_ahead(self.step, self.order):
            begin, buffer = self.order[fetched.first].name, f"ahead of {fetched.copies[0]}"
            ahead[begin].append((buffer, self._size_of(fetched.copies)))
            self.kinds[buffer] = "backward"
            ending[fetched.last].append(buffer)
        for value, position in self.last_use.items():
            is_ours = value[0] in self.step.ops or self.id(value) in received
            if is_ours and value not in self.lasting:
                if self.step.is_hoisted(value[0]):  # nothing reads it when gradients are reduced
                    position = min(position, len(self.order) - 1)
                ending[position].append(self.id(value))
        read = {self.id(value) for value in self.last_use}
        schedule: list[ScheduledOp] = []
        for position, op in enumerate(self.order):
            alloc, unread = self.created[op.name]
            given = arriving.get(position, [])
            unread = [*unread, *(b for b, _ in given if b not in read)]
            schedule.append(
                ScheduledOp(
                    name=op.name,
                    alloc=(
                        *given,
                        *alloc,
                        *ahead[op.name],
                        *self._reduced_gradients(op),
                    ),
                    free=tuple(dict.fromkeys((*ending[position], *unread))),
                    transient_bytes=self._transient(op),
                    arriving_bytes=self._arriving(op),
                )
            )
        return tuple(schedule)

    def _size_of(self, names: Sequence[str]) -> int:
        """Bytes of the first outputs of some ops."""
        values = [(name, 0) for name in names]
        return sum(self.pricing.local_bytes(v, self.pricing.layout(v)) for v in values)

    @cached_property
    def twins(self) -> tuple[Twins, ...]:
        """What the other instances of each folded span keep while the one in the graph runs."""
        return twins_of(self)

    # --- what goes between stages, and between microbatches ------------------------------------
    def received(self, position: int) -> Sizes:
        """What another stage has sent for the forward or the backward that begins at an op."""
        found: Sizes = []
        for name, spec in self.step.ports.items():
            if (name, 0) not in self.step.specs or self.step.is_hoisted(name):
                continue
            backward = self.step.blocks.traced.info[name].phase == "backward"
            if position == (self.backward if backward else self.first):
                factor = shard_factor(self.pricing.decision.storages[name], self.pricing.mesh)
                found.append((self.id((name, 0)), spec.num_bytes // factor))
                self.kinds[found[-1][0]] = "received"
        return found

    @cached_property
    def sums(self) -> dict[str, Sizes]:
        """Sums of gradients, by the op that makes a contribution to them."""
        found: dict[str, Sizes] = defaultdict(list)
        if self.step.in_turns:
            values = [*self.step.gradients.values(), *(s.value for s in self.step.sends)]
            for value in dict.fromkeys(v for v in values if v[0] in self.pricing.sums):
                share = self.pricing.local_bytes(value, self.pricing.layout(value))
                copies = self.step.blocks.copies(value[0])
                found[value[0]].append((f"sum of {self.id(value)}", share * copies))
        return found

    @cached_property
    def sums_bytes(self) -> tuple[int, int]:
        """Bytes of the sums that the backward makes, and of those of weight gradients behind it."""
        late = {op.name for op in self.order[self.weight :]}
        total = [0, 0]
        for name, sums in self.sums.items():
            total[name in late] += sum(num_bytes for _, num_bytes in sums)
        return total[0], total[1]

    def kept_for(self, part: int) -> dict[str, int]:
        """What a microbatch keeps for a part and later ones when the part before has run."""
        if part not in self._kept:
            self._kept[part] = self._kept_for(part)
        return self._kept[part]

    def _kept_for(self, part: int) -> dict[str, int]:
        held: Counter[str] = Counter()
        cut = self.parts[part][0]
        for op in self.order[self.first : cut]:
            for buffer, num_bytes in self.created[op.name][0]:
                if self.is_read_from(cut, buffer):
                    copies = self.step.blocks.copies(op.name)
                    held[self.kinds[buffer]] += copies * self.rounded(num_bytes)
        for position in {self.first, self.parts[part - 1][0]}:
            for buffer, num_bytes in self.received(position):
                if self.is_read_from(cut, buffer):
                    held["received"] += self.rounded(num_bytes)
        return dict(held)

    def hoisted_of_others(self) -> dict[str, int]:
        """Hoisted values of folded blocks, and what other stages have sent once."""
        held: Counter[str] = Counter()
        for op in self.order[: self.first]:
            others = self.step.blocks.copies(op.name) - 1
            for buffer, num_bytes in self.created[op.name][0] if others else ():
                if self.is_read_from(self.backward, buffer):
                    held["gathered"] += others * self.rounded(num_bytes)
        for name, spec in self.step.ports.items():
            if (name, 0) in self.step.specs and self.step.is_hoisted(name):
                factor = shard_factor(self.pricing.decision.storages[name], self.pricing.mesh)
                held["received"] += self.rounded(spec.num_bytes // factor)
        held["sent"] += self._sent_once()
        return {kind: num_bytes for kind, num_bytes in held.items() if num_bytes}

    def _sent_once(self) -> int:
        """What is sent in front of the turns, and held until they are over for that alone."""
        made = {b for op in self.order[: self.first] for b, _ in self.created[op.name][0]}
        total = 0
        for send in self.step.sends:
            if send.value[0] not in self.step.ops or not self.step.is_hoisted(send.value[0]):
                continue
            base = self.id(self.base(send.value))
            kept = base not in made or self.is_read_from(self.first, base)
            if not kept or self.pricing.moves(send.value, self._port(send)):
                total += self.rounded(self.pricing.local_bytes(send.value, self._port(send)))
        return total

    def hoisted_bytes(self) -> dict[str, int]:
        """What is computed before the microbatches and read by them, once for folded blocks."""
        held: Counter[str] = Counter()
        for op in self.order[: self.first]:
            for buffer, num_bytes in self.created[op.name][0]:
                if self.is_read_from(self.first, buffer):
                    held[self.kinds[buffer]] += self.rounded(num_bytes)
        return dict(held)

    def stored_bytes(self) -> int:
        """Gradients as they are left, and sums that went to other stages."""
        total = sum(self.share(n) * self.step.blocks.copies(n) for n in self.step.gradients)
        mine = {self.id(value) for value in self.step.gradients.values()}
        made = (m for sums in self.sums.values() for m in sums)
        return total + sum(n for name, n in made if name.removeprefix("sum of ") not in mine)

    @cached_property
    def sent_bytes(self) -> tuple[int, int]:
        """What a microbatch sends up and down that is not kept anyway."""
        total = [0, 0]
        for send, backward in turning_sends(self.step):
            kept = not backward and self.last_use.get(self.base(send.value), -1) >= self.backward
            if not (kept and not self.pricing.moves(send.value, self._port(send))):
                share = self.pricing.local_bytes(send.value, self._port(send))
                total[backward] += self.rounded(share)
        return total[0], total[1]

    def _port(self, send: Send) -> Layout:
        return self.pricing.decision.storages[send.port]
