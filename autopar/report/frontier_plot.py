"""The frontier of time and memory as an SVG picture."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

from jinja2 import Environment

from autopar.core.block_kinds import checkpoint_text
from autopar.core.plan import Plan
from autopar.core.units import format_bytes, format_seconds

__all__ = ["frontier_svg"]

_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 600, 40, 330
_LINES = 5  # across, with their seconds
_LONG = 14  # characters of a label


def frontier_svg(plans: Sequence[Plan]) -> str:
    """An SVG picture of predicted seconds against peak memory, a step at each plan.

    Args:
        plans: by falling peak, each faster than those behind it.
    """
    peaks = [plan.predicted.peak_memory_bytes for plan in plans]
    seconds = [plan.predicted.step_time_s for plan in plans]
    most_s = max(seconds) or 1.0

    def x(peak: float) -> float:
        spread = max(peaks) - min(peaks)
        share = (peak - min(peaks)) / spread if spread else 0.5
        return round(_LEFT + 20 + share * (_RIGHT - _LEFT - 40), 1)

    def y(step_s: float) -> float:
        return round(_BOTTOM - (_BOTTOM - _TOP) * step_s / most_s, 1)

    points = [
        {
            "x": x(peak),
            "y": y(step_s),
            "memory": format_bytes(peak),
            "time": format_seconds(step_s),
            "kinds": (kinds := checkpoint_text(plan.checkpoint)),
            "short": kinds if len(kinds) <= _LONG else "mixed",
        }
        for plan, peak, step_s in zip(plans, peaks, seconds, strict=True)
    ]
    # up to the next plan's peak the slower one is all that fits
    turns = sorted(zip(peaks, seconds, strict=True))
    line = f"M{x(turns[0][0])} {y(turns[0][1])}" + "".join(
        f"H{x(peak)}V{y(step_s)}" for peak, step_s in turns[1:]
    )
    times = [
        (y(most_s * i / (_LINES - 1)), format_seconds(most_s * i / (_LINES - 1)))
        for i in range(_LINES)
    ]
    template = files("autopar.report").joinpath("assets/frontier.svg").read_text("utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(points=points, line=line, times=times)
