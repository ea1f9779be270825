"""The blocks of a list in a captured forward, and whether two of them do the same."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from typing import Any

from torch import fx
from torch.fx.node import map_aggregate

from autopar.core.blocks import MANY, Block, block_of, joined, number_in, within
from autopar.core.graph import tensor_meta
from autopar.tracer.block_calls import given_to
from autopar.tracer.cleanup import module_of
from autopar.tracer.regions import calls_in, region_of
from autopar.tracer.skipped_calls import block_call

__all__ = ["Segments"]


class Segments:
    """The nodes of each block of a list and those behind it, up to the next block, by number.

    Args:
        graph: a captured forward.
        container: the list, or several lists whose children of one number are a block.
        named: what a placeholder is to a block: a parameter's or buffer's name, a constant's value.
        hidden: nodes that are left out of the blocks.
    """

    def __init__(
        self,
        graph: fx.Graph,
        container: str,
        named: Mapping[fx.Node, str],
        hidden: Collection[fx.Node] = (),
    ) -> None:
        self.container = container
        self.named = named
        self.hidden = hidden
        self.nodes = _segments(graph, container, hidden)
        self.numbers = list(self.nodes)
        self.place = {n: (k, i) for k, own in self.nodes.items() for i, n in enumerate(own)}
        self._rank = {number: i for i, number in enumerate(self.nodes)}

    def ops(self, number: int) -> list[tuple[Any, ...]]:
        """What a block computes, in order, whatever it reads."""
        return self._ops[number]

    @cached_property
    def _ops(self) -> dict[int, list[tuple[Any, ...]]]:
        return {k: [self._op(k, node) for node in own] for k, own in self.nodes.items()}

    def operands(self, number: int, period: int) -> list[str]:
        """What the ops of a block read, said alike for blocks that read the same of neighbours.

        Args:
            number: of the block.
            period: how far away a block is still a neighbour.
        """
        return [self._operands(number, node, period) for node in self.nodes[number]]

    def common(self, number: int, other: int) -> int:
        """How many ops a block begins with as another does."""
        pairs = zip(self.ops(number), self.ops(other), strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    def _block(self, number: int) -> Block:
        return Block(self.container, number)

    def is_own(self, node: fx.Node) -> bool:
        """True for what modules of the list compute."""
        return _number(node, self.container) is not None

    def beside(self, repeating: Collection[str]) -> str | None:
        """The list, joined with others that compute for its blocks; None where they cannot be.

        A child of another list is part of the block of its number, if it runs behind that block's
        first op and before the next block. What several blocks use is of none of them.

        Args:
            repeating: lists of blocks.
        """
        parent = self.container.rpartition(".")[0]
        others: dict[str, bool] = {}
        for number in self.numbers[:-1]:  # behind the last is the rest of the model
            for path in self._paths(number):
                block = _foreign(path, self.container, parent)
                if block is not None:
                    with_number = others.get(block.container, True) and block.number == number
                    others[block.container] = with_number
        if any(not with_number and name in repeating for name, with_number in others.items()):
            return None
        return joined(
            self.container, *(name for name, with_number in others.items() if with_number)
        )

    def _paths(self, number: int) -> Iterator[str]:
        for node in self.nodes[number]:
            yield module_of(node)
            yield from (self.named.get(operand, "") for operand in node.all_input_nodes)

    def _op(self, number: int, node: fx.Node) -> tuple[Any, ...]:
        region = region_of(node)
        target = str(node.target) if region is None else _described_region(region)
        value = tensor_meta(node)
        shape = None if value is None else (tuple(value.shape), value.dtype)
        return (node.op, target, within(module_of(node), self._block(number)), shape)

    def _operands(self, number: int, node: fx.Node, period: int) -> str:
        def said(operand: Any) -> Any:
            if not isinstance(operand, fx.Node):
                # rates and scales, which no placement depends on
                return ("float", operand == 0.0) if type(operand) is float else repr(operand)
            if operand in self.named:
                return within(self.named[operand], self._block(number))
            maker, position = self.place.get(operand, (-1, 0))
            distance = self._rank[number] - self._rank.get(maker, -1)
            far = maker < 0 or distance > period or self._is_shared(operand, maker)
            return operand.name if far else (distance, position)

        args = given_to(node) if node.target is block_call else (node.args, dict(node.kwargs))
        return str(map_aggregate(args, said))

    def _is_shared(self, node: fx.Node, maker: int) -> bool:
        """True for what a block makes for many others, such as a bias of all attention scores."""
        readers = {self.place[user][0] for user in node.users if user in self.place}
        return len(readers - {maker}) >= MANY


def _described_region(region: fx.GraphModule) -> str:
    places = {node: i for i, node in enumerate(region.graph.nodes)}

    def said(operand: Any) -> Any:
        return places[operand] if isinstance(operand, fx.Node) else repr(operand)

    rows = []
    for node in places:
        inner = region_of(node)
        target = str(node.target) if inner is None else _described_region(inner)
        target = "" if node.op == "placeholder" else target
        rows.append((node.op, target, str(map_aggregate((node.args, dict(node.kwargs)), said))))
    return str(rows)


def _foreign(path: str, container: str, parent: str) -> Block | None:
    """The block of another list that a name is in."""
    if number_in(path, container) is not None:
        return None
    inside = parent and path.startswith(f"{parent}.")
    block = block_of(path[len(parent) + 1 :] if inside else path)
    if block is None or not inside:
        return None if block is None or container.startswith(f"{block.container}.") else block
    return Block(f"{parent}.{block.container}", block.number)


def _segments(
    graph: fx.Graph, container: str, hidden: Collection[fx.Node]
) -> dict[int, list[fx.Node]]:
    """Nodes of each block and those behind it; none where the blocks do not run one by one."""
    segments: dict[int, list[fx.Node]] = {}
    current = -1
    for node in graph.nodes:
        if node.op in ("placeholder", "output") or node in hidden:
            continue
        number = _number(node, container)
        if number is not None and number != current:
            if number < current:
                return {}
            current = number
            segments[number] = []
        if segments:
            segments[current].append(node)
    return segments


def _number(node: fx.Node, container: str) -> int | None:
    """Number of the block that a call is in; that of a region is the block of its first op."""
    calls = (node, *node.users) if node.op == "get_attr" else (node, *node.all_input_nodes)
    regions = (inner for call in calls if call.op == "get_attr" for inner in calls_in(call))
    own = calls if node.op == "get_attr" else (node,)
    numbers = (number_in(module_of(each), container) for each in (*own, *regions))
    return next((n for n in numbers if n is not None), None)
