"""What comes back from host memory for the next block, while one reads what came for it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import groupby
from typing import NamedTuple

from autopar.core.host import FROM_HOST
from autopar.solver.step import Op, Step

__all__ = ["Ahead", "fetched_ahead"]


class Ahead(NamedTuple):
    """Copies that are on their way, or there, before the block runs that reads them.

    Attributes:
        first, last: positions of the ops meanwhile: from that which gets what the block in front
            reads.
        copies: names of their ops.
    """

    first: int
    last: int
    copies: tuple[str, ...]


def fetched_ahead(step: Step, order: Sequence[Op]) -> list[Ahead]:
    """Of each block but the first that runs, what begins to come while the one in front runs.

    A block that stands for several is followed by one of its kind (`codegen/passes/overlap.py`).

    Args:
        order: the ops of the step as they run.
    """

    def block(op: Op) -> Hashable:
        return step.blocks.place.get(op.name, (None,))[0], op.backward

    position = {op.name: p for p, op in enumerate(order)}
    copies = [op for op in order if op.call.target is FROM_HOST]
    groups = [(of, tuple(op.name for op in ops)) for of, ops in groupby(copies, block)]
    found: list[Ahead] = []
    for number, (of, names) in enumerate(groups):
        begin = position[names[0]]
        if step.blocks.copies(names[0]) > 1:
            end = max(position[op.name] for op in order if block(op) == of)
            found.append(Ahead(begin, end, names))
        elif number + 1 < len(groups):
            later = groups[number + 1][1]
            found.append(Ahead(begin, position[later[0]] - 1, later))
    return found
