"""In-place ops of the joint graph as ops that return their result.

Export removes what the model writes in place. What is left comes from ATen's own derivative
formulas and decompositions, which write into tensors that they made themselves:
``y = masked_fill_(x, m, 0)`` becomes ``y = masked_fill(x, m, 0)``, and later readers of `x` read
`y`. A write that shows through another view of the same storage is an error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.errors import TraceError

__all__ = ["remove_mutations"]


def remove_mutations(graph: fx.Graph) -> None:
    """Replace every in-place op of the graph, in order.

    Raises:
        TraceError: an op writes to what other nodes see through another view, or has no form
            that returns its result.
    """
    position = {node: index for index, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        written = _written(node)
        if written is None:
            continue
        functional = _functional(node.target)
        if functional is None:
            raise TraceError(f"{node.target} writes in place and has no form that does not")
        for other in _aliases(written):
            late = [u for u in other.users if position[u] > position[node]]
            if other is not written and position[other] < position[node] and late:
                raise TraceError(
                    f"{node.target} writes to {written.name}, which {late[0].name} reads through "
                    f"{other.name}, another view of it. Clone it before the write."
                )
        node.target = functional
        for user in list(written.users):
            if position[user] > position[node]:
                user.replace_input_with(written, node)


def _written(node: fx.Node) -> fx.Node | None:
    """The first argument of an op that writes to it."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return None
    info = target._schema.arguments[0].alias_info
    first = node.args[0] if node.args else None
    return first if isinstance(first, fx.Node) and info is not None and info.is_write else None


def _functional(target: Any) -> Any:
    """`add.Tensor` of `add_.Tensor`; None where there is none."""
    name = target._schema.name.split("::")
    if not name[1].endswith("_"):
        return None
    packet = getattr(getattr(torch.ops, name[0]), name[1].rstrip("_"), None)
    return getattr(packet, target._overloadname, None)


def _aliases(node: fx.Node) -> set[fx.Node]:
    """Every node that shares storage with `node`, as far as the ops' schemas tell."""
    found, stack = {node}, [node]
    while stack:
        current = stack.pop()
        # the parts of a split do not overlap, so that one part does not show through another
        parts = isinstance(current.meta.get("val"), (list, tuple))
        near = [] if parts else [user for user in current.users if _is_view_of(user, current)]
        near += [arg for arg in current.all_input_nodes if _is_view_of(current, arg)]
        stack += [n for n in near if n not in found]
        found.update(near)
    return found


def _is_view_of(node: fx.Node, source: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.op == "call_function"  # getitem
    return any(
        argument.alias_info is not None and node.args[index] is source
        for index, argument in enumerate(node.target._schema.arguments[: len(node.args)])
    )
