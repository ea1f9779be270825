"""Plain values that a step was compiled with: they stay as they were."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from autopar.errors import AutoparError, FrozenValueWarning

__all__ = ["FixedValues", "Reachable", "is_set_already"]

_VALUES = (bool, int, float, complex, str)
Reachable = Callable[[], Iterable[tuple[str, Callable[[], Any]]]]
"""Values that a forward can reach, by name: on the plain model, in global variables and others."""


class FixedValues:
    """Values that a step was compiled with, which a script may change."""

    def __init__(self, reachable: Reachable) -> None:
        found = ((path, read, read()) for path, read in reachable())
        self._kept = [each for each in found if type(each[2]) in _VALUES]
        self._told: set[str] = set()

    def check(self) -> None:
        """Warn of what has been changed since, once each."""
        for path, read, old in self._kept:
            new = read()
            if new is not old and new != old and path not in self._told:
                self._told.add(path)
                warnings.warn(
                    f"{path}, which the forward can read, is {new!r} now, and was {old!r} when the "
                    "step was compiled, which goes on with that. Make what changes between steps a "
                    "buffer (register_buffer) and write to that of the parallel module, or pass it "
                    "as an input",
                    FrozenValueWarning,
                    stacklevel=4,
                )


def is_set_already(module: nn.Module, original: nn.Module | None, name: str, value: object) -> bool:
    """True for a value that the model has, and the step was compiled with.

    Raises:
        AutoparError: it has another one there, so that setting it would have no effect.
    """
    if original is None or name in vars(module) or hasattr(type(module), name):
        return False
    kinds = (module._buffers, module._parameters, module._modules)
    if any(name in kept for kept in kinds) or not hasattr(original, name):
        return False
    now = getattr(original, name)
    if value is now or (type(now) in _VALUES and value == now):
        return True
    raise AutoparError(
        f"{name!r} of a parallel module cannot be set to {value!r}: the step is compiled from the "
        f"model as it was given, with {now!r}. Make what changes between steps a buffer "
        "(register_buffer) and write to it, or pass it as an input; change the rest before "
        "autopar.parallelize."
    )
