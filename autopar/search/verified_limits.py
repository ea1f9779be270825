"""The memory limit that an error names for a pipeline: one that the pipeline was planned under.

A stage that does not fit knows what it needs itself. Later stages may need more, and each receives
what stages before it send, which may be laid out otherwise under another limit.
"""

from __future__ import annotations

from collections.abc import Callable

from autopar.core.plan import Plan
from autopar.core.units import format_bytes
from autopar.errors import AutoparError, InfeasiblePlanError

__all__ = ["with_verified_limit"]

_EXACT = 6  # limits that are what a stage needs; behind them, each is twice the last
_MOST = 16  # limits


def with_verified_limit(
    error: InfeasiblePlanError, plan: Callable[[int], Plan]
) -> InfeasiblePlanError:
    """The error of a stage that does not fit, with a limit that all stages fit.

    Args:
        error: carries what the stage needs.
        plan: plans the step under a limit; raises if nothing fits.
    """
    required = _verified(error, plan)
    text = str(error)
    if required is not None and f"{required} bytes" not in text:
        text += (
            " The smallest limit that a plan of all stages was found for is "
            f"{required} bytes ({format_bytes(required)})."
        )
    return InfeasiblePlanError(
        text,
        memory_limit_bytes=error.memory_limit_bytes,
        required_bytes=required,
        stage=error.stage,
    )


def _verified(error: InfeasiblePlanError, plan: Callable[[int], Plan]) -> int | None:
    """The first limit that fits, of those that stages are said to need; None if none does."""
    limit = error.required_bytes or 0
    for turn in range(_MOST):
        try:
            plan(limit)
        except InfeasiblePlanError as again:
            least = limit + 1 if turn < _EXACT else 2 * limit
            limit = max(again.required_bytes or 0, least)
        except AutoparError:
            return None
        else:
            return limit
    return None
