"""Stages of a pipelined plan: which are equal, who runs them, who holds what."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from autopar.core.plan import Plan
from autopar.report.parameters import index_ranges

__all__ = ["StageGroup", "holders", "longest_rank", "stage_groups"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageGroup:
    """Stages with the same ops, layouts and seconds; a plan without stages is one group.

    Attributes:
        stages: their numbers.
        ranks: of the pipeline, that run them.
        plan: of the first.
        named: the stage whose modules and parameters its ops name: of equal graphs the first.
        compute_s, comm_s: of all ops of one of these stages in a step; no second of it is taken
            for hidden.
    """

    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    plan: Plan
    named: int
    compute_s: float
    comm_s: float

    @property
    def label(self) -> str:
        """Numbers of the stages: `3`, or `1-30`."""
        return index_ranges(list(self.stages)).strip("[]")

    @property
    def name(self) -> str:
        """`stage 3`, or `stages 1-30`."""
        other = f" (named as in stage {self.named})" if self.named not in self.stages else ""
        return f"stage{'s' * (len(self.stages) > 1)} {self.label}{other}"


def stage_groups(plan: Plan) -> tuple[StageGroup, ...]:
    """Groups of equal stages, in the order of their first stages."""
    p = plan.pipeline
    if p is None:
        return (_group((0,), 1, plan, 0),)
    alike: dict[Hashable, list[int]] = {}
    for number, stage in enumerate(p.stages):
        alike.setdefault(_key(stage), []).append(number)
    first: dict[str, int] = {}
    for number, stage in enumerate(p.stages):
        first.setdefault(stage.fingerprint, number)
    return tuple(
        _group(tuple(found), p.size, p.stages[found[0]], first[p.stages[found[0]].fingerprint])
        for found in alike.values()
    )


def _group(stages: tuple[int, ...], size: int, plan: Plan, named: int) -> StageGroup:
    ops = plan.predicted.timeline.ops
    return StageGroup(
        stages=stages,
        ranks=tuple(sorted({stage % size for stage in stages})),
        plan=plan,
        named=named,
        compute_s=sum(op.compute_s * op.times for op in ops),
        comm_s=sum(op.comm_s for op in ops),
    )


def _key(stage: Plan) -> Hashable:
    """What equal stages have in common: all but names of parameters, and what is hidden."""
    ops = tuple(
        (
            *(op.name, op.op, op.phase, op.shapes, op.dtype, op.times, op.compute_s),
            tuple((m.axis, m.kind, m.num_bytes, m.times, m.seconds) for m in op.moves),
        )
        for op in stage.predicted.timeline.ops
    )
    layouts = tuple((n, c.inputs, c.outputs, c.variants) for n, c in stage.nodes.items())
    return stage.fingerprint, stage.mesh_shape, ops, layouts


def holders(plan: Plan) -> Mapping[str, tuple[int, ...]]:
    """Pipeline ranks that hold each parameter, a tied one more than one; empty for one rank."""
    p = plan.pipeline
    if p is None or p.size == 1:
        return {}
    found: dict[str, set[int]] = {}
    for number, stage in enumerate(p.stages):
        for name in stage.parameters:
            found.setdefault(name, set()).add(number % p.size)
    return {name: tuple(sorted(ranks)) for name, ranks in found.items()}


def longest_rank(plan: Plan) -> int:
    """The pipeline rank that `plan.predicted` is of: the first whose seconds are the predicted."""
    p = plan.pipeline
    if p is None:
        return 0
    parts = ("compute_time_s", "comm_time_s", "hidden_time_s", "update_s", "offload_s")
    whole = [getattr(plan.predicted, part) for part in parts]

    def difference(rank: int) -> float:
        own = [stage.predicted for stage in p.stages[rank :: p.size]]
        sums = (sum(getattr(x, part) for x in own) for part in parts)
        return math.fsum(abs(a - b) for a, b in zip(whole, sums, strict=True))

    differences = [difference(rank) for rank in range(p.size)]
    least = min(differences) + 1e-9 * plan.predicted.step_time_s  # equal but for rounding
    return next(rank for rank, d in enumerate(differences) if d <= least)
