"""Rewrites the sites of a program as far as memory allows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from torch import fx

from autopar.codegen.passes.lifetimes import Lifetimes
from autopar.codegen.passes.order import copied

__all__ = ["within_budget"]

_MOST_TRIES = 8  # to leave single sites out, each with a copy of the graph


def within_budget(
    graph: fx.Graph,
    write: Callable[[fx.Graph, Collection[int]], Mapping[int, Sequence[fx.Node]]],
    budget: int,
    resident: Mapping[str, int] | None = None,
) -> fx.Graph:
    """The graph with its sites rewritten, but for those at work where more than `budget` is live.

    Args:
        graph: joint program, which is left as it is.
        write: rewrites the sites of a copy, but for those of some numbers; the new nodes of each.
        budget: what may be live.
        resident: bytes that live beside the graph's own, by phase.

    Returns:
        The new graph, or `graph` itself where no site is rewritten.
    """
    left: set[int] = set()
    for _ in range(_MOST_TRIES):
        trial = copied(graph)
        made = write(trial, left)
        if not made:
            break
        lifetimes = Lifetimes(trial, resident)
        if lifetimes.peak_bytes <= budget:
            return trial
        left |= _at_work(made, lifetimes)
    return graph


def _at_work(made: Mapping[int, Sequence[fx.Node]], lifetimes: Lifetimes) -> set[int]:
    """The sites that are at work where most is live; if none is, the one that was last."""
    peak, place = int(lifetimes.live.argmax()), lifetimes.position
    spans = {index: (place[nodes[0]], place[nodes[-1]]) for index, nodes in made.items()}
    found = {index for index, (first, last) in spans.items() if first <= peak <= last}
    before = [index for index, (_, last) in spans.items() if last < peak]
    return found or {max(before or spans, key=lambda index: spans[index][1])}
