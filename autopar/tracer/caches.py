"""Caches of `functools` that a forward fills while it is traced are emptied.

    @lru_cache
    def table(self, length): …

What they hold then are tensors of that trace, which no other trace and no step can compute with.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from autopar.tracer.diagnose import is_outside

__all__ = ["emptying_caches"]

_Cache: Any = type(functools.lru_cache(lambda: None))


@contextmanager
def emptying_caches() -> Iterator[None]:
    """While a forward is traced."""
    before = {id(cache): cache.cache_info().misses for cache in _caches()}
    try:
        yield
    finally:
        for cache in _caches():
            if cache.cache_info().misses > before.get(id(cache), 0):
                cache.cache_clear()


def _caches() -> list[Any]:
    """Those of functions that are not of torch or Python itself."""
    found = [x for x in gc.get_objects() if type(x) is _Cache]
    return [x for x in found if _is_outside(x.__wrapped__)]


def _is_outside(function: Any) -> bool:
    return isinstance(function, FunctionType) and is_outside(function.__code__.co_filename)
