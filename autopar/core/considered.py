"""What a plan was preferred to."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Considered"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Considered:
    """A pipeline that was weighed and not chosen.

    Attributes:
        shape: ranks and microbatches.
        why: it was not.
        bound_s: seconds that no plan of it can beat, where it has one.
        step_s: of its plan, where it was planned.
    """

    shape: str
    why: str
    bound_s: float | None = None
    step_s: float | None = None
