"""The frontier of time and memory: the fastest plan under each of several memory limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import nn

from autopar.api import step_plans
from autopar.core.block_kinds import checkpoint_text
from autopar.core.plan import Plan
from autopar.core.units import format_bytes, format_seconds
from autopar.cost_model import Cluster
from autopar.errors import InfeasiblePlanError

__all__ = ["FrontierPoint", "frontier", "render_frontier"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """A limit in bytes per device, and the plan under it."""

    limit_bytes: int
    plan: Plan


def frontier(
    model: nn.Module, cluster: Cluster, example_inputs: Any, *, points: int = 6, **options: Any
) -> list[FrontierPoint]:
    """Plans from the unlimited one down to the least memory that a plan was found for.

    Args:
        model, cluster, example_inputs: as for `autopar.plan`.
        points: limits, spaced evenly by ratio; at least 2.
        **options: of `autopar.plan`, without `memory_limit`.

    Returns:
        Points by falling limit; every plan is faster than those behind it.
    """
    from autopar.solver.fit import UNLIMITED  # a frontier that is only drawn needs no solver

    if points < 2:
        raise ValueError(f"a frontier has at least 2 points, got {points}")
    plans = step_plans(model, cluster, example_inputs, **options)
    free = plans.under(UNLIMITED)
    most = free.predicted.peak_memory_bytes
    found = [FrontierPoint(limit_bytes=most, plan=free)]
    try:
        plans.under(1)
    except InfeasiblePlanError as error:
        least = min(error.required_bytes or most, most)
    for step in range(1, points):
        limit = round(most * (least / most) ** (step / (points - 1)))
        try:
            here = plans.under(limit)
        except InfeasiblePlanError:
            continue
        while found and here.predicted.step_time_s <= found[-1].plan.predicted.step_time_s:
            found.pop()  # less memory in no more time
        found.append(FrontierPoint(limit_bytes=limit, plan=here))
    return found


def render_frontier(points: list[FrontierPoint], width: int | None = None) -> str:
    """One line a plan: peak, seconds against the fastest, recomputation, gap."""
    table = Table("peak memory", "step time", "× fastest", "recomputation", "gap")
    fastest = min(point.plan.predicted.step_time_s for point in points)
    for point in points:
        predicted, solver = point.plan.predicted, point.plan.solver
        table.add_row(
            format_bytes(predicted.peak_memory_bytes),
            format_seconds(predicted.step_time_s),
            f"{predicted.step_time_s / fastest:.3f}" if fastest else "",
            checkpoint_text(point.plan.checkpoint),
            f"{solver.gap:.2%}",
        )
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(table)
    return captured.get()
