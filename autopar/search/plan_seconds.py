"""The seconds by which a search compares plans."""

from __future__ import annotations

import math

from autopar.core.plan import Plan

__all__ = ["GAIN", "as_fast_s", "counted_s", "faster", "to_beat_s"]

GAIN = 0.05
"""Share that a pipeline must save unasked: stage programs overlap less than others."""

_UNSEEN = 0.03  # of the step: what is not counted, that a pipeline is thought to have as well


def counted_s(plan: Plan | None) -> float:
    """Seconds of a step, less what no search counts and a pipeline, not written yet, has too.

    Infinite without a plan.
    """
    if plan is None:
        return math.inf
    step_s = plan.predicted.step_time_s
    return step_s - min(plan.predicted.unseen_compute_s, _UNSEEN * step_s)


def to_beat_s(plain: Plan | None) -> float:
    """Seconds that a pipeline must stay below, to be preferred to a plan in one piece."""
    return counted_s(plain) * (1 - GAIN)


def as_fast_s(plain: Plan, pipeline_s: float) -> float:
    """Seconds that a plan in one piece would count if it were as fast as a pipeline may be."""
    return plain.solver.objective * min(1.0, pipeline_s / to_beat_s(plain))


def faster(a: Plan | None, b: Plan | None) -> Plan | None:
    """The plan that takes less; the first where they take the same."""
    return b if counted_s(b) < counted_s(a) else a
