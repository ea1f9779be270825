"""Pipelines that a plan was preferred to."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Considered"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Considered:
    """A pipeline that was considered and not chosen.

    Attributes:
        shape: its ranks and microbatches.
        why: the reason that it was not chosen.
        bound_s: seconds that no plan of this shape can beat, if it was bounded.
        step_s: seconds of its plan, if it was planned.
    """

    shape: str
    why: str
    bound_s: float | None = None
    step_s: float | None = None
