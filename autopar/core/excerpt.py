"""`Excerpt`: what a rank runs for one block, node by node, as a plan's file keeps it.

Of blocks that run the same nodes one is kept, so a deep model's excerpts are as short as a shallow
one's. Nodes are those of the emitted program behind its passes: collectives and their waits, what
packs and unpacks them, fused kernels, copies with host memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

__all__ = ["EmittedCollective", "EmittedNode", "Excerpt", "excerpts_from", "excerpts_to"]

NodeKind = Literal["op", "view", "kernel", "collective", "wait", "copy"]


class EmittedCollective(NamedTuple):
    """What a node sends.

    Attributes:
        kind: such as `"all_gather"`.
        axis: mesh axis.
        num_bytes: full buffer.
        members: of a bucket, the ops or gradients that it is for; else empty.
        piece: of a collective that is cut, `"2 of 4"`; else "".
    """

    kind: str
    axis: int
    num_bytes: int
    members: tuple[str, ...] = ()
    piece: str = ""


class EmittedNode(NamedTuple):
    """One node of the program.

    Attributes:
        name: of the node.
        target: what it calls, such as `"aten.mul.Tensor"`.
        texts: of its arguments, in front of, between and behind the operands.
        operands: names of nodes, one fewer than `texts`.
        value: dtype and local shape of each result, such as `"float32[4, 8]"`.
        kind: a fused kernel, a collective, the wait for one, a copy with host memory, a view of
            its operand, or any other op.
        part: of the step: forward, backward; in microbatches also prepare, input, weight, finish.
        origin: the planned op that it is for, or `"gradient of FQN"`.
        seconds: that one execution is expected to take.
        hidden_s: of a collective or a copy, what of `seconds` runs beside compute.
        sends: of a collective.
        inside: ops of a generated kernel.
    """

    name: str
    target: str
    texts: tuple[str, ...]
    operands: tuple[str, ...]
    value: str
    kind: NodeKind
    part: str
    origin: str
    seconds: float = 0.0
    hidden_s: float = 0.0
    sends: EmittedCollective | None = None
    inside: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """What a rank runs for a block.

    Attributes:
        block: FQN, or "" for what belongs to no block.
        count: blocks of the model that run the same, this one included.
        stages: of a pipeline, those that have such a block; else empty.
        nodes: in the order in which they are issued.
        given: what they read of others: a name, and where it is from.
    """

    block: str
    count: int
    nodes: tuple[EmittedNode, ...]
    stages: tuple[int, ...] = ()
    given: Mapping[str, str] = field(default_factory=dict)


def excerpts_to(excerpts: Sequence[Excerpt]) -> dict[str, Any]:
    """Plain JSON types: one row a node, with its strings as numbers of a table."""
    table: dict[str, int] = {}

    def number(text: str) -> int:
        return table.setdefault(text, len(table))

    blocks = [
        [
            number(x.block),
            x.count,
            list(x.stages),
            [_row(node, number) for node in x.nodes],
            [number(text) for pair in x.given.items() for text in pair],
        ]
        for x in excerpts
    ]
    return {"blocks": blocks, "strings": list(table)}


def excerpts_from(data: Mapping[str, Any]) -> tuple[Excerpt, ...]:
    """Inverse of `excerpts_to`; of a plan without any, none."""
    return tuple(_excerpt(row, data["strings"]) for row in data.get("blocks", ()))


def _excerpt(row: Sequence[Any], strings: Sequence[str]) -> Excerpt:
    block, count, stages, rows, given = row
    texts = [strings[n] for n in given]
    return Excerpt(
        block=strings[block],
        count=count,
        stages=tuple(stages),
        nodes=tuple(_node(each, strings) for each in rows),
        given=dict(zip(texts[::2], texts[1::2], strict=True)),
    )


def _row(node: EmittedNode, number: Any) -> list[Any]:
    woven = [text for pair in zip(node.texts, (*node.operands, ""), strict=True) for text in pair]
    texts = (node.name, node.target, node.value, node.kind, node.part, node.origin)
    more: list[Any] = []
    if node.sends is not None or node.inside:
        sends = node.sends
        more.append(
            [number(sends.kind), sends.axis, sends.num_bytes, number(sends.piece)]
            + [number(name) for name in sends.members]
            if sends is not None
            else []
        )
        more.append([number(name) for name in node.inside])
    return [
        *(number(text) for text in texts),
        [number(text) for text in woven[:-1]],
        node.seconds,
        node.hidden_s,
        *more,
    ]


def _node(row: Sequence[Any], strings: Sequence[str]) -> EmittedNode:
    name, target, value, kind, part, origin = (strings[n] for n in row[:6])
    woven, seconds, hidden_s, *more = row[6:]
    sends, inside = more or ([], [])
    texts = tuple(strings[n] for n in woven)
    return EmittedNode(
        name=name,
        target=target,
        texts=texts[::2],
        operands=texts[1::2],
        value=value,
        kind=kind,
        part=part,
        origin=origin,
        seconds=seconds,
        hidden_s=hidden_s,
        sends=_sends(sends, strings) if sends else None,
        inside=tuple(strings[n] for n in inside),
    )


def _sends(row: Sequence[int], strings: Sequence[str]) -> EmittedCollective:
    kind, axis, num_bytes, piece, *members = row
    return EmittedCollective(
        kind=strings[kind],
        axis=axis,
        num_bytes=num_bytes,
        members=tuple(strings[n] for n in members),
        piece=strings[piece],
    )
