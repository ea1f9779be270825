"""Blocks of a model: where each node stands, which nodes share one choice, how often each counts.

Repeated layers (`model.layers.0`, `.1`, …) whose ops, shapes, arguments and wiring are equal form
a class; their nodes at the same position share decision variables. Layers that differ (the first
one, whose input is the embedding; alternating kinds) make classes of their own. Where the graph is
folded (`TracedModel.repeats`), the nodes of one block count for those that it stands for. Equal
blocks of two sections (`TracedModel.sections`) share no choice. Where the stages of a network are
unlike and hold lists of equal layers (`TracedModel.nested`), these layers are the blocks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Hashable, Iterable
from copy import copy
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import fx
from torch.fx.node import map_aggregate

from autopar.core.graph import InputSpec, Repeat, TracedModel, node_info, tensor_meta
from autopar.core.ops import unsalted
from autopar.core.reshapes import is_reshape, view_class
from autopar.core.strategy import op_call

__all__ = [
    "MANY",
    "Block",
    "Blocks",
    "block_of",
    "joined",
    "lists_of",
    "members_by",
    "names_of",
    "number_in",
    "renumbered",
    "section_of",
    "within",
]

Owner = TypeVar("Owner", bound=Hashable)

_JOIN = "+"
_BLOCK = re.compile(r"^(.*?)\.(\d+)(?:\.|$)")
MANY = 3
"""Blocks that read what one makes for many; a skip connection leads to one."""


class Block(NamedTuple):
    """A numbered child of a container, or the children of one number of several (`joined`)."""

    container: str
    number: int


def joined(*containers: str) -> str:
    """Name of lists whose children of one number are a block together."""
    return _JOIN.join(containers)


def lists_of(container: str) -> tuple[str, ...]:
    """The lists that a name is of: several where their children of one number are a block."""
    return tuple(container.split(_JOIN)) if _JOIN in container else (container,)


def names_of(block: Block) -> tuple[str, ...]:
    """How a block may be called: its name, and those of the children that make it up."""
    container, number = block
    return tuple(f"{name}.{number}" for name in dict.fromkeys((container, *lists_of(container))))


def block_of(path: str, nested: Collection[str] = ()) -> Block | None:
    """`("model.layers", 3)` for a module or parameter under `model.layers.3`.

    Args:
        path: FQN.
        nested: lists of blocks inside of numbered modules, which are no blocks then, and lists
            that are joined.
    """
    for container in nested:
        if _JOIN in container and (number := number_in(path, container)) is not None:
            return Block(container, number)
    match = _BLOCK.match(path)
    if match is None:
        return None
    inside = [name for name in nested if name.startswith(f"{match[1]}.{match[2]}.")]
    for container in inside:
        if (number := number_in(path, container)) is not None:
            return Block(container, number)
    return None if inside else Block(match[1], int(match[2]))


def number_in(path: str, container: str) -> int | None:
    """Number of the child of a container that a module or parameter stands in, if in one."""
    name = _list_in(path, container)
    if name is None:
        return None
    number = path[len(name) + 1 :].partition(".")[0]
    return int(number) if number.isdigit() else None


def _list_in(path: str, container: str) -> str | None:
    """The list of a container that a name stands in; blocks of several have the name of all."""
    if path.startswith(f"{container}."):
        return container
    if _JOIN not in container:
        return None
    return next((name for name in lists_of(container) if path.startswith(f"{name}.")), None)


def renumbered(path: str, container: str, by: int) -> str:
    """A name in a block of a container, in the block `by` numbers further on."""
    number = number_in(path, container)
    if number is None:
        return path
    name = _list_in(path, container)
    return f"{name}.{number + by}{path[len(f'{name}.{number}') :]}"


def within(path: str, block: Block) -> str:
    """A name without that of the block it is in, and with that of its list if the block has some.

    A name that is not in the block stays.
    """
    container, number = block
    if number_in(path, container) != number:
        return path
    name = _list_in(path, container)
    rest = path[len(f"{name}.{number}") :]
    return f"{name}{rest}" if _JOIN in container else rest


def section_of(block: Block, starts: Iterable[tuple[str, int]]) -> int:
    """How many sections of a block's container have begun before it, of those that begin so."""
    return sum(block.container == name and first <= block.number for name, first in starts)


def members_by(
    traced: TracedModel, owner_of: Callable[[str], Owner | None]
) -> dict[Owner, list[fx.Node]]:
    """Nodes of each block, in graph order.

    Args:
        traced: the graph.
        owner_of: block of a module or parameter, by FQN; None outside of blocks.
    """
    specs = {spec.node: spec for spec in traced.inputs}
    members: dict[Owner, list[fx.Node]] = {}
    inside: set[fx.Node] = set()
    for node in traced.graph.nodes:
        owner = None
        if node.op == "placeholder":
            spec = specs[node.name]
            owner = owner_of(spec.target) if spec.kind in ("parameter", "buffer") else None
            if spec.kind == "buffer":  # that of a module which several blocks have is none's own
                calls = (user for user in node.users if user.op == "call_function")
                readers = {owner_of(node_info(traced, user).module) for user in calls}
                owner = owner if readers <= {owner} else None
        elif node.op == "call_function":
            owner = owner_of(node_info(traced, node).module)
        # an alias of what no block made (a mask) serves all blocks, though the first one asked
        shared = node.target is torch.ops.aten.alias.default and not (
            inside & set(node.all_input_nodes)
        )
        if owner is not None and not shared:
            members.setdefault(owner, []).append(node)
            inside.add(node)
    return members


class Blocks:
    """The blocks of one graph.

    Attributes:
        members: nodes of each block, in graph order.
        place: block and position of each node in one.
    """

    def __init__(self, traced: TracedModel) -> None:
        self.traced = traced
        self.specs: dict[str, InputSpec] = {spec.node: spec for spec in traced.inputs}
        self.repeats: dict[str, list[Repeat]] = {}
        for repeat in traced.repeats:
            self.repeats.setdefault(repeat.container, []).append(repeat)
        self.members = members_by(traced, partial(block_of, nested=traced.nested))
        self.place: dict[str, tuple[Block, int]] = {
            node.name: (block, i)
            for block, nodes in self.members.items()
            for i, node in enumerate(nodes)
        }

    @cached_property
    def classes(self) -> dict[str, str]:
        """Representative of each node of a block, by name."""
        return self._classes()

    @cached_property
    def _repeat_of_block(self) -> dict[Block, Repeat | None]:
        return {
            block: next(
                (r for r in self.repeats.get(block.container, ()) if r.holds(block.number)), None
            )
            for block in self.members
        }

    def of(self, traced: TracedModel) -> Blocks:
        """Those of the same graph in another schedule."""
        assert traced.graph is self.traced.graph
        other = copy(self)
        other.traced = traced
        return other

    def rank(self, block: Block) -> int:
        """Position of a block among those of its container that the graph holds."""
        skipped = (
            repeat.skipped
            for repeat in self.repeats.get(block.container, ())
            if block.number >= repeat.first + repeat.period
        )
        return block.number - sum(skipped)

    def every(self) -> list[Block]:
        """All blocks of the model, by container in the order of their ops, then by number."""
        found: dict[Block, None] = {}
        for block in self.members:
            repeat = next(
                (r for r in self.repeats.get(block.container, ()) if r.holds(block.number)), None
            )
            numbers = [block.number] if repeat is None else repeat.instances()
            found |= dict.fromkeys(Block(block.container, number) for number in numbers)
        calls = (n.name for n in self.traced.graph.nodes if n.op == "call_function")
        running = (self.place[name][0] for name in calls if name in self.place)
        order = list(dict.fromkeys(b.container for b in (*running, *found)))
        return sorted(found, key=lambda b: (order.index(b.container), b.number))

    def repeat_of(self, name: str) -> Repeat | None:
        """The repeat whose blocks a node stands in for, if it does."""
        return self._repeat_of_block[self.place[name][0]] if name in self.place else None

    def copies(self, name: str) -> int:
        """How many times a node of the graph stands in the model."""
        repeat = self.repeat_of(name)
        return repeat.times if repeat is not None else 1

    def runs(self, name: str) -> int:
        """How many times a node runs in a step: once per microbatch, unless it is hoisted."""
        return 1 if name in self.traced.hoisted else self.traced.microbatches

    def weight(self, name: str) -> int:
        """How many times a node runs in a step, in all the places where it stands."""
        return self.copies(name) * self.runs(name)

    def edge_weight(self, producer: str, consumer: str) -> int:
        """How many times a use of a value happens in a step."""
        return self._uses(producer, consumer) * self.runs(consumer)

    def _uses(self, producer: str, consumer: str) -> int:
        """How many times a use of a value stands in the model.

        Towards later blocks the consumer counts, and towards earlier ones (gradients) the producer:
        among n equal blocks, n consume from the block before, and n hand on to it.
        """
        into, out_of = self.repeat_of(consumer), self.repeat_of(producer)
        if into is None:
            if out_of is None or consumer not in self.place:
                return 1
            later = self.place[consumer][0].number > self.place[producer][0].number
            return 1 if later else out_of.times
        if out_of is None and producer in self.place:
            source = self.place[producer][0]
            if source.container == into.container and into.unit(source.number) > 0:
                return 1
        return into.times

    def _classes(self) -> dict[str, str]:
        owners: dict[Any, Block] = {}
        representative: dict[str, str] = {}
        for block, nodes in self.members.items():
            section = section_of(block, self.traced.sections)
            described = tuple(self.describe(block, node) for node in nodes)
            signature = (block.container, section, described)
            owner = owners.setdefault(signature, block)
            for node, twin in zip(nodes, self.members[owner], strict=True):
                representative[node.name] = twin.name
        return representative

    def describe(self, block: Block, node: fx.Node) -> Any:
        """What two nodes of equal blocks have in common."""
        value = tensor_meta(node)
        shape = (tuple(value.shape), value.dtype) if value is not None else None
        if node.op == "placeholder":
            spec = self.specs[node.name]
            return (within(spec.target, block), shape, spec.trainable)
        args = unsalted(node.target, node.args)
        phase = node_info(self.traced, node).phase
        # contributions to the gradient of a shared value are added up block by block, where the
        # first has nothing to add to
        adds = phase == "backward" and node.target is torch.ops.aten.add.Tensor
        wired = map_aggregate((args, dict(node.kwargs)), lambda a: self._wire(block, a, adds))
        copies = is_reshape(node.target) and view_class(op_call(node, 1))
        return (str(node.target), shape, phase, str(wired), copies)

    def _wire(self, block: Block, operand: Any, adds: bool) -> Any:
        if not isinstance(operand, fx.Node):
            # rates and scales, which no placement depends on
            return "float" if type(operand) is float else repr(operand)
        if operand.name not in self.place:
            return ("outside", operand.name)
        source, position = self.place[operand.name]
        if source.container != block.container:
            return (source.container, source.number, position)
        if source.number != block.number:
            if self._is_shared(operand, source):
                return ("shared", operand.name)
            # by kind: the first and last blocks have a few nodes more or less
            value = tensor_meta(operand)
            shape = tuple(value.shape) if value is not None else None
            distance = self.rank(source) - self.rank(block)
            return ("neighbour", distance, "" if adds else str(operand.target), shape)
        return ("block", position)

    def _is_shared(self, node: fx.Node, source: Block) -> bool:
        """True for what a block makes for many others, such as a bias of all attention scores."""
        readers = {self.place[u.name][0] for u in node.users if u.name in self.place}
        others = {r for r in readers if r.container == source.container and r != source}
        return len(others) >= MANY
