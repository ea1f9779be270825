"""Fan-out points: one redistribution may serve several readers of a tensor.

Three kinds of alias give the solver a place to redistribute once:

- behind a parameter that forward and backward read: the copy that compute reads may be gathered
  once a step (ZeRO stages 1 and 2) or at each use (stage 3; Rajbhandari et al. 2020, 1910.02054);
- behind a contraction whose result, perhaps a partial sum, is read more than once: it is reduced
  before it is saved, not once for the forward and again for the backward;
- in front of contractions that read one activation (query, key and value projections): it is
  gathered once. Forward and backward readers get one each, so that what is saved in between stays
  the sharded tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping

import torch
from torch import fx

from autopar.core.blocks import block_of
from autopar.core.graph import NodeInfo
from autopar.core.ops import REARRANGING
from autopar.core.recurrent import RECURRENT, RECURRENT_BACKWARD

__all__ = ["insert_fanouts"]

_READERS = (
    torch.ops.autopar.einsum.default,
    torch.ops.autopar.attention.default,
    torch.ops.autopar.attention_backward.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten.convolution_backward.default,
    RECURRENT,
    RECURRENT_BACKWARD,
)


_SUMMING = (
    torch.ops.autopar.einsum.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten.embedding.default,
)


def insert_fanouts(
    graph: fx.Graph,
    info: MutableMapping[str, NodeInfo],
    parameters: Collection[str],
    nested: Collection[str] = (),
) -> None:
    """Insert all kinds of alias, in place.

    Args:
        graph: forward and backward.
        info: origin of each node; those of the aliases are added.
        parameters: names of their placeholders.
        nested: lists of blocks inside of numbered modules.
    """
    for parameter in [n for n in graph.nodes if n.op == "placeholder" and n.name in parameters]:
        node = _as_read(parameter)
        users = [n for n in node.users if n.op == "call_function"]
        first = min(users, default=None)
        if first is not None and {info[u.name].phase for u in users} == {"forward", "backward"}:
            _alias(graph, node, first, users)
            info[first.prev.name] = info[first.name]
    for node in list(graph.nodes):
        if node.target in _SUMMING and len(node.users) > 1:
            _alias(graph, node, node.next, list(node.users))
            info[node.next.name] = info[node.name]
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        for readers in _reading_together(node, info, nested):
            if len(readers) > 1:
                first = min(readers)
                _alias(graph, node, first, readers)
                info[first.prev.name] = info[first.name]


def _reading_together(
    node: fx.Node, info: Mapping[str, NodeInfo], nested: Collection[str]
) -> list[list[fx.Node]]:
    """Contractions that one alias of an activation may serve.

    What one block has made for others (a bias of attention) they read apart in the backward: the
    last block comes first there, and would hand its alias on to all of them.
    """
    found: dict[object, list[fx.Node]] = {}
    made = block_of(info[node.name].module, nested)
    for user in node.users:
        if user.target in _READERS:
            phase = info[user.name].phase
            apart = phase == "backward" and made is not None
            reader = apart and block_of(info[user.name].module, nested)
            found.setdefault((phase, reader), []).append(user)
    return list(found.values())


def _as_read(parameter: fx.Node) -> fx.Node:
    """The parameter in the shape and dtype that compute reads it in."""
    node = parameter
    while len(node.users) == 1:
        (user,) = node.users
        if user.target not in REARRANGING:
            break
        node = user
    return node


def _alias(
    graph: fx.Graph,
    node: fx.Node,
    before: fx.Node,
    readers: list[fx.Node],
) -> None:
    """Put an alias of `node` before another node and hand it to `readers`."""
    with graph.inserting_before(before):
        alias = graph.call_function(torch.ops.aten.alias.default, (node,))
    alias.meta["val"] = node.meta["val"]
    for reader in readers:
        reader.replace_input_with(node, alias)
