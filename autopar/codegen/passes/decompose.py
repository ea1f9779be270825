"""Decomposition: a matmul and the collective next to it are cut into pieces that overlap.

Where X = gather(x), rows j of each rank's x are gathered by themselves, and multiplied while the
rows j + 1 are on their way; where y = reduce-scatter(X W), the rows of X are multiplied in turn,
and piece j is reduced while piece j + 1 is computed::

    gather x_0 | gather x_1   | …                X_0 W        | X_1 W      | …
               | X_0 W        | X_1 W | …                     | reduce 0   | reduce 1 | …

As many bytes are sent, latency is paid k times, and a copy puts the results together in their order
(Wang et al. 2023, doi:10.1145/3567955.3567959). Only dims that are not contracted are cut, so each
element is the same dot product as before.

How many pieces there are is not decided here: a plan says it (`Plan.pieces`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from torch import fx

from autopar.codegen.passes.budget import within_budget
from autopar.codegen.passes.order import reorder, show_anew
from autopar.codegen.passes.piece_writers import write_pieces
from autopar.codegen.passes.sites import Key, Reduction, find_sites, key_of

__all__ = ["decompose"]


def decompose(
    graph: fx.Graph,
    pieces: Mapping[Key, int],
    budget: int,
    resident: Mapping[str, int] | None = None,
) -> fx.Graph:
    """Cut collectives into pieces.

    Args:
        graph: joint program, which is left as it is.
        pieces: how many, by origin, axis and kind of a collective.
        budget: what may be live; sites that are open where that is exceeded stay whole.
        resident: bytes that live beside the graph's own, by phase.

    Returns:
        The new graph, or `graph` itself where nothing is cut.
    """
    if all(count < 2 for count in pieces.values()):
        return graph
    return within_budget(
        graph, lambda trial, whole: _rewritten(trial, pieces, whole), budget, resident
    )


def _rewritten(
    graph: fx.Graph, pieces: Mapping[Key, int], whole: Collection[int]
) -> dict[int, list[fx.Node]]:
    """Cut the sites that are not to stay whole, in place; the new nodes of each, in order."""
    keys = {node: float(i) for i, node in enumerate(graph.nodes)}
    made: dict[int, list[fx.Node]] = {}
    touched: set[fx.Node] = set()
    for index, site in enumerate(find_sites(graph)):
        count = pieces.get(key_of(site.start), 1)
        left = tuple(product for product in site.products if product not in touched)
        if count < 2 or index in whole or not left:
            continue
        if isinstance(site, Reduction) and len(left) < len(site.products):
            continue
        if nodes := write_pieces(replace(site, products=left), count, keys):
            made[index] = nodes
            touched.update(left)
    reorder(graph, keys)
    graph.lint()
    show_anew(graph, (node for nodes in made.values() for node in nodes))
    place = {node: i for i, node in enumerate(graph.nodes)}
    return {index: sorted(nodes, key=place.__getitem__) for index, nodes in made.items()}
