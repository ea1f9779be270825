"""Adds contributions to gradients up inside the program of a microbatch.

    sum_t = sum_(t-1) + contribution_t        in place, right behind the op that makes it

so that a contribution lives no longer than that op, and a backward never holds two sets of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor, fx

__all__ = ["PREFIX", "accumulated", "add_up"]

PREFIX = "sum of "
"""In front of the name of a contribution, the name of the sum that a part reads."""


def add_up(total: Tensor | None, more: Tensor) -> Tensor:
    """Add in place; the first contribution may share memory with another, so it is copied."""
    return more.clone() if total is None else total.add_(more)


def accumulated(graph: fx.Graph, writes: Sequence[str], sums: Collection[str]) -> tuple[str, ...]:
    """Write `add_up` behind each value of a part that is summed; the part returns the sums.

    Args:
        graph: of a part; changed in place.
        writes: names of its outputs.
        sums: names of the values that are summed.

    Returns:
        Names of the sums that it now reads, behind what it read before; None at the first turn.
    """
    output = next(iter(reversed(graph.nodes)))
    first = next(n for n in graph.nodes if n.op != "placeholder")
    read: list[str] = []
    for name, node in zip(writes, output.args[0], strict=True):
        if name not in sums:
            continue
        with graph.inserting_before(first):
            total = graph.placeholder(f"{name}_sum")
        with graph.inserting_after(node):
            made = graph.call_function(add_up, (total, node))
        made.meta = {key: node.meta[key] for key in ("phase", "origin", "val") if key in node.meta}
        output.replace_input_with(node, made)
        read.append(PREFIX + name)
    return tuple(read)
