"""Bytes that are live while one op runs, as a linear function of the states chosen.

    row_p(x) = constant + Σ_i bytes_i[x_i] + Σ_(i,j) bytes_ij[x_i, x_j]

Node terms are storage, states and buffers born by then and still needed; edge terms are copies
that a redistribution makes. A buffer counts until the last use of anything that shows it, so a row
is never below what `price` finds at that op, but for what some cut kernels keep (`kernels.py`).
Of a step in microbatches, the first one makes the sums of gradients, and others wait meanwhile that
later ones do not find: there are rows of each (`footprint`).

Bytes in host memory are a row too, `HOST_ROW`, linear in the same choices. It is scaled such that
the host's limit is the device's, so that whoever keeps rows below the limit keeps both.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from autopar.core.flights import ALL, INPUT, Others
from autopar.core.placement import shard_factor
from autopar.core.strategy import TensorSpec
from autopar.core.work import is_away
from autopar.cost_model import host_state_bytes, optimizer_state_bytes
from autopar.solver.buffer_sizes import BufferSizes
from autopar.solver.build import StepProblem
from autopar.solver.candidates import has_scratch, scratch_bytes
from autopar.solver.discrete.problem import Array, Row
from autopar.solver.fetched import Ahead, fetched_ahead
from autopar.solver.input_layouts import input_bytes
from autopar.solver.kernels import KernelRows
from autopar.solver.order import (
    FoldedSpan,
    folded_spans,
    leaving,
    ordered,
    part_starts,
    sums_of_turns,
    turning_sends,
)
from autopar.solver.row_at import HOST_ROW, RowAt
from autopar.solver.step import Op, Step, Value

__all__ = ["Liveness"]


class Liveness:
    """Makes the row of any op of a step.

    Args:
        step: the ops in order.
        built: the states of each class.
        optimizer: whose states count with a parameter.
        granularity_bytes: buffers are rounded up to it.
        host_scale: what a byte of host memory counts; 0 where there is no limit to that.
    """

    def __init__(
        self,
        step: Step,
        built: StepProblem,
        optimizer: object,
        granularity_bytes: int,
        host_scale: float = 0.0,
    ) -> None:
        self.step = step
        self.built = built
        self.optimizer = optimizer
        self.sizes = BufferSizes(built.moves, granularity_bytes)
        self.host_scale = host_scale
        self.mesh = built.moves.cluster.mesh_shape
        self.order = ordered(step)
        self.position = {op.name: p for p, op in enumerate(self.order)}
        self.ends: dict[Value, int] = {}  # last op that reads it, or anything that shows it
        self.direct: dict[Value, int] = {}  # or that reads it itself
        self._read_ends()
        self.inside = KernelRows(step, built, self.order)
        self.views: dict[Value, list[Op]] = defaultdict(list)  # that show a value
        for op in self.order:
            if op.view:
                self.views[op.operands[0]].append(op)
        # between microbatches, gradients are added to sums that live throughout
        kept = {} if step.in_turns else step.gradients
        self.kept = set(kept.values())
        self.born: dict[str, list[str]] = defaultdict(list)
        for name, value in kept.items():
            self.born[value[0]].append(name)
        self.spans = folded_spans(step, self.order)
        self.ahead = fetched_ahead(step, self.order)
        self.batch = input_bytes(step, built, self.mesh)
        self.residents = self._residents()
        self.sums = self._sums()
        self._others: dict[tuple[int, int], Row] = {}

    def _read_ends(self) -> None:
        """Last reads of all values."""
        ops = self.step.ops
        end = len(self.order)
        hoisted = self.step.is_hoisted
        reads = [
            (value, end if hoisted(value[0]) and not hoisted(op.name) else p)
            for p, op in enumerate(self.order)
            for value in self.step.held(op)
        ]
        reads += [(value, end) for value in self.step.results]
        if self.step.in_turns:
            reads += leaving(self.step, self.order)
        for value, position in reads:
            self.direct[value] = max(self.direct.get(value, -1), position)
            while True:
                self.ends[value] = max(self.ends.get(value, -1), position)
                if value[0] not in ops or not ops[value[0]].view:
                    break
                value = ops[value[0]].operands[0]

    def _residents(self) -> Row:
        row = Row()
        for name, spec in self.step.parameters.items():
            owner = self.built.classes[name]
            layouts = self.built.storages[owner]
            whole = TensorSpec(spec.shape, spec.dtype)
            share = np.array([whole.num_bytes / shard_factor(x, self.mesh) for x in layouts])
            total = share.copy()
            if name in self.step.gradients:
                total += [
                    optimizer_state_bytes(self.optimizer, int(b) // spec.dtype.itemsize, spec.dtype)
                    for b in share
                ]
            row.add(owner, total * self.step.blocks.copies(name))
        if self.step.in_turns:
            self._between_turns(row)
        return row

    def _sums(self) -> list[tuple[int, str, Array]]:
        """Sums of gradients: the position of the op that makes them, its class, and the bytes."""
        step, sums = self.step, sums_of_turns(self.step)
        values = (*step.gradients.values(), *(s.value for s in step.sends))
        found: list[tuple[int, str, Array]] = []
        for value in dict.fromkeys(values):
            if value[0] in sums and value[0] in step.ops:
                owner = self.built.classes[value[0]]
                layouts = [c.outputs[value[1]] for c in self.built.candidates[owner]]
                sizes = self.sizes.of(step.specs[value], layouts) * step.blocks.copies(value[0])
                found.append((self.position[value[0]], owner, sizes))
        return found

    def _between_turns(self, row: Row) -> None:
        """What goes between stages, and hoisted values of folded blocks."""
        step, blocks = self.step, self.step.blocks
        for name, spec in step.ports.items():
            if (name, 0) in step.specs:
                row.add(name, self.sizes.of(spec, self.built.storages[name]))
        first, backward, _ = part_starts(step, self.order)
        for op in self.order[:first]:
            if blocks.copies(op.name) > 1:
                self._held_by_others(row, op, blocks.copies(op.name) - 1, backward)

    def _of_others(self, part: int, sums: int) -> Row:
        """What is held of other microbatches while a part of one runs that found some sums."""
        if (part, sums) not in self._others:
            self._others[part, sums] = self._held_of_others(part, sums)
        return self._others[part, sums]

    def _held_of_others(self, part: int, sums: int) -> Row:
        row, step = Row(), self.step
        if not step.in_turns or part not in range(3):
            return row  # hoisted ops run, or all is done
        # weight gradients find the sums of input gradients
        begun = max(sums, INPUT) if part == 2 else sums
        flight = step.blocks.traced.flight.rows[begun][part] or Others()
        for send, is_late in turning_sends(step):
            number = flight.down if is_late else flight.up
            if number:
                layouts = self.built.storages[send.port]
                row.add(send.port, number * self.sizes.of(step.ports[send.port], layouts))
        for name, spec in step.ports.items():
            if (name, 0) in step.specs and not step.is_hoisted(name):
                is_late = step.blocks.traced.info[name].phase == "backward"
                number = flight.delayed + (0 if is_late else flight.waiting)
                if number:
                    row.add(name, number * self.sizes.of(spec, self.built.storages[name]))
        first, backward, weight = part_starts(step, self.order)
        for times, cut in ((flight.waiting, backward), (flight.delayed, weight)):
            for op in self.order[first:cut] if times else ():
                self._held_by_others(row, op, times * step.blocks.copies(op.name), cut)
        return row

    def _held_by_others(self, row: Row, op: Op, times: int, cut: int) -> None:
        """What an op's other runs keep for the ops from a position on."""
        if is_away(op.call.target):
            return
        if op.view:
            if self._shown_until(op) >= cut:
                self._copies(row, op, times)
            return
        for index, spec in enumerate(op.call.outputs):
            if self.ends.get((op.name, index), -1) < cut:
                self.inside.add(row, (op.name, index), times, cut)
                continue
            owner = self.built.classes[op.name]
            layouts = [c.outputs[index] for c in self.built.candidates[owner]]
            row.add(owner, times * self.sizes.of(spec, layouts))
            self._let_go(row, (op.name, index), times, cut)

    def _shown_until(self, op: Op) -> int:
        """Last op that reads what an op yields or shows, or may."""
        ends = (self.ends.get((op.name, i), -1) for i in range(len(op.call.outputs)))
        return max(*ends, self.inside.last_read(op))

    def _let_go(self, row: Row, value: Value, times: int, position: int) -> None:
        """Less of a value that is only shown, by a view that has a redistributed copy of it."""
        if self.direct.get(value, -1) >= position:
            return
        showing = [view for view in self.views[value] if self._shown_until(view) >= position]
        sources = self.built.produced(value)
        if len(showing) != 1 or sources is None:
            return
        spec, owner = self.step.specs[value], self.built.classes[value[0]]
        viewer = self.built.classes[showing[0].name]
        wanted = [c.inputs[0] for c in self.built.candidates[viewer]]
        moved = self.sizes.moved(sources, wanted, spec)
        if moved.any():
            sizes = np.where(moved, self.sizes.of(spec, sources)[:, None], 0.0)
            row.add_pair(owner, viewer, -times * sizes)

    def row(self, at: RowAt) -> Row:
        """Live bytes at a moment; that of `HOST_ROW` is the scaled bytes in host memory."""
        if at == HOST_ROW:
            return self._on_host()
        row, position = Row(), at.position
        row.add_row(self.batch)
        row.add_row(self.residents)
        weight = part_starts(self.step, self.order)[2]
        for made, owner, sizes in self.sums:
            if at.sums == ALL or (at.sums == INPUT and made < weight) or made <= position:
                row.add(owner, sizes)
        row.add_row(self._of_others(self._part(position), at.sums))
        for born, op in enumerate(self.order[: position + 1]):
            view = op.view
            if not view:
                self._outputs(row, op, born, position)
            if born == position or (view and self._shown_until(op) >= position):
                self._copies(row, op, just=born == position)
            for name in self.born[op.name]:
                self._gradient(row, name, just=born == position)
        for fetched in self.ahead:
            if fetched.first <= position <= fetched.last:
                self._add_ahead(row, fetched)
        for span in self.spans:
            self._instances(row, span, position)
        if self.step.in_turns and position >= len(self.order):
            self._finishing(row, position - len(self.order))
        return row

    def throughout(self) -> Row:
        """What is live while any microbatch runs: states, sums of gradients, hoisted values.

        Without the batch, and what only one microbatch holds.
        """
        row = Row(0.0, dict(self.residents.nodes), dict(self.residents.edges))
        for _, owner, sizes in self.sums:
            row.add(owner, sizes)
        for born, op in enumerate(self.order):
            if not self.step.is_hoisted(op.name):
                continue
            if not op.view:
                self._outputs(row, op, born, len(self.order))
            elif self._shown_until(op) >= len(self.order):
                self._copies(row, op)
        return row

    def saved(self) -> Row:
        """What a microbatch leaves for its backward."""
        row = Row()
        first, backward, _ = part_starts(self.step, self.order)
        for op in self.order[first:backward]:
            self._held_by_others(row, op, self.step.blocks.copies(op.name), backward)
        return row

    def _on_host(self) -> Row:
        """States of an offloaded optimizer, and activations of all microbatches that wait."""
        row, step, scale = Row(), self.step, self.host_scale
        for name in step.gradients:
            spec, owner = step.parameters[name], self.built.classes[name]
            whole = TensorSpec(spec.shape, spec.dtype).num_bytes
            shares = [whole // shard_factor(x, self.mesh) for x in self.built.storages[owner]]
            states = [host_state_bytes(self.optimizer, share, spec.dtype) for share in shares]
            row.add(owner, scale * step.blocks.copies(name) * np.array(states, dtype=float))
        turns = step.blocks.traced.flight.microbatches
        for op in step.ops.values():
            if is_away(op.call.target):
                owner, size = self.built.classes[op.name], op.call.outputs[0].num_bytes
                outputs = [c.outputs[0] for c in self.built.candidates[owner]]
                held = np.array([size // shard_factor(x, self.mesh) for x in outputs], dtype=float)
                row.add(owner, scale * turns * step.blocks.copies(op.name) * held)
        return row

    def _finishing(self, row: Row, turn: int) -> None:
        """The gradient that is reduced, and those before it where they take more than their sums.

        Sums go when they have been reduced; see `Schedule`.
        """
        for index, (name, value) in enumerate(self.step.gradients.items()):
            sources = self.built.produced(value)
            if index > turn or sources is None:
                continue
            spec = self.step.parameters[name]
            whole = TensorSpec(spec.shape, spec.dtype)
            owner, copies = self.built.classes[name], self.step.blocks.copies(name)
            storages = self.built.storages[owner]
            share = self.sizes.of(whole, storages)[None, :]
            sizes = copies * np.maximum(share - self.sizes.of(whole, sources)[:, None], 0.0)
            if index == turn:
                sizes = sizes + share + self.sizes.packed(sources, storages, whole)
            sizes = np.where(self.sizes.moved(sources, storages, whole), sizes, 0.0)
            row.add_pair(self.built.classes[value[0]], owner, sizes)

    def _part(self, position: int) -> int:
        """Part of a microbatch that an op runs in; -1: in front of it, 3: behind all."""
        starts = (*part_starts(self.step, self.order), len(self.order))
        return sum(position >= start for start in starts) - 1

    def _instances(self, row: Row, span: FoldedSpan, position: int) -> None:
        """What the instances that are not in the graph keep; see `footprint`."""
        if span.first <= position <= span.last:
            for name in span.saved:
                self._held_by_others(row, self.step.ops[name], span.times - 1, span.backward)
        if span.middle < position <= span.last:
            for name in span.inputs:
                self._held_by_others(row, self.step.ops[name], span.times - 1, span.weight)
        if position > span.last and not self.step.in_turns:
            for name in span.saved:
                if self._shown_until(self.step.ops[name]) >= len(self.order):
                    self._held_by_others(row, self.step.ops[name], span.times - 1, len(self.order))
            for name in span.parameters:
                if name in self.step.gradients:
                    owner = self.built.classes[name]
                    given = self.step.parameters[name]
                    whole = TensorSpec(given.shape, given.dtype)
                    sizes = self.sizes.of(whole, self.built.storages[owner])
                    row.add(owner, (span.times - 1) * sizes)

    def _add_ahead(self, row: Row, fetched: Ahead) -> None:
        """What comes from host memory before the block runs that reads it."""
        for name in fetched.copies:
            owner = self.built.classes[name]
            outputs = [c.outputs[0] for c in self.built.candidates[owner]]
            row.add(owner, self.sizes.of(self.step.specs[name, 0], outputs))

    def _outputs(self, row: Row, op: Op, born: int, position: int) -> None:
        if is_away(op.call.target):
            return
        owner = self.built.classes[op.name]
        candidates = self.built.candidates[owner]
        if position == born and has_scratch(op.call, candidates):
            row.add(owner, scratch_bytes(op.call, candidates, self.mesh))
        for index, spec in enumerate(op.call.outputs):
            value = (op.name, index)
            if value not in self.ends and value in self.kept:
                continue  # it becomes the gradient
            end = self.ends.get(value, -1)
            written = position == born and self.step.is_written(value)
            if end < position and not written:
                self.inside.add(row, value, 1, position)
            else:
                row.add(owner, self.sizes.of(spec, [c.outputs[index] for c in candidates]))
                if position > born:
                    self._let_go(row, value, 1, position)

    def _copies(self, row: Row, op: Op, times: int = 1, just: bool = False) -> None:
        """Operands that arrive by a collective have buffers of their own."""
        consumer = self.built.classes[op.name]
        targets = self.built.candidates[consumer]
        for index, value in enumerate(op.operands):
            sources = self.built.produced(value)
            if sources is None:
                continue
            wanted = [c.inputs[index] for c in targets]
            spec = self.step.specs[value]
            sizes = np.where(
                self.sizes.moved(sources, wanted, spec), self.sizes.of(spec, wanted), 0.0
            )
            if just:
                sizes = sizes + self.sizes.packed(sources, wanted, spec)
            if sizes.any():
                row.add_pair(self.built.classes[value[0]], consumer, sizes * times)

    def _gradient(self, row: Row, name: str, just: bool) -> None:
        """A gradient in its storage layout, and what it was reduced from while that happens."""
        spec = self.step.parameters[name]
        owner = self.built.classes[name]
        storages = self.built.storages[owner]
        whole = TensorSpec(spec.shape, spec.dtype)
        row.add(owner, self.sizes.of(whole, storages))
        value = self.step.gradients[name]
        sources = self.built.produced(value)
        if not just or sources is None or value in self.ends:
            return
        moved = self.sizes.moved(sources, storages, whole)
        sizes = np.where(moved, self.sizes.of(whole, sources)[:, None], 0.0)
        sizes = sizes + self.sizes.packed(sources, storages, whole)
        row.add_pair(self.built.classes[value[0]], owner, sizes)
