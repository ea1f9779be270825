"""Classes of identical blocks: nodes that share one choice.

Repeated layers (`model.layers.0`, `.1`, …) whose ops, shapes, arguments and wiring are equal form
a class; their nodes at the same position share decision variables. Layers that differ (the first
one, whose input is the embedding; alternating kinds) make classes of their own.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from autopar.core import ops as _ops  # noqa: F401  (defines the autopar ops)
from autopar.core.graph import TracedModel, node_info, tensor_meta

__all__ = ["block_of", "node_classes"]

_BLOCK = re.compile(r"^(.*?)\.(\d+)(?:\.|$)")
_SALTED = (torch.ops.autopar.dropout.default, torch.ops.autopar.uniform.default)

Block = tuple[str, int]


def block_of(path: str) -> Block | None:
    """`("model.layers", 3)` for a module or parameter under `model.layers.3`."""
    match = _BLOCK.match(path)
    return (match.group(1), int(match.group(2))) if match else None


def _members(traced: TracedModel) -> dict[Block, list[fx.Node]]:
    by_name = {spec.node: spec.target for spec in traced.inputs if spec.kind == "parameter"}
    members: dict[Block, list[fx.Node]] = {}
    inside: set[fx.Node] = set()
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            block = block_of(by_name[node.name]) if node.name in by_name else None
        elif node.op == "call_function":
            block = block_of(node_info(traced, node).module)
        else:
            block = None
        # an alias of what no block made (a mask) serves all blocks, though the first one asked
        shared = node.target is torch.ops.aten.alias.default and not (
            inside & set(node.all_input_nodes)
        )
        if block is not None and not shared:
            members.setdefault(block, []).append(node)
            inside.add(node)
    return members


def node_classes(traced: TracedModel) -> dict[str, str]:
    """Representative of each node by name; nodes of no repeated block represent themselves."""
    members = _members(traced)
    place: dict[fx.Node, tuple[Block, int]] = {
        node: (block, i) for block, nodes in members.items() for i, node in enumerate(nodes)
    }
    by_name = {spec.node: spec for spec in traced.inputs}

    def wire(block: Block, operand: Any) -> Any:
        if not isinstance(operand, fx.Node):
            return repr(operand)
        if operand not in place:
            return ("outside", operand.name)
        (container, index), position = place[operand]
        if container != block[0]:
            return (container, index, position)
        if index != block[1]:  # by kind: the first and last blocks have a few nodes more or less
            value = tensor_meta(operand)
            shape = tuple(value.shape) if value is not None else None
            return ("neighbour", index - block[1], str(operand.target), shape)
        return ("block", position)

    def describe(block: Block, node: fx.Node) -> Any:
        value = tensor_meta(node)
        shape = (tuple(value.shape), value.dtype) if value is not None else None
        if node.op == "placeholder":
            path = by_name[node.name].target
            return (path[len(f"{block[0]}.{block[1]}") :], shape, by_name[node.name].trainable)
        args = node.args
        if node.target in _SALTED:
            salt = 3 if node.target is _SALTED[0] else 1
            args = (*args[:salt], 0, *args[salt + 1 :])
        wired = map_aggregate(
            (args, dict(node.kwargs)),
            lambda a: wire(block, a),
        )
        phase = node_info(traced, node).phase
        return (str(node.target), shape, phase, str(wired))

    classes: dict[Any, Block] = {}
    representative: dict[str, str] = {}
    for block, nodes in members.items():
        signature = (block[0], tuple(describe(block, node) for node in nodes))
        owner = classes.setdefault(signature, block)
        for node, twin in zip(nodes, members[owner], strict=True):
            representative[node.name] = twin.name
    return representative
