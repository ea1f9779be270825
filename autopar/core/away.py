"""Moves what blocks keep for their recomputation to host memory and back (Rajbhandari et al. 2021,
arXiv 2104.07857; DeepSpeed calls it `cpu_checkpointing`).

The backward of a block whose forward is recomputed reads what came into the block. Each such
activation that only this block's backward reads goes to the host and comes back::

    forward of the block     h = to_host(x)       in front of the first op that reads x
    its backward             y = from_host(h)     in front of the first op that reads x, now y

An activation that another reader keeps on the device anyway stays there, and so does one that
several blocks read (masks, tables of a rotary embedding, the output of an encoder): it would come
back once for each of them, and free its bytes only once.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.core.blocks import Block, Blocks
from autopar.core.graph import NodeInfo, TracedModel, tensor_meta
from autopar.core.host import FROM_HOST, TO_HOST
from autopar.core.work import is_view

__all__ = ["sent_away"]


def sent_away(traced: TracedModel, info: dict[str, NodeInfo], blocks: Collection[Block]) -> None:
    """Let what each of some blocks alone keeps wait in host memory.

    Args:
        traced: a step whose blocks are computed again; its graph is changed.
        info: of `traced`; it gets what is known of the new nodes.
        blocks: the blocks.
    """
    known = Blocks(traced)
    order = {node: index for index, node in enumerate(traced.graph.nodes)}
    for block, value in list(_kept_alone(traced, known, blocks)):
        readers = _readers(traced, value, "forward")
        forward = [node for node in readers if _block(known, node) == block]
        if forward:
            first = min(forward, key=order.__getitem__)
            again = sorted(_readers(traced, value), key=order.__getitem__)
            _send(traced, info, value, first, again)
    traced.graph_module.recompile()


def _send(
    traced: TracedModel,
    info: dict[str, NodeInfo],
    value: fx.Node,
    before: fx.Node,
    readers: Sequence[fx.Node],
) -> None:
    """Let `readers`, in order, read what comes back of what leaves in front of a forward op."""
    device = value.meta["val"].device
    away = _node(traced, "to_host", before, TO_HOST, value, value)
    back = _node(traced, "from_host", readers[0], FROM_HOST, away, value, device=device)
    info[away.name] = info[before.name]
    info[back.name] = replace(info[readers[0].name], recomputed=True)
    for reader in readers:
        reader.replace_input_with(value, back)


def _node(
    traced: TracedModel,
    way: str,
    before: fx.Node,
    target: Callable[..., Any],
    source: fx.Node,
    value: fx.Node,
    **options: Any,
) -> fx.Node:
    """A copy of a value, in front of an op."""
    with traced.graph.inserting_before(before):
        node = traced.graph.create_node(
            "call_function", target, (source,), options, name=f"{way}_of_{value.name}"
        )
    node.meta = {**value.meta, "origin": node.name}
    node.meta.pop("again", None)
    return node


def _kept_alone(
    traced: TracedModel, known: Blocks, blocks: Collection[Block]
) -> Iterator[tuple[Block, fx.Node]]:
    """Forward values whose memory lives on for the backward of one block, which did not make it."""
    shown: dict[fx.Node, list[fx.Node]] = defaultdict(list)  # by whose memory it is
    for node in traced.graph.nodes:
        if _phase(traced, node) == "forward" and tensor_meta(node) is not None:
            shown[_owner(node)].append(node)
    for owner, nodes in shown.items():
        read = [node for node in nodes if _readers(traced, node)]
        lasting = any(user.op == "output" for node in nodes for user in node.users)
        if len(read) != 1 or lasting or not _is_activation(traced, owner):
            continue
        (value,) = read
        found = {_block(known, reader) for reader in _readers(traced, value)}
        (block, *others) = found
        mine = _block(known, value) == block
        if block in blocks and not others and not mine and _is_dense(value):
            assert block is not None
            yield block, value


def _block(known: Blocks, node: fx.Node) -> Block | None:
    return known.place[node.name][0] if node.name in known.place else None


def _phase(traced: TracedModel, node: fx.Node) -> str:
    return traced.info[node.name].phase if node.op == "call_function" else ""


def _owner(node: fx.Node) -> fx.Node:
    """The node whose memory one shows."""
    while node.op == "call_function":
        part = node.target is operator.getitem and is_view(node.all_input_nodes[0].target)
        if not part and not is_view(node.target):
            break
        node = node.all_input_nodes[0]
    return node


def _readers(traced: TracedModel, node: fx.Node, phase: str = "backward") -> list[fx.Node]:
    return [user for user in node.users if _phase(traced, user) == phase]


def _is_activation(traced: TracedModel, owner: fx.Node) -> bool:
    """True for what is made of an input or a parameter, in each forward."""
    made = owner.op == "call_function" and bool(owner.all_input_nodes)
    return made and owner.name not in traced.hoisted


def _is_dense(node: fx.Node) -> bool:
    """True where a copy has the strides of the value, so that views of it are views again."""
    value = tensor_meta(node)
    return value is not None and torch.empty_like(value, device="meta").stride() == value.stride()
