"""Values and functions without the tensors in them, for other tensors to stand there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from types import CellType, FunctionType
from typing import Any

from torch import Tensor

__all__ = ["filled", "form_of"]


def form_of(value: Any, tensors: list[Tensor]) -> Any:
    """What a value is, but for the tensors in it and around functions in it, which are listed.

    Forms of functions that the same line makes are equal.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return (Tensor,)
    if isinstance(value, partial):
        return partial, form_of((value.func, value.args, value.keywords), tensors)
    if isinstance(value, FunctionType):
        around = tuple(cell.cell_contents for cell in value.__closure__ or ())
        inside = (around, value.__defaults__, value.__kwdefaults__)
        code = value.__code__
        return FunctionType, code, _Globals(value.__globals__), form_of(inside, tensors)
    if type(value) in (tuple, list):
        return type(value), tuple(form_of(x, tensors) for x in value)
    if type(value) is dict:
        return dict, tuple(value), tuple(form_of(x, tensors) for x in value.values())
    return None, value


def filled(form: Any, tensors: Iterator[Tensor]) -> Any:
    """The value of a form, with other tensors in the places of its own."""
    kind, *parts = form
    if kind is Tensor:
        return next(tensors)
    if kind is partial:
        function, args, keywords = filled(parts[0], tensors)
        return partial(function, *args, **keywords)
    if kind is FunctionType:
        code, found, inside = parts
        around, defaults, keyword_defaults = filled(inside, tensors)
        cells = tuple(CellType(x) for x in around)
        made = FunctionType(code, found.names, code.co_name, defaults, cells)
        made.__kwdefaults__ = keyword_defaults
        return made
    if kind is dict:
        return dict(zip(parts[0], (filled(x, tensors) for x in parts[1]), strict=True))
    return parts[0] if kind is None else kind(filled(x, tensors) for x in parts[0])


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class _Globals:
    """The global names of a function, of which there is one mapping for each module."""

    names: dict[str, Any]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Globals) and self.names is other.names

    def __hash__(self) -> int:
        return id(self.names)

    def __repr__(self) -> str:
        return f"names of {self.names.get('__name__')}"
