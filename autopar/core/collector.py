"""Python's cyclic garbage collector, paused where it would scan ever more living objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collect_many", "paused_collector"]

_MANY = 1_000_000  # objects since the last collection


@contextmanager
def paused_collector() -> Iterator[None]:
    """No collections inside (also as a decorator); on leaving, the collector is as it was.

    Graphs and tables of costs live until their plan is made, so that looking for cycles among them
    costs time and frees little.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def collect_many() -> None:
    """One collection, between two pieces of work, if many objects have come since the last.

    Graphs that are done with are cycles, which would stay while the collector is paused. Those
    older than the last collection are not looked at.
    """
    if gc.get_count()[0] > _MANY:
        gc.collect(0)
