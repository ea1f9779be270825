"""What compute waits for of copies from host memory, as the simulated program says, for a plan.

The search estimates it before anything is placed (`solver/beside.py`). Only what comes back is
waited for; what it waits for itself, as it is on its way to the host still, counts with that way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.core.plan import Plan
from autopar.core.timeline import rounded
from autopar.cost_model.simulator import Simulation

__all__ = ["with_waits"]


def with_waits(plan: Plan, parts: Mapping[str, Simulation], turns: int = 1) -> Plan:
    """`plan` with the simulated waits; as it is, where no copy has a stream of its own.

    Args:
        plan: with its timeline, and no share of a collective hidden yet.
        parts: simulations of what runs in one go, by name.
        turns: microbatches of a step.
    """
    found = {
        span.origin: (part, span.duration_s - span.hidden_s)
        for part, simulation in parts.items()
        for span in simulation.spans
        if span.stream in ("up", "down")
    }
    if not found:
        return plan
    predicted = plan.predicted
    phases = dict(predicted.phases)
    ops = []
    added_s = 0.0
    for op in predicted.timeline.ops:
        if op.name in found:
            part, seconds = found[op.name]
            more_s = (rounded(seconds) - op.compute_s) * op.times
            added_s += more_s
            if phases:
                phases[_phase(part, predicted.phases)] += more_s / turns
            op = replace(op, compute_s=rounded(seconds))
        ops.append(op)
    return replace(
        plan,
        predicted=replace(
            predicted,
            step_time_s=predicted.step_time_s + added_s,
            exposed_copy_s=max(0.0, predicted.exposed_copy_s + added_s),
            phases={phase: max(0.0, seconds) for phase, seconds in phases.items()},
            timeline=replace(predicted.timeline, ops=tuple(ops)),
        ),
    )


def _phase(part: str, phases: Mapping[str, float]) -> str:
    """The phase that a copy in a part was counted to: a backward in one piece is two phases.

    What comes back is needed for what is sent to the stage before, if anything is.
    """
    if part != "backward":
        return part
    return "input" if phases["input"] else "weight"
