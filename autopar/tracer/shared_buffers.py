"""Buffers of a module that stands in several places, such as a batch norm of several branches.

An export has an input for each name of a buffer, and reads and writes the one of its last name.
"""

from __future__ import annotations

from typing import Any

from torch import fx

__all__ = ["read_shared_once"]


def read_shared_once(exported: Any) -> None:
    """Let a buffer of a module that stands in several places be read, and written, by its first
    name alone: `run_decompositions` refuses writes to an input that is given twice.
    """
    graph = exported.graph_module.graph
    nodes = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    first: dict[int, fx.Node] = {}
    for spec in exported.graph_signature.input_specs:
        if spec.kind.name != "BUFFER":
            continue
        values = exported.state_dict if spec.persistent else exported.constants
        value, node = values[spec.target], nodes[spec.arg.name]
        known = first.setdefault(id(value), node)
        if known is not node:
            node.replace_all_uses_with(known)
            values[spec.target] = value.clone()
    exported.graph_module.recompile()
