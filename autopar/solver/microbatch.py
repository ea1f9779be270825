"""Which ops may run microbatch by microbatch: a mesh axis in time, on which nothing can be sent.

A step over m microbatches is the step on an axis of m ranks whose turns come one after the other.
A value is split over the microbatches (S), a sum of their contributions (P), or the same for all
of them (R). Ranks in time cannot exchange anything before the end, so the only free move is R to
S. The sharding rules then say which steps are exact under microbatching, a loss averaged over
unequal numbers of tokens included: its divisor is computed from the whole batch, before.

Allowed at the ends: P for the loss and the gradients (they add up), R for buffers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from autopar.core.blocks import Blocks
from autopar.core.graph import TracedModel, Value, dependents, kept_in_turns, resolve
from autopar.core.loss import missing_loss
from autopar.core.placement import Layout, Partial, Placement
from autopar.core.plan import NodePlan
from autopar.cost_model import Cluster
from autopar.errors import ConstraintError
from autopar.solver.candidates import Candidate, Pricer, expand
from autopar.solver.discrete.ilp import Infeasible, solve_problem
from autopar.solver.discrete.problem import Array, ChoiceProblem
from autopar.solver.read_step import build_step
from autopar.solver.rules.labels import replicated
from autopar.solver.rules.notes import note_places
from autopar.solver.rules.pointwise import rounding_rows, share_rows
from autopar.solver.step import Op, Step

__all__ = ["split_in_time"]

aten = torch.ops.aten


def split_in_time(traced: TracedModel, cluster: Cluster, microbatches: int) -> dict[str, NodePlan]:
    """Placement of every value over the microbatches, by op name; layouts of one axis.

    Args:
        traced: the step on the whole batch, with a scalar loss.
        cluster: prices ops, so that as much work as possible is split.
        microbatches: number of turns.

    Raises:
        ConstraintError: the step cannot be split exactly; names the op.
    """
    if microbatches > 1 and (traced.loss_index is None or not traced.training):
        raise ConstraintError(
            f"microbatches need a training step with a scalar loss: {missing_loss(traced)}"
        )
    return _Splitter(traced, cluster, microbatches).run()


def _kept(traced: TracedModel) -> Step:
    """The step without what only dropped results read."""
    step, kept = build_step(traced), kept_in_turns(traced)
    return replace(step, ops={name: op for name, op in step.ops.items() if name in kept})


class _Splitter:
    def __init__(self, traced: TracedModel, cluster: Cluster, microbatches: int) -> None:
        note_places(traced)
        self.traced = traced
        self.step = _kept(traced)
        self.size = microbatches
        timed = replace(cluster, mesh_shape=(microbatches,), axis_names=("microbatch",))
        self.pricer = Pricer(timed)
        self.weighted = dependents(traced, "parameter")
        self.fed = dependents(traced, "input")
        known = Blocks(traced).classes
        self.owner = {name: known.get(name, name) for name in self.step.ops}
        self.states: dict[str, list[Candidate]] = {}

    def run(self) -> dict[str, NodePlan]:
        problem = ChoiceProblem()
        for name, op in self.step.ops.items():
            owner = self.owner[name]
            if owner not in self.states:
                self.states[owner] = self._states(op)
                if not self.states[owner]:
                    raise self._refusal()
                cost = self.pricer.compute(op.call, self.states[owner])
                problem.add_node(owner, cost + self._held(op, self.states[owner]))
        try:
            self._edges(problem)
            chosen = solve_problem(problem, exact=False).chosen
        except Infeasible as error:
            raise self._refusal() from error
        return {
            name: NodePlan(inputs=state.inputs, outputs=state.outputs, variants=state.variants)
            for name in self.step.ops
            for state in [self.states[self.owner[name]][chosen[self.owner[name]]]]
        }

    def _states(self, op: Op) -> list[Candidate]:
        """Rows of the rule without communication; what is computed from activations is split.

        Numbers may be the same for all turns: a learned weight of a loss over a count of labels.
        """
        if self.size == 1:
            row = replicated(op.call)
            none = ("",)
            inputs, outputs = ((p,) for p in row.inputs), ((p,) for p in row.outputs)
            return [Candidate(tuple(inputs), tuple(outputs), none, ())]
        found = [c for c in expand(op.call, (self.size,)) if not c.comm]
        shares = (
            Candidate(tuple((p,) for p in row.inputs), ((Partial(),),), (row.variant,), ())
            for row in (*share_rows(op.call), *rounding_rows(op.call))
        )
        found += [c for c in shares if c not in found]
        numbers = all(math.prod(spec.shape) == 1 for spec in op.call.outputs)
        if op.name in self.weighted and op.name in self.fed and not numbers:
            found = [c for c in found if not _same(c.outputs)]
        # what is the same for all turns is made from what is the same for all turns
        found = [c for c in found if not _same(c.outputs) or _same(c.inputs)]
        return [c for c in found if self._inputs_ok(op, c)]

    def _held(self, op: Op, states: list[Candidate]) -> Array:
        """A tie goes to what holds less at a time: views cost no seconds."""
        sizes = [
            sum(
                spec.num_bytes / (self.size if layout[0].is_shard else 1)
                for spec, layout in zip(op.call.outputs, c.outputs, strict=True)
            )
            for c in states
        ]
        return 1e-15 * (1.0 + np.array(sizes))

    def _inputs_ok(self, op: Op, candidate: Candidate) -> bool:
        return all(
            self._free(_REPLICATED, layout[0], value)
            for value, layout in zip(op.operands, candidate.inputs, strict=True)
            if value[0] not in self.step.ops
        )

    def _free(self, src: Placement, dst: Placement, value: Value) -> bool:
        """True if a value can be used so in each microbatch without hearing of the others."""
        sliced = src.is_replicate and dst.is_shard and not dst.own
        sliced = sliced and value[0] not in self.weighted
        return src == dst or sliced

    def _edges(self, problem: ChoiceProblem) -> None:
        seen: set[tuple[str, int, str, int]] = set()
        for value, op, index in self.step.consumers():
            if value[0] not in self.step.ops:
                continue
            key = (self.owner[value[0]], value[1], self.owner[op.name], index)
            if key not in seen:
                seen.add(key)
                problem.add_edge(key[0], key[2], self._matrix(value, op, index))
        for value, kinds in self._ends():
            owner = self.owner[value[0]]
            outputs = [c.outputs[value[1]][0] for c in self.states[owner]]
            refused = np.array([0.0 if p.kind in kinds else np.inf for p in outputs])
            problem.costs[owner] = problem.costs[owner] + refused

    def _matrix(self, value: Value, op: Op, index: int) -> Array:
        sources = [c.outputs[value[1]][0] for c in self.states[self.owner[value[0]]]]
        targets = [c.inputs[index][0] for c in self.states[self.owner[op.name]]]
        free = [[self._free(s, t, value) for t in targets] for s in sources]
        return np.where(np.array(free, dtype=bool).reshape(len(sources), -1), 0.0, np.inf)

    def _ends(self) -> list[tuple[Value, str]]:
        """Values that leave the step and the kinds of placement that they may have."""
        ends: list[tuple[Value, str]] = []
        for value in self.step.gradients.values():
            ends.append((value, "P" if value[0] in self.fed and self.size > 1 else "PR"))
        nodes = {n.name: n for n in self.traced.graph.nodes}
        for spec in self.traced.outputs:
            if spec.node is None or spec.kind == "gradient":
                continue
            if spec.kind == "buffer":
                ends.append((resolve(nodes[spec.node]), "R"))
            elif spec.target == str(self.traced.loss_index):
                ends.append((resolve(nodes[spec.node]), "P" if self.size > 1 else "R"))
        return [(value, kinds) for value, kinds in ends if value[0] in self.step.ops]

    def _refusal(self) -> ConstraintError:
        """Names the first op that has no state for what can reach it."""
        reach: dict[Value, set[Placement]] = {}
        for op in self.step.ops.values():
            if self.owner[op.name] not in self.states:
                self.states[self.owner[op.name]] = self._states(op)
            alive = [
                c
                for c in self.states[self.owner[op.name]]
                if all(
                    value[0] not in self.step.ops
                    or any(self._free(s, layout[0], value) for s in reach[value])
                    for value, layout in zip(op.operands, c.inputs, strict=True)
                )
            ]
            if not alive:
                sums = [v for v in op.operands if v in reach and _only_sums(reach[v])]
                return self._refuse(op.name, sums[0][0] if sums else None)
            for index in range(len(op.call.outputs)):
                reach[op.name, index] = {c.outputs[index][0] for c in alive}
        for value, kinds in self._ends():
            if not any(p.kind in kinds for p in reach[value]):
                return self._refuse(value[0])
        return ConstraintError(
            f"the step cannot run in {self.size} microbatches: no combination of placements over "
            "them connects its ops without communication"
        )

    def _refuse(self, name: str, summed: str | None = None) -> ConstraintError:
        """Of an op that has no rule, or that reads what no microbatch has: the sum `summed`."""
        call = self.step.ops[name].call
        shapes = ", ".join(str(list(s.shape)) for s in call.operands)
        if summed is None:
            why = f"needs the whole batch, or {self.size} does not divide its batch"
            instead = "Choose another number of microbatches, or 1."
        else:
            why = (
                f"needs the whole batch: it reads {self.step.named(summed)}, to which every sample "
                "adds, as to the mean of a batch norm (layer and group norms have none)"
            )
            instead = "Leave it in one: 1 microbatch."
        return ConstraintError(
            f"the step cannot run in {self.size} microbatches: {self.step.named(name)} on shapes "
            f"{shapes} {why}. {_REMEDIES.get(call.target, '')}{instead}"
        )


def _only_sums(placements: set[Placement]) -> bool:
    return bool(placements) and all(p.is_partial for p in placements)


_REPLICATED = Placement("R")
_BAGS = (
    "Where offsets are an input, how many indices a bag has depends on values: pass bags of equal "
    "length as 2-D indices, padded to it with padding_idx. "
)
_REMEDIES: dict[Any, str] = dict.fromkeys(
    (aten._embedding_bag.default, aten._embedding_bag_forward_only.default), _BAGS
)


def _same(layouts: Iterable[Layout]) -> bool:
    return all(layout[0].is_replicate for layout in layouts)
