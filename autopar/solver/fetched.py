"""What comes back from host memory for the next block, while one reads what came for it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import groupby

from autopar.core.host import FROM_HOST
from autopar.solver.step import Op, Step

__all__ = ["fetched_ahead"]


def fetched_ahead(step: Step, order: Sequence[Op]) -> dict[str, list[str]]:
    """Copies that are on their way meanwhile, by the first one that a block reads.

    A block that stands for several is followed by one of its kind (`codegen/passes/overlap.py`).

    Args:
        order: the ops of the step as they run.
    """

    def group(op: Op) -> Hashable:
        return step.blocks.place.get(op.name, (None,))[0], op.backward

    copies = [op for op in order if op.call.target is FROM_HOST]
    groups = [[op.name for op in ops] for _, ops in groupby(copies, group)]
    found: dict[str, list[str]] = {}
    for number, now in enumerate(groups):
        later = groups[number + 1] if number + 1 < len(groups) else []
        meanwhile = now if step.blocks.copies(now[0]) > 1 else later
        if meanwhile:
            found[now[0]] = meanwhile
    return found
