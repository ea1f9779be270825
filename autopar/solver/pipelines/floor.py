"""The least seconds of a block on a pipeline rank, communication included, whatever surrounds it.

Of the problem that a pipeline stage is (`build.py`) only the ops and parameters of one block are
kept. What comes in from elsewhere may have any layout, and what goes out too, for nothing; a
gradient's reduction shares its latency with any number of others. So the optimum of what is left is
a lower bound of what the block adds to a stage that holds it, on the same mesh and in as many
microbatches, with any neighbours and any choices for them. Bounds of several blocks add up.

Bounds of parts of the seconds are found in the same way, with the other parts left out or counted
less: of a forward, of the backward that the stage before waits for, and of several together. A
bound of a sum is no lower than the sum of bounds, as one plan has to do well in all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from autopar.core.blocks import Blocks
from autopar.core.cells import Cells
from autopar.core.constraints import Constraints, assign_mesh
from autopar.core.graph import Repeat, TracedModel, dependents
from autopar.core.ops import NARROW, REARRANGING
from autopar.solver import overlap
from autopar.solver.build import StepProblem, build_problem
from autopar.solver.discrete.ilp import solve_problem
from autopar.solver.discrete.problem import ChoiceProblem
from autopar.solver.offers import Offers, likeness
from autopar.solver.pins import Pins
from autopar.solver.pipelines.functionals import Weights, functionals
from autopar.solver.pipelines.ideal import owners_of
from autopar.solver.read_step import build_step
from autopar.solver.rules.notes import note_places
from autopar.solver.shares import lowest_shares
from autopar.solver.step import Bucket, Step, Value

__all__ = ["Alone", "Floors"]

_MANY = 1 << 30  # gradients that a bucket may join
_SUMMING = {*REARRANGING, NARROW, torch.ops.aten.alias.default, torch.ops.aten.add.Tensor}


class _Alone(Blocks):
    """The blocks of a graph, each counted once and with choices of its own."""

    def __init__(self, whole: Blocks) -> None:
        self.__dict__.update(whole.__dict__)
        self.classes = {name: name for name in whole.place}

    def repeat_of(self, name: str) -> Repeat | None:
        return None


class _Part(Step):
    """A part of a step."""

    __slots__ = ()

    @property
    def reductions(self) -> Bucket:
        return replace(super().reductions, count=_MANY)


@dataclass(frozen=True, slots=True, eq=False)
class Alone:
    """The problem of some ops and parameters, whatever surrounds them.

    Attributes:
        part: of the step.
        built: its problem.
        parts: in which parts of a step each node, and the moves of a parameter, may run: fields of
            `Weights`.
        ends: pairs of nodes between which a gradient is reduced once, behind the turns.
        handed_bytes: that a device holds at least of what backward ops of others read.
    """

    part: Step
    built: StepProblem
    parts: Mapping[str, Sequence[str]]
    ends: Collection[frozenset[Hashable]]
    handed_bytes: float = 0.0

    def weighed(self, weights: Weights) -> ChoiceProblem:
        """The problem with a share of what each node, and each pair of nodes, costs."""
        problem = self.built.problem
        shares = {pair: self._counts(weights, *pair) for pair in problem.edges}
        edges = {pair: share * problem.edges[pair] for pair, share in shares.items() if share}
        held = {n for pair in edges for n in pair}
        costs = {n: self._of_node(weights, n) * cost for n, cost in problem.costs.items()}
        return ChoiceProblem({n: c for n, c in costs.items() if n in held or c.any()}, edges)

    def _of_node(self, weights: Weights, node: Hashable) -> float:
        """What a node counts, at least."""
        if node in self.part.parameters:
            return weights.update  # all that it costs by itself
        return self._counts(weights, node)

    def _counts(self, weights: Weights, *nodes: Hashable) -> float:
        """What moves between nodes count, or what ops do, at least."""
        if frozenset(nodes) in self.ends:
            return weights.finish  # reduced once
        return min(getattr(weights, part) for n in nodes for part in self.parts[str(n)])


class Floors:
    """Lower bounds of the blocks of a microbatch on one mesh.

    Args:
        body: of one microbatch, folded or not (`codegen.microbatch`).
        constraints: what is pinned inside stages.
        optimizer: whose update may cost seconds.
        offers: on the mesh of a pipeline rank.
        ahead: as for `left_out`.
        parts: find more than "step".
        counted: what seconds count in a sum (`overlap`).
    """

    def __init__(
        self,
        body: TracedModel,
        constraints: Constraints,
        optimizer: object,
        offers: Offers,
        ahead: int,
        parts: bool = True,
        counted: overlap.Weights = overlap.ALL,
    ) -> None:
        note_places(body)
        self.body = body
        step = build_step(body, offers.fused)
        least = lowest_shares(step.ops, step.shares, step.blocks)
        self.step = replace(step, shares=least, weights=counted)
        self.offers = offers
        self.optimizer = optimizer
        wanted = functionals(body.microbatches, ahead)
        self.wanted = wanted if parts else {"step": wanted["step"]}
        roles = assign_mesh(constraints, offers.cluster.mesh_shape)
        self.pins = Pins(constraints, roles, body, self.step)
        self.blocks = _Alone(self.step.blocks)
        self.cells = Cells(body)
        self._fed = dependents(body, "input", "seed")  # what is not, may run once a step
        self._problems: dict[Hashable, Alone] = {}  # of blocks alone

    def held_as(self, optimizer: object) -> Floors:
        """The same with the optimizer in another place."""
        other = copy(self)
        other.optimizer, other._problems = optimizer, {}
        return other

    def of(
        self, blocks: Sequence[str], names: Collection[str]
    ) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
        """Lower bounds of blocks (FQNs, `core/cells.py`), and of what is around each.

        They are seconds of a step, all turns, by `names` of `wanted`. A block that has all
        the ops of another one, and more, takes no less: found once. Where a gradient's op runs,
        before others or behind, makes no difference to some sums.
        """
        inside, place = self._places(blocks)
        before = self._before_others(place)
        around = self._around(place, inside)
        parts = [self._only(names) for names in inside]
        kinds = [(self._kinds(part, ()), self._kinds(part, before)) for part in parts]
        wanted = {name: weights for name, weights in self.wanted.items() if name in names}
        found: dict[int, dict[str, float]] = {}
        for i in sorted(range(len(blocks)), key=lambda i: len(parts[i].ops)):
            known: dict[str, float] = {}
            for name, weights in wanted.items():
                split = weights.inputs != weights.weights
                like = next((j for j in found if kinds[j][split] <= kinds[i][split]), None)
                if like is not None:
                    known[name] = found[like][name]
            found[i] = known | self._of_block(parts[i], before, wanted.keys() - known.keys())
        beside = [self._of_block(self._only(names), before, wanted) for names in around]
        return [found[i] for i in range(len(blocks))], beside

    def _kinds(self, part: Step, before: Collection[str]) -> Counter[object]:
        """The ops of a part, as far as they matter to what it takes."""
        return Counter(
            (likeness(op.call), op.backward, op.name in before, self.step.shares.get(op.name))
            for op in part.ops.values()
        )

    def of_run(
        self, blocks: Sequence[str], wanted: Collection[str], around_last: bool = False
    ) -> dict[str, float]:
        """Lower bounds of blocks that follow each other on one rank.

        Args:
            blocks: FQNs.
            wanted: names of `functionals`.
            around_last: with what is around the last of them; else without what is around any.
        """
        every = list(self.cells.members)
        inside, place = self._places(every)
        numbers = [every.index(block) for block in blocks]
        own = set().union(*(inside[i] for i in numbers))
        if around_last:
            own |= self._around(place, inside)[numbers[-1]]
        for name in own & place.keys():
            place[name] = -1
        return self._found(self._alone(self._only(own), self._before_others(place)), wanted)

    def _of_block(
        self, part: Step, before: Collection[str], wanted: Collection[str]
    ) -> dict[str, float]:
        """Lower bounds of a block alone, or of what is around one, which may be asked again."""
        if not wanted or not (part.ops or part.parameters):
            return dict.fromkeys(wanted, 0.0)
        key = (*part.ops, *part.parameters)
        if key not in self._problems:
            self._problems[key] = self._alone(part, before)
        return self._found(self._problems[key], wanted)

    def _found(self, alone: Alone, wanted: Collection[str]) -> dict[str, float]:
        return {
            name: _least(alone.weighed(weights))
            for name, weights in self.wanted.items()
            if name in wanted
        }

    def whole(self, blocks: Sequence[str]) -> list[Alone]:
        """The problem of each block with what is around it; one for blocks that are alike."""
        inside, place = self._places(blocks)
        around, before = self._around(place, inside), self._before_others(place)
        known: dict[Hashable, Alone] = {}
        found: list[Alone] = []
        for names in (a | b for a, b in zip(inside, around, strict=True)):
            part = self._only(names)
            held = Counter(
                (spec.shape, spec.dtype, name in part.gradients)
                for name, spec in part.parameters.items()
            )
            kinds = self._kinds(part, before)
            key = frozenset(kinds.items()), frozenset(held.items()), self._handed(part)
            if key not in known:
                known[key] = self._alone(part, before)
            found.append(known[key])
        return found

    def _places(self, blocks: Sequence[str]) -> tuple[list[set[str]], dict[str, int]]:
        """Names of what is in each block, and the number of the block that an op is with."""
        # a block that no parameter reaches runs before the microbatches
        inside = [{n.name for n in self.cells.members.get(block, ())} for block in blocks]
        place = owners_of(self.body, self.cells, blocks, self.step)
        place |= {n: i for i, names in enumerate(inside) for n in names}
        for name in self._of_several(place):
            place.pop(name, None)
        return inside, place

    def _alone(self, part: Step, before: Collection[str]) -> Alone:
        built = build_problem(
            part, self.offers.cluster, self.pins, self.optimizer, None, self.offers
        )
        ends = {
            frozenset((value[0], name))
            for name, value in part.gradients.items()
            if all(read != name for read, _ in part.ops[value[0]].operands)
        }
        names = map(str, built.problem.costs)
        parts = {name: self._parts_of(part, before, ends, name) for name in names}
        return Alone(part, built, parts, ends, self._handed(part))

    def _handed(self, part: Step) -> float:
        """Bytes per device of forward values that others than a part read in their backward.

        They may read a copy in another layout, so no more is known than that all devices hold one.
        """
        found: set[Value] = set()
        for value, op, _ in self.step.consumers():
            if op.backward and op.name not in part.ops and value[0] in part.ops:
                while value[0] in part.ops and part.ops[value[0]].view:
                    value = part.ops[value[0]].operands[0]
                if value[0] in part.ops and not part.ops[value[0]].backward:
                    found.add(value)
        whole = sum(part.specs[value].num_bytes for value in found)
        return whole / self.offers.cluster.num_devices

    def _parts_of(
        self, part: Step, before: Collection[str], ends: Collection[frozenset[Hashable]], name: str
    ) -> Sequence[str]:
        """Parts of a step that a node may run in: fields of `Weights`.

        Of a parameter, those of its moves: gathers, and reductions that are not known apart.
        """
        if part.is_hoisted(name):
            return ("prepare",)
        if name in part.parameters:
            apart = name not in part.gradients or frozenset((part.gradients[name][0], name)) in ends
            return ("prepare",) if apart else ("prepare", "finish")
        if name not in self._fed or name not in part.ops:
            return Weights._fields
        if not part.ops[name].backward:
            return ("forward",)
        return ("inputs",) if name in before else ("weights",)

    def _of_several(self, place: Mapping[str, int]) -> set[str]:
        """Parameters that several blocks read, what is made of them alone, and of their gradients.

        Args:
            place: number of the block that an op is with.
        """
        ops = self.step.ops
        readers: dict[str, set[int | None]] = {}
        for op in reversed(ops.values()):
            fed = op.name in self._fed
            for name, _ in op.operands:
                theirs = {place.get(op.name)} if fed else readers.get(op.name, set())
                readers.setdefault(name, set()).update(theirs)
        alone = {*self.step.parameters, *(n for n in ops if n not in self._fed)}
        found = {n for n in alone if len(readers.get(n, ())) > 1}
        stack = [value[0] for name, value in self.step.gradients.items() if name in found]
        while stack:
            name = stack.pop()
            if name in ops and ops[name].call.target in _SUMMING:
                found.add(name)
                stack += [value[0] for value in ops[name].operands]
        return found

    def _around(self, place: Mapping[str, int], inside: Sequence[set[str]]) -> list[set[str]]:
        """Ops and parameters of no block that are in the same stage as each of them.

        Args:
            place: number of the block that an op is with.
            inside: names of what is in each block.
        """
        everywhere = set().union(*inside)
        weighted = dependents(self.body, "parameter")
        found: list[set[str]] = [set() for _ in inside]
        owners: dict[str, set[int | None]] = {}
        for value, op, _ in self.step.consumers():
            owners.setdefault(value[0], set()).add(place.get(op.name))
        for name in (*self.step.ops, *self.step.parameters):
            # what no parameter reaches may run in any stage
            if name in everywhere or (name in self.step.ops and name not in weighted):
                continue
            (owner, *others) = [place[name]] if name in place else owners.get(name, {None})
            if owner is not None and not others:
                found[owner].add(name)
        return found

    def _only(self, names: Collection[str]) -> _Part:
        """The step with nothing but the given ops and parameters."""
        step = self.step
        ops = {name: op for name, op in step.ops.items() if name in names}
        parameters = {name: spec for name, spec in step.parameters.items() if name in names}
        held = {*ops, *parameters, *step.inputs}

        def kept(owners: Mapping[str, str]) -> dict[str, str]:
            return {n: of for n, of in owners.items() if n in ops and of in parameters}

        changed: dict[str, Any] = {
            "ops": ops,
            "parameters": parameters,
            "gradients": {
                name: value
                for name, value in step.gradients.items()
                if name in parameters and value[0] in ops
            },
            "required": (),
            "results": (),
            "prepared": kept(step.prepared),
            "copies": kept(step.copies),
            "blocks": self.blocks,
            "ports": {},
            "sends": (),
            "outside": frozenset(v[0] for op in ops.values() for v in op.operands) - held,
        }
        same: dict[str, Any] = {f.name: getattr(step, f.name) for f in fields(step) if f.init}
        return _Part(**same | changed)

    def _before_others(self, place: Mapping[str, int]) -> set[str]:
        """Backward ops whose results go, by way of others of their block, to another block.

        Args:
            place: number of the block that an op runs with.
        """
        ops = self.step.ops
        found: set[str] = set()
        for op in reversed(ops.values()):
            if not op.backward or op.name not in place:
                continue
            mine = place[op.name]
            for name, _ in op.operands:
                if name in ops and ops[name].backward and name in place:
                    if place[name] != mine or op.name in found:
                        found.add(name)
        return found


def _least(problem: ChoiceProblem) -> float:
    return max(0.0, solve_problem(problem, exact=False).bound) if problem.costs else 0.0
