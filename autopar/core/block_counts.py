"""For how many blocks the nodes of a folded program stand."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import fx

__all__ = ["block_counts"]

_ONCE = ("prepare", "finish")  # phases of a step in microbatches that run once


def block_counts(nodes: Iterable[fx.Node], ops: Collection[fx.Node]) -> dict[fx.Node, int]:
    """For how many blocks each node counts; what runs once a microbatch counts once here.

    Args:
        nodes: calls of a program, with `meta["times"]`.
        ops: those of them that compute for the model.
    """
    counts = {node: int(node.meta.get("times", 1)) for node in nodes}
    least: dict[object, int] = dict.fromkeys(_ONCE, 1)
    for node, count in counts.items():
        if node in ops:
            phase = node.meta.get("phase")
            least[phase] = min(count, least.get(phase, count))
    turns = {node: least.get(node.meta.get("phase"), 1) for node in counts}
    return {node: n // turns[node] if n % turns[node] == 0 else 1 for node, n in counts.items()}
