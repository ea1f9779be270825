"""How plans place the nodes of a step, whatever each of them recomputes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from autopar.core.blocks import Block
from autopar.solver.discrete.problem import Assignment
from autopar.solver.variant import Variant

__all__ = ["Labels", "Placed"]

Labels: TypeAlias = Mapping[Block, str]
"""Which blocks are placed alike."""

_PERIOD = re.compile(r"_period\d+$")  # ends the name of a node that stands for other blocks


class _Role(NamedTuple):
    """What a node is in the step, whatever is recomputed.

    Attributes:
        name: of the node in the traced graph.
        again: it computes that one again.
    """

    name: str
    again: bool


class Placed:
    """How plans place each node of a step, by the label of the node's block."""

    def __init__(self) -> None:
        self.places: dict[_Role, dict[str, Any]] = defaultdict(dict)

    def add(self, variant: Variant, chosen: Assignment, labels: Labels) -> None:
        """Those of a plan; the last one added counts for nodes outside of blocks."""
        for name, role, label in _roles(variant, labels):
            owner = variant.built.classes[name]
            self.places[role][label] = variant.built.states(owner)[chosen[owner]]

    def carried_to(self, variant: Variant, labels: Labels) -> Assignment | None:
        """The assignment of a mixture that places its nodes so; None where a state is missing."""
        members: dict[str, list[tuple[_Role, str]]] = defaultdict(list)
        for name, role, label in _roles(variant, labels):
            members[variant.built.classes[name]].append((role, label))
        chosen: dict[Hashable, int] = {}
        for owner, roles in members.items():
            states = variant.built.states(owner)
            wanted = next((s for s in self._wanted(roles) if s in states), None)
            if wanted is None:
                return None
            chosen[owner] = states.index(wanted)
        return chosen

    def _wanted(self, roles: Sequence[tuple[_Role, str]]) -> Iterator[Any]:
        """States for a class, best first: of its label, of another, of what is computed again."""
        for role, label in roles:
            if label in self.places.get(role, ()):
                yield self.places[role][label]
        for role, _ in roles:
            for like in (role, _Role(role.name, False)):
                yield from self.places.get(like, {}).values()


def _roles(variant: Variant, labels: Labels) -> Iterator[tuple[str, _Role, str]]:
    """Each node of the problem with its role and the label of its block; "" outside of blocks."""
    known = variant.traced.nodes()
    blocks = variant.step.blocks
    nodes = variant.graph.nodes()
    for name in variant.built.classes:
        node = nodes.get(name)
        origin = name if node is None else node.meta.get("again", name)
        role = _Role(origin if origin in known else _PERIOD.sub("", origin), origin != name)
        place = blocks.place.get(name)
        yield name, role, labels[place[0]] if place is not None else ""
