"""What a forward keeps on its modules, and on plain objects that they hold, for the next step.

    if self.cache is None:
        self.cache = encode(x)

A trace sees the first step alone: the second one would find the cache, and take the other branch.
"""

from __future__ import annotations

import logging
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from autopar._tracing import node_of
from autopar.tracer.sources import described

__all__ = [
    "Reads",
    "depend_on_step",
    "fakes_in",
    "holders",
    "is_plain_object",
    "made_by",
    "tensors_in",
]

_NO_STATE = (
    *(nn.Module, Tensor, type, ModuleType, FunctionType, MethodType, BuiltinFunctionType),
    *(torch.Generator, torch.dtype, torch.device, BaseException, logging.Logger),
)
_FILLING = ("append", "appendleft", "extend", "insert", "add", "update", "__setitem__")


def holders(model: nn.Module) -> dict[str, Any]:
    """Modules by name, and behind them plain objects in their attributes."""
    found: dict[str, Any] = dict(model.named_modules())
    seen = {id(x) for x in found.values()}
    waiting = deque(found.items())
    while waiting:
        name, holder = waiting.popleft()
        for key, value in list(vars(holder).items()):
            if id(value) not in seen and is_plain_object(value):
                seen.add(id(value))
                found[path := f"{name}.{key}" if name else key] = value
                waiting.append((path, value))
    return found


def is_plain_object(value: Any) -> bool:
    known = isinstance(value, _NO_STATE) or type(value).__module__.split(".")[0] == "torch"
    return not known and isinstance(getattr(value, "__dict__", None), dict)


def tensors_in(value: Any) -> list[Tensor]:
    """Tensors of a value, which may be a container of them."""
    return [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]


def fakes_in(value: Any) -> list[Tensor]:
    """Those of a trace."""
    return [x for x in tensors_in(value) if isinstance(x, FakeTensor)]


def made_by(tensors: Iterable[Tensor | None]) -> set[fx.Node]:
    """The nodes that tensors come from in the graph that is being traced."""
    return {node for x in tensors if x is not None and (node := node_of(x)) is not None}


def depend_on_step(tensors: Iterable[Tensor], state: set[fx.Node]) -> bool:
    """True if tensors are made of inputs, parameters or random numbers, rather than of `state`."""
    waiting, seen = list(made_by(tensors)), set(state)
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        tags = getattr(node.target, "tags", ())
        if node.op == "placeholder" or torch.Tag.nondeterministic_seeded in tags:
            return True
        waiting += node.all_input_nodes
    return False


class Reads:
    """Where a forward reads attributes of modules that it has not set before."""

    def __init__(self) -> None:
        self._lines: dict[tuple[int, str], dict[str, None]] = {}
        self._sources: dict[int, Callable[[str], dict[str, None]]] = {}
        self._set: set[tuple[int, str]] = set()
        self._seen: set[tuple[Any, ...]] = set()
        self._sizes: dict[tuple[int, str], int] = {}

    def add(self, holder: Any, lines: Callable[[str], dict[str, None]]) -> None:
        """Take lines of the source, by attribute, for reads of what is no module."""
        self._sources[id(holder)] = lines

    def _lines_of(self, holder: Any, key: str) -> dict[str, None]:
        source = self._sources.get(id(holder))
        return self._lines.get((id(holder), key), {}) if source is None else source(key)

    def line(self, holder: Any, key: str) -> str | None:
        """The first line that read one; None if none did, as far as this is known."""
        return next(iter(self._lines_of(holder, key)), None)

    def line_besides_filling(self, holder: Any, key: str) -> str | None:
        """The first line that read a container for more than to fill it; None if one empties it."""
        lines = self._lines_of(holder, key)
        if any(re.search(rf"\b{key}\.clear\(|del .*\b{key}\b", line) for line in lines):
            return None
        filling = rf"\b{key}(\.({'|'.join(_FILLING)})\(|\[[^=]*\]\s*=[^=])"
        return next((line for line in lines if not re.search(filling, line)), None)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """While a forward runs."""
        base: Any = nn.Module
        get, get_other, put = object.__getattribute__, base.__getattr__, base.__setattr__

        def reading(module: Any, key: str) -> Any:
            value = get(module, key)
            if (value is None or type(value) in _KEEPING) and self._is_as_found(module, key, value):
                self._note(module, key, sys._getframe(1))
            return value

        def reading_other(module: Any, key: str) -> Any:
            try:
                value = get_other(module, key)
            except AttributeError:
                self._note(module, key, sys._getframe(1))
                raise
            if value is None:
                self._note(module, key, sys._getframe(1))
            return value

        def putting(module: Any, key: str, value: Any) -> None:
            self._set.add((id(module), key))
            put(module, key, value)

        base.__getattribute__, base.__getattr__, base.__setattr__ = reading, reading_other, putting
        try:
            yield
        finally:
            del base.__getattribute__
            base.__getattr__, base.__setattr__ = get_other, put

    def _is_as_found(self, module: Any, key: str, value: Any) -> bool:
        """False for a container that has been filled since it was first read."""
        if not isinstance(value, (list, dict, deque)) or key in _OWN:
            return True
        return len(value) == self._sizes.setdefault((id(module), key), len(value))

    def _note(self, module: Any, key: str, frame: Any) -> None:
        place = id(module), key
        if place in self._set or key in _OWN or key.startswith("__"):
            return
        read = (*place, frame.f_code, frame.f_lineno)
        if read not in self._seen:
            self._seen.add(read)
            self._lines.setdefault(place, {})[described(frame)] = None


_OWN = frozenset(vars(nn.Module()))  # what torch keeps on a module: buffers, hooks
_KEEPING = (bool, int, float, complex, tuple, list, dict, deque)
