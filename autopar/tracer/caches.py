"""Caches of `functools` that a forward fills while it is traced are emptied.

    @lru_cache
    def table(self, length): …

What they hold then are tensors of that trace, which no other trace and no step can compute with.
"""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FunctionType
from typing import Any

from torch import nn

from autopar.tracer.diagnose import is_outside

__all__ = ["emptying_caches"]

_Cache: Any = type(functools.lru_cache(lambda: None))


@contextmanager
def emptying_caches(model: nn.Module) -> Iterator[None]:
    """While a forward is traced."""
    before = {id(cache): cache.cache_info().misses for cache in _caches(model)}
    try:
        yield
    finally:
        for cache in _caches(model):  # others too, of modules imported meanwhile
            if cache.cache_info().misses > before.get(id(cache), 0):
                cache.cache_clear()


def _caches(model: nn.Module) -> list[Any]:
    """Those in the modules that a model's code is from or speaks of, and in its classes."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    waiting: deque[Mapping[str, Any]] = deque(vars(kind) for kind in kinds if _is_own(kind))
    seen: set[int] = set()
    found: dict[int, Any] = {}
    while waiting:
        for value in list(waiting.popleft().values()):
            value = getattr(value, "__func__", value) if _is_method(value) else value
            if id(value) in seen or not isinstance(value, (_Cache, FunctionType, type)):
                continue
            seen.add(id(value))
            if not _is_own(value):
                continue
            if isinstance(value, _Cache):
                found[id(value)] = value
            elif isinstance(value, type):
                waiting.append(vars(value))
            space = vars(sys.modules.get(value.__module__, sys))
            if id(space) not in seen and space is not vars(sys):
                seen.add(id(space))
                waiting.append(space)
            waiting.append(_closed_over(value))
    return list(found.values())


def _is_method(value: Any) -> bool:
    return isinstance(value, (staticmethod, classmethod))


def _is_own(value: Any) -> bool:
    """True for what is not of torch, autopar or Python itself."""
    file = getattr(sys.modules.get(value.__module__ or ""), "__file__", None)
    return file is not None and is_outside(file)


def _closed_over(value: Any) -> dict[str, Any]:
    """What stands around a function, by name, and around the one that it wraps."""
    inner = getattr(value, "__wrapped__", None)
    found: dict[str, Any] = {} if inner is None else _closed_over(inner)
    if not isinstance(value, FunctionType) or value.__closure__ is None:
        return found
    for name, cell in zip(value.__code__.co_freevars, value.__closure__, strict=True):
        with suppress(ValueError):  # it is set later
            found[name] = cell.cell_contents
    return found
