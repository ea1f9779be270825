"""Calls of blocks in a captured forward, of which some are left out (`skipped_calls.py`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import fx

from autopar.core.blocks import number_in
from autopar.core.graph import Repeat
from autopar.tracer.cleanup import module_of
from autopar.tracer.skipped_calls import Unlike, block_call

__all__ = ["calls_of_blocks", "given_to", "hand_on", "inside_of", "is_skipped", "left_out_of"]


def is_skipped(node: fx.Node) -> bool:
    """True for the call of a block that is left out."""
    return node.target is block_call and node.args[3] is True


def given_to(node: fx.Node) -> Any:
    """The tensors that a block was called with."""
    return node.args[0]


def calls_of_blocks(gm: fx.GraphModule) -> list[fx.Node]:
    """The calls, those in regions too; a skipped one forgets whose results it has the shapes of."""
    parts = (part for part in gm.modules() if isinstance(part, fx.GraphModule))
    calls = [node for part in parts for node in _calls(part.graph)]
    for node in calls:
        if is_skipped(node):
            node.args = (node.args[0], [], *node.args[2:])
    return calls


def _calls(graph: fx.Graph) -> list[fx.Node]:
    return graph.find_nodes(op="call_function", target=block_call)


def left_out_of(repeats: Iterable[Repeat], graph: fx.Graph) -> tuple[Repeat, ...]:
    """Those of some repeats of which blocks are left out of a graph, with as many as it skips."""
    found = []
    for repeat in repeats:
        paths = (str(node.args[2]) for node in _calls(graph) if is_skipped(node))
        numbers = {number_in(path, repeat.container) for path in paths} - {None}
        if numbers:
            found.append(replace(repeat, times=1 + len(numbers) // repeat.period))
    return tuple(found)


def inside_of(graph: fx.Graph) -> set[fx.Node]:
    """What blocks compute that are not left out, but for the calls' results."""
    calls = _calls(graph)
    paths = {str(node.args[2]) for node in calls if not is_skipped(node)}
    apart = {*calls, *(item for node in calls for item in node.users)}
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "get_attr":
            inside = bool(node.users) and found.issuperset(node.users)
        else:
            parts = module_of(node).split(".")
            inside = any(".".join(parts[:i]) in paths for i in range(1, len(parts) + 1))
        if inside and node not in apart:
            found.add(node)
    return found


def hand_on(graph: fx.Graph) -> None:
    """Let what reads the results of blocks read them from what computes these.

    Raises:
        Unlike: a call that is left out is there still.
    """
    for node in _calls(graph):
        if is_skipped(node):
            raise Unlike(f"{node.args[2]} is not called as others are")
        results: Any = node.args[1]
        for item in list(node.users):
            index: Any = item.args[1]
            item.replace_all_uses_with(results[index])
            graph.erase_node(item)
        graph.erase_node(node)
