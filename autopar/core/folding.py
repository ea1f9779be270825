"""From a plan of a folded graph to one of the whole graph, node by node."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torch import fx

from autopar.core.blocks import Block, Blocks, number_in, renumbered
from autopar.core.graph import Repeat, TracedModel, op_nodes, tensor_meta
from autopar.core.made_for import check_made_for
from autopar.core.plan import Pieces, Plan
from autopar.core.recompute import recomputed
from autopar.errors import PlanMismatchError

__all__ = [
    "every_instance",
    "every_piece",
    "same_for_all_instances",
    "stand_in",
    "stand_ins",
    "unfolded",
]

T = TypeVar("T")


def every_instance(named: Mapping[str, T], repeats: Sequence[Repeat]) -> dict[str, T]:
    """Add the FQNs of the blocks that others stand for, with the values of the stand-ins."""
    found: dict[str, T] = {}
    waiting: list[tuple[str, T]] = []  # of the blocks that repeat

    def flush() -> None:
        for turn in range(1, repeat.times if waiting else 1):
            for name, value in waiting:
                found[renumbered(name, repeat.container, turn * repeat.period)] = value
        waiting.clear()

    repeat = Repeat(container="", first=0, period=1, times=1)
    for name, value in named.items():
        owner = _holding(repeats, name)
        if owner != repeat:
            flush()
        found[name] = value
        if owner is not None:
            repeat = owner
            waiting.append((name, value))
    flush()
    return found


def _holding(repeats: Sequence[Repeat], name: str) -> Repeat | None:
    """The repeat that a module or parameter stands for others in."""
    for repeat in repeats:
        number = number_in(name, repeat.container)
        if number is not None and repeat.holds(number):
            return repeat
    return None


def same_for_all_instances(matches: Mapping[str, Sequence[str]], repeats: Sequence[Repeat]) -> bool:
    """True if every pattern that matches a name in a repeated block matches it in all of them.

    Args:
        matches: names by pattern.
        repeats: to be folded.
    """
    for names in matches.values():
        found = set(names)
        for name, repeat in itertools.product(names, repeats):
            number = number_in(name, repeat.container)
            offset = -repeat.period - 1 if number is None else number - repeat.first
            if -repeat.period <= offset < repeat.period * repeat.times:
                start = -(offset // repeat.period)
                turns = range(start - 1, start + repeat.times)
                all_names = (renumbered(name, repeat.container, t * repeat.period) for t in turns)
                if any(each not in found for each in all_names):
                    return False
    return True


def unfolded(plan: Plan, folded: TracedModel, whole: TracedModel) -> Plan:
    """The plan of the whole graph, in which every block is placed as the one that stands for it.

    Args:
        plan: of the folded graph.
        folded: that graph.
        whole: the graph of the same model and input, not folded.

    Raises:
        PlanMismatchError: the plan is of another graph, or the whole graph does not consist of the
            blocks that the folded one holds.
    """
    check_made_for(plan, folded)
    folded = recomputed(folded, plan.checkpoint)
    fingerprint = whole.fingerprint()
    whole = recomputed(whole, plan.checkpoint)
    twins = stand_ins(folded, whole)
    nodes = {mine: plan.nodes[twin] for mine, twin in twins.items() if twin in plan.nodes}
    pieces = every_piece(plan.pieces, twins)
    kept = {spec.node for spec in whole.inputs}
    return replace(
        plan,
        nodes=nodes,
        pieces=pieces,
        inputs={name: layout for name, layout in plan.inputs.items() if name in kept},
        fingerprint=fingerprint,
        repeats=(),
    )


def every_piece(pieces: Sequence[Pieces], twins: Mapping[str, str]) -> tuple[Pieces, ...]:
    """Cut the collectives of all nodes as those of the nodes that stand for them (`stand_ins`)."""
    rows: dict[str, list[Pieces]] = {}
    for row in pieces:
        rows.setdefault(row.node, []).append(row)
    return tuple(
        replace(row, node=mine) for mine, twin in twins.items() for row in rows.get(twin, ())
    )


def stand_ins(folded: TracedModel, whole: TracedModel, shift: int = 0) -> dict[str, str]:
    """Each call of the whole graph with the one of the folded graph that it does as, by name.

    Args:
        folded, whole: of the same model and input, or of equal pipeline stages.
        shift: by how much the block numbers of `whole` exceed those of `folded`.

    Raises:
        PlanMismatchError: the whole graph does not consist of what the folded one holds.
    """
    pairs = _pairs(Blocks(folded), Blocks(whole), shift)
    return {mine.name: twin.name for mine, twin in pairs}


def _pairs(folded: Blocks, whole: Blocks, shift: int) -> Iterator[tuple[fx.Node, fx.Node]]:
    outside = _outside(whole)
    yield from _zipped("outside of blocks", outside, _in_order_of(outside, _outside(folded)))
    for block, nodes in whole.members.items():
        twin = stand_in(folded, Block(block.container, block.number - shift))
        members = folded.members.get(twin)
        if members is None:
            raise PlanMismatchError(f"the plan knows no {block.container}.{block.number}")
        where = f"in {block.container}.{block.number}"
        yield from _zipped(where, op_nodes(nodes), op_nodes(members))


def stand_in(folded: Blocks, block: Block) -> Block:
    """The block of a folded graph that a block of the model does as."""
    for repeat in folded.repeats.get(block.container, ()):
        if repeat.covers(block.number):
            offset = (block.number - repeat.first) % repeat.period
            return Block(block.container, repeat.first + offset)
    return block


def _outside(blocks: Blocks) -> list[fx.Node]:
    graph = blocks.traced.graph
    return [n for n in op_nodes(list(graph.nodes)) if n.name not in blocks.place]


def _in_order_of(mine: list[fx.Node], twins: list[fx.Node]) -> list[fx.Node]:
    """The twins in another graph's order: what blocks share stands where the first one reads it."""
    waiting: dict[Any, deque[fx.Node]] = defaultdict(deque)
    for twin in twins:
        waiting[_role(twin)].append(twin)
    found = [waiting[role].popleft() for role in map(_role, mine) if waiting[role]]
    return found if len(found) == len(mine) == len(twins) else twins


def _role(node: fx.Node) -> Any:
    """What a node computes, and of what shapes."""
    return _kind(node), tuple(_kind(source)[1] for source in node.all_input_nodes)


def _zipped(
    where: str, mine: list[fx.Node], twins: list[fx.Node]
) -> Iterator[tuple[fx.Node, fx.Node]]:
    same = len(mine) == len(twins) and all(
        _kind(a) == _kind(b) for a, b in zip(mine, twins, strict=True)
    )
    if not same:
        raise PlanMismatchError(
            f"the ops {where} are not those of the block that the plan has for them: blocks that "
            "looked alike compute different things. parallelize without plan= plans each by itself"
        )
    yield from zip(mine, twins, strict=True)


def _kind(node: fx.Node) -> Any:
    value = tensor_meta(node)
    return str(node.target), tuple(value.shape) if value is not None else None
