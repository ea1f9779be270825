"""How long a search may go on once it knows a plan.

What takes long asks `check_time` now and then; `OutOfTime` ends it, and who began it answers with
the best that it has noted by then. Nothing ends before `plan_found` has been called.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

__all__ = ["OutOfTime", "check_time", "is_timed", "plan_found", "time_limit"]


class OutOfTime(Exception):
    """The time is up, and a plan is known; of no kind that a search takes for its own."""


@dataclass(slots=True)
class _Limit:
    ends: float  # of `time.monotonic`
    has_plan: bool = False


_LIMIT: ContextVar[_Limit | None] = ContextVar("time limit", default=None)


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Ends what is in it by `OutOfTime`, once it is out of time and has found a plan.

    Args:
        seconds: None for no limit.
    """
    limit = None if seconds is None else _Limit(time.monotonic() + seconds)
    token = _LIMIT.set(limit)
    try:
        yield
    finally:
        _LIMIT.reset(token)


def is_timed() -> bool:
    """True inside of a time limit."""
    return _LIMIT.get() is not None


def plan_found() -> None:
    """Note that a plan is known."""
    limit = _LIMIT.get()
    if limit is not None:
        limit.has_plan = True


def check_time() -> None:
    """Raises `OutOfTime` where a plan is known and the time is up."""
    limit = _LIMIT.get()
    if limit is not None and limit.has_plan and time.monotonic() >= limit.ends:
        raise OutOfTime
