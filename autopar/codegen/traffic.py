"""Counts what the collectives of an emitted program move, which must be what its plan says."""

from __future__ import annotations

from collections import Counter

from torch import fx

from autopar.core.plan import CommBytes, Plan
from autopar.errors import AutoparError

__all__ = ["check_traffic", "count_collectives"]


def count_collectives(graph: fx.Graph) -> tuple[CommBytes, ...]:
    """Sum of the buffers of a graph's collectives, per mesh axis and kind."""
    size: Counter[tuple[int, str]] = Counter()
    count: Counter[tuple[int, str]] = Counter()
    for node in graph.nodes:
        sent = node.meta.get("collective") or node.meta.get("overlapped")
        if sent is not None:
            kind, axis, num_bytes, times = sent
            size[axis, kind] += num_bytes * times
            count[axis, kind] += times
    return tuple(
        CommBytes(axis=axis, kind=kind, num_bytes=size[axis, kind], count=n)
        for (axis, kind), n in sorted(count.items())
    )


def check_traffic(found: tuple[CommBytes, ...], plan: Plan) -> None:
    """A program must move the bytes that its plan says."""
    if found != plan.predicted.comm_bytes:
        raise AutoparError(
            f"the emitted program moves {found}, the plan says {plan.predicted.comm_bytes}: this "
            "is a defect of autopar"
        )
