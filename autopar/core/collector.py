"""Python's cyclic garbage collector, left out where it would look at ever more living objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["paused_collector"]


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
