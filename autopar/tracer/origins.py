"""Which module, line and phase each node of the joint graph comes from."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from autopar.core.graph import NodeInfo
from autopar.tracer.cleanup import module_of, source_of
from autopar.tracer.replay import Mark

__all__ = ["note_phases", "origins"]


def origins(graph: fx.Graph, marks: Iterable[Mark]) -> dict[str, NodeInfo]:
    """Module and line of each node: those of the op whose mark precedes it."""
    found: dict[str, NodeInfo] = {}
    starts: dict[fx.Node, list[fx.Node]] = {}
    for before, origin in marks:
        starts.setdefault(before, []).append(origin)
    current: fx.Node | None = None
    for origin in starts.get(graph._root, []):
        current = origin
    for node in graph.nodes:
        if node.op == "call_function" and current is not None:
            found[node.name] = NodeInfo("forward", module_of(current), source_of(current))
        for origin in starts.get(node, []):
            current = origin
    return found


def note_phases(graph: fx.Graph, info: dict[str, NodeInfo], forward_results: set[fx.Node]) -> None:
    """Forward is what the user's outputs and the buffers need; the rest is backward.

    What depends on no gradient but is only used by the backward (a power for a derivative)
    counts as backward where it stands behind the first op that does.
    """
    needed: set[fx.Node] = set()
    stack = list(forward_results)
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack.extend(node.all_input_nodes)
    started = False
    for node in graph.nodes:
        if node.op == "placeholder":
            continue
        started = started or any(n.name.startswith("tangent_") for n in node.all_input_nodes)
        known = info.get(node.name, NodeInfo("forward", "", ""))
        if node not in needed and (started or not forward_results):
            known = NodeInfo("backward", known.module, known.source)
        info[node.name] = known
