"""Folding: of many equal blocks, or periods of blocks, a graph holds one that stands for the rest.

Beside it, it holds the period in front, and the first and last blocks. The others are skipped
while the model is captured (`skipped_calls.py`), and cut out of what is captured with what is
computed between them (`between_blocks.py`). What is left is checked: equal blocks must have equal
nodes, and only their neighbours may see inside them. A model that fails a check is captured whole,
and cut then, as its blocks may take turns or get more from some block on; if that fails, too, it is
not folded.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import nn

from autopar.core.blocks import Block, Blocks, lists_of
from autopar.core.graph import Repeat, TracedModel
from autopar.errors import TraceError
from autopar.tracer.repeats import is_nested
from autopar.tracer.skipped_calls import LastUnlike, shortened, skipping

__all__ = ["folded", "in_chain"]


def folded(
    model: nn.Module, repeats: Sequence[Repeat], capture: Callable[..., TracedModel]
) -> TracedModel | None:
    """The folded graph, or None where the blocks turn out not to be alike.

    Args:
        model: whose blocks are left out meanwhile.
        repeats: those that are worth folding. Where those inside of numbered modules turn out to be
            no blocks, the others are folded without them.
        capture: traces the model; with `fold=True`, it may leave out what of it repeats.
    """
    if not repeats:
        return None
    outer = tuple(r for r in repeats if not is_nested(r.container))
    waiting = list(dict.fromkeys((tuple(repeats), outer, ())))
    while waiting:
        skipped = waiting.pop(0)
        try:
            with skipping(model, skipped) as calls, warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                traced = capture(fold=True)
        except LastUnlike:
            if shorter := shortened(skipped):
                waiting.insert(0, shorter)
        except TraceError:
            continue  # tracing it whole tells whether the model is at fault
        else:
            are_left_out = calls.all_made() and all(_is_left_out(traced, r) for r in skipped)
            if are_left_out and _is_sound(traced):
                for each in told:  # of a graph that is kept
                    warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
                return traced
    return None


def _is_left_out(traced: TracedModel, skipped: Repeat) -> bool:
    """True where a repeat of the graph has the blocks that were skipped.

    Otherwise the model ran what is inside of them, and not the blocks themselves.
    """
    return any(
        skipped.container in lists_of(repeat.container)
        and (skipped.first, skipped.period) == (repeat.first, repeat.period)
        and skipped.times <= repeat.times
        for repeat in traced.repeats
    )


def in_chain(traced: TracedModel, lists: Sequence[str]) -> tuple[str, ...]:
    """Those lists inside of numbered modules whose children read each other, as blocks do.

    Experts, heads of a pyramid and the like do not.
    """
    blocks = Blocks(replace(traced, nested=tuple(lists)))
    numbers: dict[str, list[int]] = {name: [] for name in lists}
    for block in blocks.members:
        if block.container in numbers:
            numbers[block.container].append(block.number)
    return tuple(
        name
        for name, found in numbers.items()
        if all(_reads(blocks, name, a, b) for a, b in itertools.pairwise(sorted(found)))
    )


def _reads(blocks: Blocks, container: str, before: int, number: int) -> bool:
    """True if a block works on what another one yields."""
    nodes = blocks.members[Block(container, number)]
    sources = (blocks.place.get(s.name) for node in nodes for s in node.all_input_nodes)
    return any(s is not None and s[0] == Block(container, before) for s in sources)


def _is_sound(traced: TracedModel) -> bool:
    """True if the folded blocks have equal nodes and only their neighbours see inside them."""
    blocks = Blocks(traced)
    for repeat in traced.repeats:
        for index in range(repeat.first, repeat.first + repeat.period):
            if not _equal_nodes(blocks, repeat, index):
                return False
    results = {spec.node for spec in traced.outputs if spec.kind == "output"}
    for node in traced.graph.nodes:
        if node.name not in blocks.place:
            continue
        block = blocks.place[node.name][0]
        if block.container not in blocks.repeats:
            continue
        inside = _unit(blocks, block) in (-1, 0)
        if inside and node.name in results:
            return False
        for user in node.users:
            if user.op == "output":
                continue
            if not _may_see(blocks, block, inside, user.name):
                return False
    return True


def _equal_nodes(blocks: Blocks, repeat: Repeat, index: int) -> bool:
    mine = blocks.members.get(Block(repeat.container, index), [])
    before = blocks.members.get(Block(repeat.container, index - repeat.period), [])
    return len(mine) == len(before) > 0 and all(
        blocks.classes[a.name] == blocks.classes[b.name] for a, b in zip(mine, before, strict=True)
    )


def _unit(blocks: Blocks, block: Block) -> int:
    (repeat,) = blocks.repeats[block.container]
    return repeat.unit(block.number)


def _may_see(blocks: Blocks, block: Block, inside: bool, user: str) -> bool:
    if user not in blocks.place:
        return not inside
    other = blocks.place[user][0]
    if other.container != block.container:
        return not inside
    ours, theirs = _unit(blocks, block), _unit(blocks, other)
    if inside or (theirs in (-1, 0) and ours > 0):
        return abs(ours - theirs) <= 1
    return True
