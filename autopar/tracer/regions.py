"""Regions of a captured forward: parts with another precision, without gradients, or recomputed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from torch import fx

__all__ = ["calls_in", "drop_operands", "named_graphs", "region_of", "unread_operands"]


def region_of(node: fx.Node) -> fx.GraphModule | None:
    """The region that a node names."""
    if node.op != "get_attr":
        return None
    owner = node.graph.owning_module
    assert owner is not None and isinstance(node.target, str)
    value: object = owner
    for name in node.target.split("."):
        value = getattr(value, name)
    return value if isinstance(value, fx.GraphModule) else None


def calls_in(node: fx.Node) -> Iterator[fx.Node]:
    """The calls in the regions that a node names, or calls."""
    part = region_of(node)
    if part is not None:
        for inner in part.graph.nodes:
            if inner.op == "call_function":
                yield inner
            yield from calls_in(inner)


def named_graphs(
    graph: fx.Graph, named: Mapping[fx.Node, str]
) -> Iterator[tuple[fx.Graph, dict[fx.Node, str]]]:
    """A graph and those of its regions, each with the names of its placeholders.

    Args:
        graph: a captured forward, or a region of it.
        named: of its placeholders.
    """
    yield graph, dict(named)
    for _, region, operands in _called(graph):
        inner = region.graph.find_nodes(op="placeholder")
        pairs = zip(inner, operands, strict=True)
        yield from named_graphs(region.graph, {own: named[x] for own, x in pairs if x in named})


def unread_operands(graph: fx.Graph) -> set[fx.Node]:
    """Placeholders of regions that nothing reads."""
    found: set[fx.Node] = set()
    for _, region, _ in _called(graph):
        found |= unread_operands(region.graph)
        found.update(own for own in region.graph.find_nodes(op="placeholder") if not own.users)
    return found


def drop_operands(graph: fx.Graph, besides: Collection[fx.Node]) -> None:
    """Drop what regions are given and do not read, in place.

    Args:
        graph: a captured forward, or a region of it.
        besides: placeholders that stay.
    """
    for call, region, operands in _called(graph):
        drop_operands(region.graph, besides)
        inner = region.graph.find_nodes(op="placeholder")
        gone = [own for own in inner if not own.users and own not in besides]
        kept = (x for own, x in zip(inner, operands, strict=True) if own not in gone)
        call.args = (*call.args[: len(call.args) - len(operands)], *kept)
        for own in gone:
            region.graph.erase_node(own)
        region.recompile()


def _called(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.GraphModule, list[fx.Node]]]:
    """Calls of regions, with the operands that these are given one by one."""
    for node in graph.nodes:
        named = [x for x in node.all_input_nodes if region_of(x) is not None]
        if node.op != "call_function" or len(named) != 1 or named[0] not in node.args:
            continue
        region = region_of(named[0])
        behind = node.args[node.args.index(named[0]) + 1 :]
        operands = [x for x in behind if isinstance(x, fx.Node)]
        if region is None or len(operands) < len(behind):
            continue
        if len(operands) == len(region.graph.find_nodes(op="placeholder")):
            yield node, region, operands
