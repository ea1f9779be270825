"""All-reduces that work in the memory of their operand, as DDP's do, instead of on a copy.

torch's functional all-reduce copies its operand. Where nothing else reads the operand after the
start of the collective, its in-place form gives the same result without the copy.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Hashable

import torch
from torch import Tensor, fx

from autopar.codegen.accumulate import add_up
from autopar.codegen.passes.sends import is_start, is_wait
from autopar.codegen.passes.strides import is_contiguous
from autopar.codegen.reuse import is_fresh
from autopar.core.work import is_away, is_view

__all__ = ["mark_in_place", "reduce_in_place"]

c10d = torch.ops._c10d_functional


def reduce_in_place(graph: fx.Graph, part_of: Callable[[fx.Node], Hashable]) -> int:
    """Let all-reduces of a joint graph work in place where that changes no value.

    The last thing that is done to a graph: nothing that moves nodes may come behind it.

    Args:
        graph: with fake values.
        part_of: what runs in one go, in the order of the graph; nothing is known of the order of
            nodes of two parts.

    Returns:
        The number of all-reduces that do.
    """
    found = _found(graph, part_of)
    for node in found:
        (operand,) = node.all_input_nodes
        node.target = c10d.all_reduce_.default
        node.meta["val"] = operand.meta["val"]
    return len(found)


def mark_in_place(graph: fx.Graph, part_of: Callable[[fx.Node], Hashable]) -> None:
    """Mark, for `Lifetimes`, all-reduces that will work in place wherever they are moved to.

    Those are the ones whose operand nothing else reads.
    """
    for node in _found(graph, part_of, alone=True):
        node.meta["in_place"] = True


def _found(
    graph: fx.Graph, part_of: Callable[[fx.Node], Hashable], alone: bool = False
) -> list[fx.Node]:
    position = {node: index for index, node in enumerate(graph.nodes)}
    found: list[fx.Node] = []
    for node in graph.nodes:
        if node.target is c10d.all_reduce.default:
            (operand,) = node.all_input_nodes
            owners = _owners(operand) if is_contiguous(operand) else ()  # as NCCL takes no other
            others = any(user not in (node, *owners) for owner in owners for user in owner.users)
            if owners and not (alone and others) and _is_free(node, owners, position, part_of):
                found.append(node)
    return found


def _may_view(node: fx.Node) -> bool:
    """True if a result may share its operand's memory: always, or as its strides are."""
    return is_view(node.target) or node.target is torch.ops.aten.contiguous.default


def _owners(operand: fx.Node) -> Collection[fx.Node]:
    """What may show the memory of a tensor that an op has made; none if it may be another's.

    By the ops and not by the storages of fake values: whether a reshape copies depends on strides.
    """
    maker = operand
    while _may_view(maker):
        maker = maker.all_input_nodes[0]
    if not _is_own(maker):
        return ()
    found = {maker: None}
    stack = [maker]
    while stack:
        node = stack.pop()
        parts = _may_view(node) and not isinstance(node.meta.get("val"), Tensor)
        for user in node.users:
            if _may_view(user) or (parts and user.target is operator.getitem):
                found[user] = None
                stack.append(user)
    return found


def _is_own(maker: fx.Node) -> bool:
    """True for what an op has made."""
    return is_wait(maker) or maker.target is add_up or is_fresh(maker)


def _is_free(
    start: fx.Node,
    owners: Collection[fx.Node],
    position: dict[fx.Node, int],
    part_of: Callable[[fx.Node], Hashable],
) -> bool:
    """True if `owners`, which may show the operand's memory, are made and read before the start."""
    part = part_of(start)
    for node in owners:
        if part_of(node) != part:
            return False
        for user in node.users:
            if user is start or user in owners:
                continue
            beside = is_start(user) or is_away(user.target)  # they read on behind their place
            if beside or part_of(user) != part or position[user] > position[start]:
                return False
    return True
