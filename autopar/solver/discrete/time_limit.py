"""How long a search may go on once it knows a plan.

What takes long asks `check_time` now and then; `OutOfTime` ends it, and who began it answers with
the best that it has noted by then. Nothing ends before `plan_found` has been called. A search that
takes long says so once, and how to end it: to the log of `autopar`, as nothing is wrong.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

__all__ = ["OutOfTime", "check_time", "is_timed", "plan_found", "time_limit"]


_LOG = logging.getLogger("autopar")
_LONG_S = 60.0  # of searching without a limit, after which a user may want to know of limits


class OutOfTime(Exception):
    """The time is up, and a plan is known; of no kind that a search takes for its own."""


@dataclass(slots=True)
class _Search:
    began: float  # of `time.monotonic`
    limit_s: float | None
    has_plan: bool = False
    told: bool = False

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began


_SEARCH: ContextVar[_Search | None] = ContextVar("search", default=None)


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Ends what is in it by `OutOfTime`, once it is out of time and has found a plan.

    Args:
        seconds: None for no limit.
    """
    token = _SEARCH.set(_Search(time.monotonic(), seconds))
    try:
        yield
    finally:
        _SEARCH.reset(token)


def is_timed() -> bool:
    """True inside of a time limit."""
    search = _SEARCH.get()
    return search is not None and search.limit_s is not None


def plan_found() -> None:
    """Note that a plan is known."""
    search = _SEARCH.get()
    if search is not None:
        search.has_plan = True


def check_time() -> None:
    """Raises `OutOfTime` where a plan is known and the time is up."""
    search = _SEARCH.get()
    if search is None:
        return
    if search.limit_s is None:
        if not search.told and search.seconds >= _LONG_S:
            search.told = True
            _LOG.warning(
                "planning has taken %.0f s and goes on. With time_limit=60, it ends after 60 s "
                "of searching with the best plan that is known then.",
                search.seconds,
            )
    elif search.has_plan and search.seconds >= search.limit_s:
        raise OutOfTime
