"""Sums over a plan's timeline: seconds of compute by op class, of communication by axis."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from autopar.core.plan import Plan
from autopar.core.timeline import OpPhase

__all__ = ["MEMORY_KINDS", "CommTotal", "communication", "compute"]

# what the kinds of live memory are; a kind that is not here is shown under its own name
MEMORY_KINDS = {
    "parameters": "stored shards of the parameters",
    "optimizer": "optimizer states of these shards",
    "inputs": "the batch, whole and this device's share",
    "received": "from other stages, for the microbatch that runs",
    "sent": "to other stages, until they have it",
    "gradients": "of parameters, as they are stored",
    "activations": "results of the forward that are still needed",
    "backward": "results of the backward that are still needed",
    "gathered": "communication: redistributed copies that views show",
    "transient": "communication: redistributed operands of the op that runs",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CommTotal:
    """One kind of collective on one mesh axis in one step.

    Seconds, and how many of them are hidden behind compute, are None without a timeline.
    """

    axis: int
    kind: str
    times: int
    num_bytes: int
    seconds: float | None
    hidden_s: float | None


def compute(plan: Plan) -> dict[str, dict[OpPhase, float]]:
    """Seconds of compute by op class and phase, the slowest class first; empty: no timeline."""
    found: dict[str, dict[OpPhase, float]] = defaultdict(lambda: defaultdict(float))
    for op in plan.predicted.timeline.ops:
        if op.compute_s:
            found[op.op_class][op.phase] += op.compute_s * op.times
    return dict(sorted(found.items(), key=lambda item: -sum(item[1].values())))


def communication(plan: Plan) -> list[CommTotal]:
    """Collectives by axis and kind, by axis and the most bytes first."""
    seconds: dict[tuple[int, str], float] = defaultdict(float)
    hidden: dict[tuple[int, str], float] = defaultdict(float)
    timeline = plan.predicted.timeline
    for op in timeline.ops:
        for move in op.moves:
            seconds[move.axis, move.kind] += move.seconds * move.times
            hidden[move.axis, move.kind] += move.hidden_s * move.times
    return [
        CommTotal(
            axis=row.axis,
            kind=row.kind,
            times=row.count,
            num_bytes=row.num_bytes,
            seconds=seconds[row.axis, row.kind] if timeline.ops else None,
            hidden_s=hidden[row.axis, row.kind] if timeline.ops else None,
        )
        for row in sorted(plan.predicted.comm_bytes, key=lambda r: (r.axis, -r.num_bytes, r.kind))
    ]
