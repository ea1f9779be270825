"""Builds the `ChoiceProblem` of a step: candidates as states, redistributions as edges.

Nodes of one class (`blocks`) are one node of the problem; costs and edges count once per member.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import fx

from autopar.core.host import FROM_HOST, WITH_HOST
from autopar.core.placement import Layout, Placement, Replicate, Shard, is_valid, shard_factor
from autopar.core.strategy import TensorSpec
from autopar.cost_model import Cluster, offload_seconds, optimizer_state_bytes, update_seconds
from autopar.errors import ConstraintError
from autopar.solver.candidates import Candidate
from autopar.solver.discrete.problem import Array, ChoiceProblem
from autopar.solver.layouts import split_inside
from autopar.solver.offers import Offers
from autopar.solver.order import sums_of_turns, waits_of_ops
from autopar.solver.pins import Pins
from autopar.solver.reductions import GradientSums
from autopar.solver.step import Op, Step, Value, storage_of
from autopar.solver.step_problem import StepProblem
from autopar.solver.terms import Terms

__all__ = ["StepProblem", "build_problem"]


def build_problem(
    step: Step,
    cluster: Cluster,
    pins: Pins,
    optimizer: object,
    ports: Mapping[str, Layout] | None = None,
    offers: Offers | None = None,
) -> StepProblem:
    """States, costs and edges of a traced step on a cluster.

    Args:
        step: the step, read.
        cluster: prices.
        pins: what the constraints allow.
        optimizer: whose states count.
        ports: layouts that neighbouring pipeline stages have settled, by port.
        offers: what is known of ops and moves on this cluster.

    Raises:
        ConstraintError: a pin leaves an op or a parameter without any state.
    """
    return _Builder(step, offers or Offers(cluster), pins, optimizer, ports or {}).build()


class _Builder:
    def __init__(
        self,
        step: Step,
        offers: Offers,
        pins: Pins,
        optimizer: object,
        settled: Mapping[str, Layout],
    ) -> None:
        self.step = step
        self.settled = settled
        # in graph order, as sets differ from run to run
        summed = sums_of_turns(step)
        self.sums = [name for name in step.ops if name in summed]
        self.offers = offers
        self.device = offers.cluster.device
        self.mesh = offers.cluster.mesh_shape
        self.pins = pins
        self.optimizer = optimizer
        self.moves = offers.moves
        self.gradient_sums = GradientSums(step, step.blocks.traced.reduce_dtype)
        known = self._representatives()
        names = [*step.ops, *step.parameters, *step.ports]
        self.classes = {name: known.get(name, name) for name in names}
        self.waits = waits_of_ops(step)
        # what no op of the step makes leaves it behind the last one
        self.last_waits = self.waits.get(next(reversed(step.ops), ""), 1.0)
        self.count: dict[str, float] = {}
        self.copies: Counter[str] = Counter()
        for name, owner in self.classes.items():
            often = step.blocks.weight(name) * self.waits.get(name, 1.0)
            self.count[owner] = self.count.get(owner, 0.0) + often
            self.copies[owner] += step.blocks.copies(name)
        # uses of parameters and of copies of them in order, by the name of what is read
        self.uses: dict[str, list[tuple[int, str, int]]] = {}
        for order, (value, op, index) in enumerate(step.consumers()):
            if op.name not in step.copies:
                self.uses.setdefault(value[0], []).append((order, op.name, index))
        self.terms = Terms()
        self.candidates: dict[str, list[Candidate]] = {}
        self.storages: dict[str, list[Layout]] = {}
        self.whole: Layout = tuple(Replicate() for _ in self.mesh)
        self.built = StepProblem(
            ChoiceProblem(),
            self.candidates,
            self.storages,
            self.classes,
            self.moves,
            self.terms,
        )

    def build(self) -> StepProblem:
        self.pins.check_params()
        for op in self.step.ops.values():
            later = op.name in self.step.copies or op.name in self.sums
            if self.classes[op.name] == op.name and not later:
                self._add_op(op)
        for name in self.step.parameters:
            if self.classes[name] == name:
                self._add_parameter(name)
        for name in self.step.copies:
            if self.classes[name] == name:
                self._add_copy(self.step.ops[name])
        for name in self.sums:
            if self.classes[name] == name:
                self._add_sum(self.step.ops[name])
        for name in self.step.ports:
            self._add_port(name)
        self._add_edges()
        return self.built.weighted(self.step.weights)

    def _representatives(self) -> dict[str, str]:
        """Classes of nodes of equal blocks; those whose parameters are pinned apart are apart."""
        blocks = self.step.blocks
        owners: dict[Any, list[fx.Node]] = {}
        found: dict[str, str] = {}
        for nodes in blocks.members.values():
            pinned = tuple(
                self.pins.pinned(n.name) for n in nodes if n.name in self.step.parameters
            )
            twins = owners.setdefault((blocks.classes[nodes[0].name], pinned), nodes)
            found.update((a.name, b.name) for a, b in zip(nodes, twins, strict=True))
        return found

    # --- nodes ---------------------------------------------------------------------------------
    def _add_op(self, op: Op) -> None:
        offer = self.offers.of(op.call, self.step.shares.get(op.name))
        everything = [c for c in offer.candidates if self._inputs_ok(op, c)]
        allowed = [c for c in everything if self.pins.allows(op, c)]
        if not allowed:
            contraction = self.pins.contractions.get(op.name)
            if contraction is None or contraction.core:
                raise self.pins.refuse(op)
            allowed = everything
        allowed = self.pins.prefer(op, allowed)
        cost = np.maximum(0.0, offer.seconds - self.step.beside.get(op.name, 0.0))
        inner = None if op.call.target in WITH_HOST else offer.inner
        if len(allowed) < len(offer.candidates):
            place = {id(c): k for k, c in enumerate(offer.candidates)}
            left = [place[id(c)] for c in allowed]
            cost, inner = cost[left], None if inner is None else inner[left]
        self.candidates[op.name] = allowed
        self.terms.node(op.name, cost, self.count[op.name], inner)

    def _inputs_ok(self, op: Op, candidate: Candidate) -> bool:
        """Inputs of the step are whole on every rank: they can be sliced, never partial."""
        return not any(
            value[0] in self.step.inputs and any(p.is_partial for p in layout)
            for value, layout in zip(op.operands, candidate.inputs, strict=True)
        )

    def _add_parameter(self, name: str) -> None:
        spec = self.step.parameters[name]
        layouts = [
            layout
            for layout in self._layouts(name, spec.shape)
            if self.pins.allows_storage(name, layout)
        ]
        if not layouts:
            raise ConstraintError(
                f"{self.pins.describe()} leaves no placement for {spec.target} of shape "
                f"{spec.shape}"
            )
        sizes = np.array([self._state_bytes(name, layout) for layout in layouts])
        self.storages[name] = layouts
        # a tie goes to the smaller share, then to one whose gather needs no copy into rank order
        packed = [any(p.is_shard and (p.dim or p.split > 1) for p in x) for x in layouts]
        cost = sizes * 1e-21 * (1.0 + np.array(packed))
        cost = cost + [self._update_seconds(name, layout) for layout in layouts]
        self.terms.node(name, cost, self.copies[name])

    def _update_seconds(self, name: str, layout: Layout) -> float:
        """Seconds of the update of one rank's share, on the device or on the host."""
        if name not in self.step.gradients:
            return 0.0
        spec = self.step.parameters[name]
        share = TensorSpec(spec.shape, spec.dtype).num_bytes // shard_factor(layout, self.mesh)
        given = (self.device, self.optimizer, share, spec.dtype)
        return update_seconds(*given) + offload_seconds(*given)

    def _add_copy(self, op: Op) -> None:
        """The copy of a parameter that compute reads, in any layout that it may arrive in."""
        none = ("",) * len(self.mesh)
        (source,) = op.operands
        layouts = self._layouts(op.name, op.call.outputs[0].shape)
        if source[0] in self.step.ops:
            arriving = self.built.produced(source) or ()
            layouts = list(dict.fromkeys((*layouts, *arriving)))
        allowed = [
            Candidate((layout,), (layout,), none, ())
            for layout in layouts
            if not any(p.is_partial for p in layout)
        ]
        self.candidates[op.name] = allowed
        self.terms.node(op.name, np.zeros(len(allowed)))

    def _add_port(self, name: str) -> None:
        """Layout of what arrives from another stage, or of what is sent to one: never partial."""
        if name in self.settled:
            layouts = [self.settled[name]]
        else:
            shape = self.step.ports[name].shape
            leaving = [
                layout
                for send in self.step.sends
                if send.port == name
                for layout in self.built.produced(send.value) or ()
            ]
            found = dict.fromkeys((*self._layouts(name, shape), *leaving))
            layouts = [x for x in found if not any(p.is_partial for p in x)]
        self.storages[name] = layouts
        self.terms.node(name, np.zeros(len(layouts)))

    def _add_sum(self, op: Op) -> None:
        """The sum of a gradient over the microbatches: as it comes, or as it is stored."""
        none = ("",) * len(self.mesh)
        layouts = list(self.built.produced(op.operands[0]) or ())
        for name, value in self.step.gradients.items():
            if self.classes[value[0]] == op.name:
                layouts += self.storages[self.classes[name]]
        layouts += [self.settled[s.port] for s in self.step.sends
                    if s.value[0] == op.name and s.port in self.settled]  # fmt: skip
        found = [Candidate((x,), (x,), none, ()) for x in dict.fromkeys(layouts)]
        self.candidates[op.name] = found
        self.terms.node(op.name, np.zeros(len(found)))

    def _state_bytes(self, name: str, layout: Layout) -> float:
        """Parameter, gradient and optimizer state of one rank."""
        spec = self.step.parameters[name]
        share = TensorSpec(spec.shape, spec.dtype).num_bytes / shard_factor(layout, self.mesh)
        if name not in self.step.gradients:
            return share
        states = optimizer_state_bytes(
            self.optimizer, int(share) // spec.dtype.itemsize, spec.dtype
        )
        return 2 * share + states

    def _layouts(self, name: str, shape: tuple[int, ...]) -> list[Layout]:
        """Plain layouts, those that consumers ask for, and ZeRO inside these."""
        options: list[Placement] = [Replicate(), *(Shard(d) for d in range(len(shape)))]
        plain = [
            layout
            for layout in itertools.product(options, repeat=len(self.mesh))
            if is_valid(layout, shape, self.mesh)
        ]
        copies = self.step.copies
        readable = {name, *(c for c in copies if self.step.ops[c].operands[0][0] == name)}
        wanted = [
            candidate.inputs[index]
            for _, reader, index in sorted(use for n in readable for use in self.uses.get(n, ()))
            for candidate in self.candidates[self.classes[reader]]
            if not any(p.is_partial for p in candidate.inputs[index])
        ]
        inside = [
            inner
            for layout in dict.fromkeys((*plain, *wanted))
            for inner in split_inside(layout, self.mesh)
        ]
        found = dict.fromkeys((*plain, *wanted, *inside))
        return [layout for layout in found if is_valid(layout, shape, self.mesh)]

    # --- edges ---------------------------------------------------------------------------------
    def _add_edges(self) -> None:
        uses: dict[tuple[str, int, str, int], float] = {}
        runs: dict[tuple[str, int, str, int], float] = {}  # of the op that reads
        sample: dict[tuple[str, int, str, int], tuple[Value, Op, int]] = {}
        for value, op, index in self.step.consumers():
            if self.step.is_given(value):
                continue
            key = (self.classes[value[0]], value[1], self.classes[op.name], index)
            waits = self.waits[op.name]
            moved = self.step.blocks.edge_weight(value[0], op.name) * waits
            uses[key] = uses.get(key, 0.0) + moved
            sample.setdefault(key, (value, op, index))
            runs[key] = runs.get(key, 0.0) + self.step.blocks.weight(op.name) * waits
        for key, times in uses.items():
            value, op, _ = sample[key]
            matrix, computed = self._edge(*sample[key]), self._broken(*sample[key])
            computed = None if computed is None else computed * runs[key]
            may_hide = self.step.may_hide(value, op.name)
            if may_hide:
                packing = self._packing(*sample[key]) * times
                computed = packing if computed is None else computed + packing
            self.terms.edge(key[0], key[2], matrix, times, may_hide, computed)
        self._add_gradient_ends()
        self._add_sends()
        for value in self.step.required:
            produced = self.built.produced(value)
            if produced is not None:
                num_bytes = self.step.specs[value].num_bytes
                column = self.moves.matrix(produced, [self.whole], num_bytes)[:, 0]
                owner = self.classes[value[0]]
                waits = self.waits.get(value[0], self.last_waits)
                times = self.step.blocks.weight(value[0]) * waits
                self.terms.end(owner, column * times, may_hide=bool(self.step.gradients))

    def _add_sends(self) -> None:
        """The cost of bringing what is sent to the layout of its port."""
        for send in self.step.sends:
            produced = self.built.produced(send.value)
            if produced is not None:
                num_bytes = self.step.specs[send.value].num_bytes
                matrix = self.moves.matrix(produced, self.storages[send.port], num_bytes)
                name = send.value[0]  # what is summed up over the turns is sent when they are over
                at_turn = self.waits.get(name, self.last_waits)
                waits = self.step.waits.finish if name in self.sums else at_turn
                self.terms.edge(self.classes[name], send.port, matrix, send.times * waits)

    def _edge(self, value: Value, op: Op, index: int) -> Array:
        produced = self.built.produced(value)
        assert produced is not None
        targets = self.candidates[self.classes[op.name]]
        wanted = [c.inputs[index] for c in targets]
        matrix = self.moves.matrix(
            produced, wanted, self.step.specs[value].num_bytes, self.step.bucket(value, op.name)
        )
        matrix = self.gradient_sums.restrict(matrix, value, op.name, produced, wanted)
        if op.call.target is FROM_HOST:  # nothing is sent between devices from host memory
            matrix = np.where(
                np.array([[p == w for w in wanted] for p in produced]), matrix, np.inf
            )
        arrives, leaves = self.pins.arrives(op, index), self.pins.leaves(value)
        if arrives is not None and storage_of(self.step.ops, value)[0] not in self.step.inputs:
            known = [[arrives(p, c) for c in targets] for p in produced]
            matrix = np.where(np.array(known), matrix, np.inf)
        if leaves is not None and op.forward:
            known = [[leaves(p, w) for w in wanted] for p in produced]
            matrix = np.where(np.array(known), matrix, np.inf)
        return matrix

    def _packing(self, value: Value, op: Op, index: int) -> Array:
        """Seconds of copies on the way of an operand."""
        produced = self.built.produced(value)
        assert produced is not None
        wanted = [c.inputs[index] for c in self.candidates[self.classes[op.name]]]
        return self.moves.packing(produced, wanted, self.step.specs[value])

    def _broken(self, value: Value, op: Op, index: int) -> Array | None:
        """Seconds of compute where a move of the operand breaks a fused kernel."""
        share, produced = self.step.shares.get(op.name), self.built.produced(value)
        if share is None or produced is None:
            return None
        targets = self.candidates[self.classes[op.name]]
        return self.offers.broken(op.call, share, produced, index, targets)

    def _add_gradient_ends(self) -> None:
        """The cost of bringing each gradient to its parameter's storage.

        Parameters of one class may get their gradients from different ones, each an edge.
        """
        times: Counter[tuple[str, int, str]] = Counter()
        sample: dict[tuple[str, int, str], Value] = {}
        for name, value in self.step.gradients.items():
            if value[0] not in self.step.inputs:
                key = (self.classes[value[0]], value[1], self.classes[name])
                times[key] += self.step.blocks.copies(name)
                sample.setdefault(key, value)
        for key, count in times.items():
            value = sample[key]
            produced = self.built.produced(value)
            assert produced is not None
            stored = self.storages[key[2]]
            matrix = self.moves.matrix(
                produced, stored, self.step.specs[value].num_bytes, self.step.reductions
            )
            summed = self.pins.summed()
            if summed is not None:
                known = np.array([[summed(p, s) for s in stored] for p in produced])
                matrix = np.where(known, matrix, np.inf)
            matrix = self.gradient_sums.restrict(matrix, value, "", produced, stored)
            counts = count * self.step.waits.finish
            packing = self.moves.packing(produced, stored, self.step.specs[value])
            self.terms.edge(key[0], key[2], matrix, counts, True, packing * counts)
