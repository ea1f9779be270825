"""What the collectives of an emitted program move, which must be what its plan says.

And in which order they come, which must be the same on all ranks of a mesh.
"""

from __future__ import annotations

import hashlib
from collections import Counter

from torch import fx

from autopar.core.plan import CommBytes, Plan
from autopar.errors import AutoparError

__all__ = ["check_traffic", "collectives_digest", "count_collectives"]


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


def collectives_digest(graph: fx.Graph) -> str:
    """What tells the collectives of a graph, in their order, from those of another rank's."""
    found = hashlib.sha256()
    for node in graph.nodes:
        sent = node.meta.get("collective") or node.meta.get("overlapped")
        if sent is not None:
            found.update(f"{node.target} {sent}\n".encode())
    return found.hexdigest()[:16]


def check_traffic(found: tuple[CommBytes, ...], plan: Plan) -> None:
    """A program must move the bytes that its plan says."""
    if found != plan.predicted.comm_bytes:
        raise AutoparError(
            f"the emitted program moves {found}, the plan says {plan.predicted.comm_bytes}: this "
            "is a defect of autopar"
        )
