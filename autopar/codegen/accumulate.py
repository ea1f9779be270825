"""Accumulates contributions to gradients inside the program of a microbatch.

    sum_t = sum_(t-1) + contribution_t        in place, right behind the op that makes it

so a contribution lives no longer than that op, and a backward never holds two sets of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx

__all__ = ["PREFIX", "accumulated", "add_up", "without_sums"]

PREFIX = "sum of "
"""In front of the name of a contribution, the name of the sum that a part reads."""


def add_up(total: Tensor | None, more: Tensor) -> Tensor:
    """Add in place, to a contiguous copy of the first contribution, which may share memory."""
    return more.clone(memory_format=torch.contiguous_format) if total is None else total.add_(more)


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


def without_sums(graph: fx.Graph) -> tuple[fx.Graph, tuple[int, ...]]:
    """The graph of a part before `accumulated`.

    Returns:
        A new graph, which neither reads nor adds to sums, and the positions of the contributions
        among its outputs, in the order of the sums that the part reads last.
    """
    found = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    output = next(iter(reversed(graph.nodes)))
    results: Any = output.args[0]
    summed = [i for i, node in enumerate(results) if node.target is add_up]
    totals = {results[i].args[0] for i in summed}
    for node in graph.nodes:
        if node is output:
            found.output(tuple(copies[n] for n in results))
        elif node.target is add_up:
            copies[node] = copies[node.args[1]]
        elif node not in totals:
            copies[node] = found.node_copy(node, copies.__getitem__)
    return found, tuple(summed)
