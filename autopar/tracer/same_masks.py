"""Masks that a forward computes twice, as in `x[labels >= 0], y[labels >= 0]`, count as one.

To `torch.export`, how many rows each mask selects is a number of its own, and two such numbers are
not known to be equal. So the mask that was made first selects for the others, if all were made by
the same functions of the same values and none was written to since.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

__all__ = ["SameMasks"]

_MAKING = frozenset(
    "ne eq gt lt ge le isfinite isnan logical_not logical_and logical_or bitwise_not bitwise_and "
    "bitwise_or __invert__ __and__ __or__ __ne__ __eq__ __gt__ __lt__ __ge__ __le__ "
    "bool to cpu as_tensor view reshape flatten squeeze unsqueeze expand expand_as "
    "__getitem__".split()
)
_PICKING = (torch.Tensor.__getitem__, torch.masked_select, torch.Tensor.masked_select)


class SameMasks:
    """Knows how masks were made. Tensors are kept, so that no other gets the identity of one."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Tensor, int, Hashable]] = {}
        self._first: dict[Hashable, Tensor] = {}

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Remember how a tensor was made."""
        name = getattr(func, "__name__", "")
        if name in _MAKING and isinstance(result, Tensor) and not result.is_floating_point():
            key = (name, self.key(args), self.key(tuple(kwargs.items())))
            if name in ("expand", "expand_as"):  # to the shape of whatever tensor
                key = ("expand", self.key(args[0]), tuple(result.shape))
            self._made.setdefault(id(result), (result, result._version, key))

    def picking(self, func: Any, args: Any) -> Any:
        """The arguments of a call that may pick, by the mask that was made first."""
        if func not in _PICKING or len(args) != 2:
            return args
        source, index = args
        if isinstance(index, tuple):
            return source, tuple(self._known(part) for part in index)
        return source, self._known(index)

    def _known(self, mask: Any) -> Any:
        if not isinstance(mask, Tensor) or mask.dtype is not torch.bool:
            return mask
        first = self._first.setdefault(self.key(mask), mask)
        return first if self.key(first) == self.key(mask) else mask

    def key(self, value: Any) -> Hashable:
        """Equal for values that were made alike."""
        if isinstance(value, Tensor):
            made = self._made.get(id(value))
            if made is not None and made[1] == value._version:
                return made[2]
            self._made.setdefault(id(value), (value, -1, None))
            return ("tensor", id(value), value._version)
        if isinstance(value, (tuple, list)):
            return tuple(self.key(part) for part in value)
        if isinstance(value, slice):
            return ("slice", self.key((value.start, value.stop, value.step)))
        return (type(value), value) if isinstance(value, Hashable) else id(value)
