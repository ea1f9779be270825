"""`excerpts`: what an emitted program runs for one block of each kind.

Blocks are of one kind if they run the same calls on the same shapes, wired alike, with the same
collectives. Numbers in arguments (offsets, counters of random numbers) may differ.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from autopar.codegen.accumulate import add_up
from autopar.codegen.fusion.generated import Generated
from autopar.codegen.listing import argument_text, target_text, value_text
from autopar.core.blocks import Block, Blocks, block_of
from autopar.core.excerpt import EmittedCollective, EmittedNode, Excerpt, NodeKind
from autopar.core.graph import TracedModel
from autopar.core.host import ARRIVED, FETCHED, STORED, WITH_HOST
from autopar.core.work import is_view

__all__ = ["Found", "Run", "excerpts", "merged"]

_GRADIENT = "gradient of "
_ROUNDING = 1e-9
_WAITS = (torch.ops._c10d_functional.wait_tensor.default, ARRIVED)
_COPIES = (*WITH_HOST, STORED, FETCHED)


class Run(NamedTuple):
    """Seconds of a node, and what of them is hidden."""

    seconds: float
    hidden_s: float


class _Call(NamedTuple):
    """A node of a part, with the names that it and its operands have in the excerpt."""

    part: str
    name: str
    node: fx.Node
    operands: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """An excerpt, and what those that run the same have in common."""

    excerpt: Excerpt
    likeness: Hashable


def excerpts(
    parts: Mapping[str, fx.Graph], traced: TracedModel, runs: Mapping[tuple[str, str], Run]
) -> list[Found]:
    """One of each kind of block, and what belongs to no block, in the order of the program.

    Args:
        parts: graphs that one rank runs, by name, in order.
        traced: the graph that they were emitted from, with its recomputation.
        runs: of their nodes, by part and name.
    """
    blocks = Blocks(traced)
    held: dict[Block | None, list[_Call]] = {}
    home: dict[str, Block | None] = {}
    for call in _calls(parts):
        home[call.name] = block = _block(call.node, traced)
        held.setdefault(block, []).append(call)
    found: dict[Hashable, Found] = {}
    for block, calls in held.items():
        likeness = block is None, tuple(_likeness(calls))
        count = _copies(block, blocks)
        known = found.get(likeness)
        if known is not None:
            total = known.excerpt.count + count
            found[likeness] = replace(known, excerpt=replace(known.excerpt, count=total))
            continue
        excerpt = Excerpt(
            block=_name(block),
            count=count,
            nodes=tuple(_emitted(call, runs) for call in calls),
            given=dict(_given(calls, traced, home)),
        )
        found[likeness] = Found(excerpt, likeness)
    return list(found.values())


def merged(stages: Iterable[tuple[Sequence[int], Sequence[Found]]]) -> tuple[Excerpt, ...]:
    """Excerpts of all stages, of those that run the same only the first.

    Args:
        stages: their numbers, and what was found in one of them.
    """
    found: dict[Hashable, Excerpt] = {}
    for numbers, own in stages:
        for each in own:
            count = each.excerpt.count * max(1, len(numbers))
            known = found.get(each.likeness)
            if known is None:
                found[each.likeness] = replace(each.excerpt, count=count, stages=tuple(numbers))
            else:
                both = tuple(sorted({*known.stages, *numbers}))
                found[each.likeness] = replace(known, count=known.count + count, stages=both)
    return tuple(found.values())


def _name(block: Block | None) -> str:
    return "" if block is None else f"{block.container}.{block.number}"


def _copies(block: Block | None, blocks: Blocks) -> int:
    """How many blocks of the model a block of the graph stands for."""
    if block is None:
        return 1
    repeats = blocks.repeats.get(block.container, ())
    return next((r.times for r in repeats if r.holds(block.number)), 1)


def _block(node: fx.Node, traced: TracedModel) -> Block | None:
    """The block that a node runs for."""
    origin = str(node.meta.get("origin", ""))
    info = traced.info.get(origin)
    path = info.module if info is not None else origin.removeprefix(_GRADIENT)
    return block_of(path, traced.nested)


def _calls(parts: Mapping[str, fx.Graph]) -> Iterable[_Call]:
    """Nodes of all parts; names differ, and what a part takes has the name of what made it."""
    taken: set[str] = set()
    for part, graph in parts.items():
        names: dict[fx.Node, str] = {}
        for node in graph.nodes:
            name = str(node.meta.get("instead_of", node.name))
            if node.op == "call_function" and name in taken:
                name = f"{name}_{part}"
            names[node] = name
            if node.op == "call_function":
                taken.add(name)
                yield _Call(part, name, node, tuple(names[n] for n in node.all_input_nodes))


def _likeness(calls: Sequence[_Call]) -> Iterable[Hashable]:
    place = {call.name: i for i, call in enumerate(calls)}
    for part, _, node, operands in calls:
        kind = node.target.kind if isinstance(node.target, Generated) else node.target
        yield (
            *(kind, part, node.meta.get("collective", ())[:3]),
            *(value_text(node.meta.get("val")), node.meta.get("piece")),
            tuple(place.get(name, -1) for name in operands),
        )


def _given(
    calls: Sequence[_Call], traced: TracedModel, home: Mapping[str, Block | None]
) -> Iterable[tuple[str, str]]:
    """What a block reads of others, and where that is from."""
    inside = {call.name for call in calls}
    specs = {spec.node: spec for spec in traced.inputs}
    for call in calls:
        for name, source in zip(call.operands, call.node.all_input_nodes, strict=True):
            if name in inside:
                continue
            value, spec = value_text(source.meta.get("val")), specs.get(name)
            if name in home:
                block = home[name]
                where = f"from {_name(block)}" if block is not None else "from outside of blocks"
            elif spec is not None:
                where = f"{spec.kind} {spec.target}"
            else:
                where = "sum of earlier microbatches" if call.node.target is add_up else "given"
            yield name, f"{where}, {value}" if value else where


def _emitted(call: _Call, runs: Mapping[tuple[str, str], Run]) -> EmittedNode:
    node, target = call.node, call.node.target
    run = runs.get((call.part, node.name), Run(0.0, 0.0))
    texts, operands = _arguments(call)
    inside = target.members if isinstance(target, Generated) else ()
    return EmittedNode(
        name=call.name,
        target=target_text(target),
        texts=texts,
        operands=operands,
        value=value_text(node.meta.get("val")),
        kind=_kind(node),
        part=call.part,
        origin=str(node.meta.get("origin", "")),
        seconds=_short(run.seconds),
        hidden_s=_short(run.hidden_s) if run.hidden_s > _ROUNDING * run.seconds else 0.0,
        sends=_sends(node),
        inside=tuple(target_text(n.target) for n in inside),
    )


def _short(seconds: float) -> float:
    return float(f"{seconds:.4g}")


def _kind(node: fx.Node) -> NodeKind:
    target = node.target
    if "collective" in node.meta:
        return "collective"
    if target in _WAITS:
        return "wait"
    if target in _COPIES:
        return "copy"
    if isinstance(target, Generated) or getattr(target, "namespace", "") == "autopar_kernels":
        return "kernel"
    return "view" if target is operator.getitem or _is_view(node) else "op"


def _is_view(node: fx.Node) -> bool:
    """True for a view that is one here: a reshape may have to copy."""
    value = node.meta.get("val")
    if not is_view(node.target) or not isinstance(value, Tensor):
        return False
    given = [n.meta.get("val") for n in node.all_input_nodes]
    storage = value.untyped_storage()._cdata
    return any(isinstance(x, Tensor) and x.untyped_storage()._cdata == storage for x in given)


def _sends(node: fx.Node) -> EmittedCollective | None:
    if "collective" not in node.meta:
        return None
    kind, axis, num_bytes, _ = node.meta["collective"]
    piece, count = node.meta.get("piece", (0, 0))
    return EmittedCollective(
        kind=kind,
        axis=axis,
        num_bytes=num_bytes,
        members=tuple(origin for origin, _ in node.meta.get("members", ())),
        piece=f"{piece + 1} of {count}" if count else "",
    )


_MARK = "\0"


class _Mark:
    """Stands for an operand in the text of arguments."""

    def __repr__(self) -> str:
        return _MARK


def _arguments(call: _Call) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The text of the arguments around the operands, and these."""
    operands: list[str] = []
    names = dict(zip(call.node.all_input_nodes, call.operands, strict=True))

    def marked(value: Any) -> Any:
        operands.append(names[value])
        return _Mark()

    args, kwargs = fx.map_arg((call.node.args, dict(call.node.kwargs)), marked)
    texts = [argument_text(a) for a in args]
    texts += [f"{key}={argument_text(value)}" for key, value in kwargs.items()]
    return tuple(", ".join(texts).split(_MARK)), tuple(operands)
