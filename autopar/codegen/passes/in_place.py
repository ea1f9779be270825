"""All-reduces that work in the memory of their operand, as DDP's do, and not on a copy of it.

torch's functional all-reduce copies what it is given. Where nothing else reads the operand behind
the start of the collective, its in-place form gives the same result without the copy.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autopar.codegen.passes.lifetimes import is_start

__all__ = ["reduce_in_place"]

c10d = torch.ops._c10d_functional


def reduce_in_place(graph: fx.Graph) -> int:
    """Let all-reduces of a joint graph work in place where that changes no value.

    The last thing that is done to a graph: nothing that moves nodes may come behind it.

    Args:
        graph: with fake values and phases.

    Returns:
        The number of all-reduces that do.
    """
    position = {node: index for index, node in enumerate(graph.nodes)}
    shown = _shown(graph)
    count = 0
    for node in graph.nodes:
        if node.target is not c10d.all_reduce.default:
            continue
        (operand,) = node.all_input_nodes
        if _is_free(node, shown[_storage(operand)], position):
            node.target = c10d.all_reduce_.default
            node.meta["val"] = operand.meta["val"]
            count += 1
    return count


def _shown(graph: fx.Graph) -> dict[int, list[fx.Node]]:
    """The nodes that show a storage; the wait for a collective has one of its own."""
    shown: dict[int, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "call_function"):
            for value in pytree.tree_leaves(node.meta.get("val")):
                if isinstance(value, Tensor):
                    shown[value.untyped_storage()._cdata].append(node)
    return shown


def _storage(node: fx.Node) -> int:
    value = node.meta["val"]
    assert isinstance(value, Tensor)
    return value.untyped_storage()._cdata


def _is_free(start: fx.Node, owners: list[fx.Node], position: dict[fx.Node, int]) -> bool:
    """True if `owners`, which show the operand's storage, are made and read before the start."""
    phase = start.meta.get("phase")
    for node in owners:
        if node.op != "call_function" or is_start(node):
            return False
        if node.meta.get("phase") != phase:  # of another part, which may run on its own
            return False
        for user in node.users:
            if user is start or user in owners:
                continue
            if is_start(user) or position[user] > position[start]:
                return False
    return True
