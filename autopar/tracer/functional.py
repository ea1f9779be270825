"""In-place ops of the joint graph as ops that return their result.

Export removes what the model writes in place. What is left comes from ATen's own derivative
formulas and decompositions, which write into tensors that they made themselves:
``y = masked_fill_(x, m, 0)`` becomes ``y = masked_fill(x, m, 0)``, and later readers of `x` read
`y`. A write through a view becomes a scatter into what it is a view of. An op that is given its
result, ``mul(a, b, out=x)``, is first made one that is copied there.
"""

from __future__ import annotations

from itertools import pairwise
from operator import getitem
from typing import Any

import torch
from torch import fx

from autopar.errors import TraceError
from autopar.tracer.diagnose import user_line

__all__ = ["remove_mutations"]

aten = torch.ops.aten


def remove_mutations(graph: fx.Graph) -> None:
    """Replace every in-place op of the graph, in order.

    Raises:
        TraceError: an op writes to what other nodes see through a view that has no inverse, or has
            no form that returns its result.
    """
    for node in list(graph.nodes):
        if _is_mutable(node) and _written(node) is None:
            _copy_results(node)
    position = {node: (index, 0) for index, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        written = _written(node)
        if written is None:
            continue
        functional = _functional(node.target)
        if functional is None:
            raise _without_form(node)
        moved = torch.Tag.inplace_view in node.target.tags  # other views keep their shapes
        node.target = functional
        renewed = {written: node} if moved else _renewed(written, node, position)
        for old, new in renewed.items():
            for user in _late(old, node, position):
                user.replace_input_with(old, new)


def _without_form(node: fx.Node) -> TraceError:
    return TraceError(
        f"cannot trace {user_line(node)}\n  {node.target} writes in place, and has no form that "
        "returns its result: write the call with ops that do, as y = x * 2 for x.mul_(2)"
    )


def _copy_results(node: fx.Node) -> None:
    """Let an op that is given its results return them, and copy each to where it was to be."""
    target: Any = node.target
    places = [a.name for a in target._schema.arguments if a.is_out]
    functional = _returning(target, len(places))
    if functional is None:
        raise _without_form(node)
    graph, kwargs = node.graph, {k: v for k, v in node.kwargs.items() if k not in places}
    with graph.inserting_before(node):
        result = graph.call_function(functional, node.args, kwargs)
        result.meta.update(node.meta)
        fakes = fx.map_arg((node.args, kwargs), lambda n: n.meta["val"])
        result.meta["val"] = functional(*fakes[0], **fakes[1])
        results = [result]
        if len(places) > 1:
            results = [graph.call_function(getitem, (result, i)) for i in range(len(places))]
            for i, each in enumerate(results):
                each.meta.update(node.meta, val=result.meta["val"][i])
        copies = []
        for name, each in zip(places, results, strict=True):
            place: Any = node.kwargs[name]
            if place.target is aten.empty.memory_format:  # of no size: torch makes it fit
                place.update_arg(0, list(each.meta["val"].shape))
                place.meta["val"] = each.meta["val"].to(place.meta["val"].dtype)
            copies.append(graph.call_function(aten.copy_.default, (place, each)))
            copies[-1].meta.update(node.meta, val=place.meta["val"])
    if len(places) == 1:
        node.replace_all_uses_with(copies[0])
    for user in list(node.users):  # of several, each is picked by its number
        index: Any = user.args[1]
        user.replace_all_uses_with(copies[index])
        graph.erase_node(user)
    graph.erase_node(node)


def _returning(target: Any, results: int) -> Any:
    """`mul.Tensor` of `mul.out`; None where there is none."""
    namespace, name = target._schema.name.split("::")
    packet = getattr(getattr(torch.ops, namespace), name)
    wanted = [(a.name, str(a.type)) for a in target._schema.arguments if not a.is_out]
    overloads = (getattr(packet, name) for name in packet.overloads())
    return next(
        (
            op
            for op in overloads
            if not op._schema.is_mutable
            and _parameters(op) == wanted
            and len(op._schema.returns) == results
        ),
        None,
    )


# index of a node of the first graph, and number among the calls put behind it
_Positions = dict[fx.Node, tuple[int, int]]


def _late(node: fx.Node, write: fx.Node, position: _Positions) -> list[fx.Node]:
    """The readers of a node behind a write."""
    return [user for user in node.users if position[user][0] > position[write][0]]


def _renewed(written: fx.Node, write: fx.Node, position: _Positions) -> dict[fx.Node, fx.Node]:
    """What each node that shares the written memory is after the write.

    The new value climbs from view to view up to their base, and all views are taken of it again.
    """
    chain = [written]
    while (source := _source_of_view(chain[-1])) is not None:
        chain.append(source)
    value = write
    for view, source in pairwise(chain):
        value = _append(value, write, position, *_scattered(view, source, value))
    renewed = {chain[-1]: value}
    for other in sorted(_aliases(written), key=position.__getitem__):
        if other is chain[-1] or position[other][0] >= position[write][0]:
            continue
        first = other.args[0] if other.args else None
        if isinstance(first, fx.Node) and first in renewed:
            args = (renewed[first], *other.args[1:])
            renewed[other] = _append(value, write, position, other.target, args)
            value = renewed[other]
        elif late := _late(other, write, position):
            raise TraceError(
                f"{write.target} writes to {written.name}, which {late[0].name} reads through "
                f"{other.name}, another view of it. Clone it before the write."
            )
    renewed[write] = renewed[written]  # an in-place op returns what it wrote to
    return renewed


_RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_SQUEEZES = (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
_SCATTERS = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
}
_INVERTIBLE = (
    *_RESHAPES,
    *_SQUEEZES,
    *_SCATTERS,
    aten.unsqueeze.default,
    aten.transpose.int,
    aten.t.default,
    aten.permute.default,
    aten.alias.default,
    aten.detach.default,
)


def _source_of_view(node: fx.Node) -> fx.Node | None:
    """What a node is a view of, if a write to it can be taken back there."""
    source = node.args[0] if node.args else None
    return source if isinstance(source, fx.Node) and node.target in _INVERTIBLE else None


def _scattered(view: fx.Node, source: fx.Node, value: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """The call that gives the source of a view, where the view has a new value."""
    target: Any = view.target
    if target in _SCATTERS:
        return _SCATTERS[target], (source, value, *view.args[1:])
    if target is aten.unsqueeze.default:
        return aten.squeeze.dim, (value, *view.args[1:])
    if target is aten.permute.default:
        dims: Any = view.args[1]
        rank = len(dims)
        order = [d % rank for d in dims]
        return target, (value, [order.index(d) for d in range(rank)])
    if target in (aten.transpose.int, aten.t.default, aten.alias.default, aten.detach.default):
        return target, (value, *view.args[1:])
    return aten.reshape.default, (value, list(source.meta["val"].shape))


def _append(
    after: fx.Node, write: fx.Node, position: _Positions, target: Any, args: Any
) -> fx.Node:
    """A call behind `after`, which counts as part of the write."""
    graph = after.graph
    with graph.inserting_after(after):
        node = graph.call_function(target, args)
    node.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]))
    position[node] = (position[write][0], position[after][1] + 1)
    return node


def _is_mutable(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def _written(node: fx.Node) -> fx.Node | None:
    """The first argument of an op that writes to it."""
    if not _is_mutable(node):
        return None
    target: Any = node.target
    info = target._schema.arguments[0].alias_info
    first = node.args[0] if node.args else None
    return first if isinstance(first, fx.Node) and info is not None and info.is_write else None


def _functional(target: Any) -> Any:
    """`add.Tensor` of `add_.Tensor`; None where there is none."""
    name = target._schema.name.split("::")
    if not name[1].endswith("_"):
        return None
    packet = getattr(getattr(torch.ops, name[0]), name[1].rstrip("_"), None)
    if packet is None:
        return None
    wanted = _parameters(target)
    same = getattr(packet, target._overloadname, None)
    if same is not None and [t for _, t in _parameters(same)] == [t for _, t in wanted]:
        return same
    # `pow_.Scalar` is `pow.Tensor_Scalar`, `transpose_` is `transpose.int`
    overloads = (getattr(packet, name) for name in packet.overloads())
    return next((op for op in overloads if _parameters(op) == wanted), None)


def _parameters(target: Any) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in target._schema.arguments]


def _aliases(node: fx.Node) -> set[fx.Node]:
    """Every node that shares storage with `node`, as far as the ops' schemas tell."""
    found, stack = {node}, [node]
    while stack:
        current = stack.pop()
        # the parts of a split do not overlap, so that one part does not show through another
        parts = isinstance(current.meta.get("val"), (list, tuple)) and not found.isdisjoint(
            current.users
        )
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
