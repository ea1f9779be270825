"""Where code of a model keeps values besides its modules: globals, classes and closures.

CALLS = 0                         class Model(nn.Module):
                                      calls = 0
def forward(self, x):
    global CALLS; CALLS += 1              type(self).calls += 1
"""

from __future__ import annotations

import inspect
import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

from torch import Tensor, nn

from autopar.tracer.diagnose import is_outside
from autopar.tracer.kept import holders, is_plain_object

__all__ = ["Names", "Scope", "scopes_of", "values_in_reach"]

_VALUES = (bool, int, float, complex, list, dict, deque, Tensor, type(None))


class Names(SimpleNamespace):
    """Values of a scope, by name."""


@dataclass
class Scope:
    """Values of a scope as attributes of `found`, which may be changed and put back.

    Attributes:
        name: in words.
        found: those of the names that code of the model speaks of.
        functions: of that code, by the name that they speak of.
        objects: plain ones, by name, with values as attributes.
    """

    name: str
    read: Callable[[str], Any]
    write: Callable[[str, Any], None]
    found: Names = field(default_factory=Names)
    functions: dict[str, list[FunctionType]] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)

    def lines(self, key: str) -> dict[str, None]:
        """The lines that read a name, as warnings name them."""
        found = (line for f in self.functions.get(key, ()) for line in _lines(f, key))
        return dict.fromkeys(found)

    def refresh(self) -> None:
        """Take the values that are there now."""
        for key in vars(self.found):
            setattr(self.found, key, self.read(key))

    def put_back(self) -> None:
        """Write the values of `found` to where others are."""
        for key, value in vars(self.found).items():
            if self.read(key) is not value:
                self.write(key, value)


def scopes_of(model: nn.Module) -> list[Scope]:
    """Scopes that the forward of a model can reach without its modules."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__ if _is_own(kind)}
    found: dict[Any, Scope] = {}
    waiting = deque(f for kind in kinds for value in vars(kind).values() for f in _functions(value))
    waiting += [f for module in model.modules() for f in _hooks(module)]
    seen: set[int] = set()
    while waiting:
        function = waiting.popleft()
        if id(function) in seen or not is_outside(function.__code__.co_filename):
            continue
        seen.add(id(function))
        for scope, key, value in _mentioned(function, found):
            if isinstance(value, FunctionType):
                waiting.append(value)
            elif isinstance(value, _VALUES):
                setattr(scope.found, key, value)
                scope.functions.setdefault(key, []).append(function)
            elif is_plain_object(value):
                scope.objects[f"{scope.name}.{key}"] = value
    return [*found.values(), *filter(None, (_of_class(kind) for kind in kinds))]


def values_in_reach(model: nn.Module) -> list[tuple[str, Callable[[], Any]]]:
    """Names of plain values that the forward of a model may read, and how to read them."""
    found: list[tuple[str, Callable[[], Any]]] = []
    scopes = scopes_of(model)
    objects = [pair for scope in scopes for pair in scope.objects.items()]
    for name, holder in (*holders(model).items(), *objects):
        for key in vars(holder):
            if not isinstance(holder, nn.Module) or key not in _OF_MODULES:
                found.append((f"{name}.{key}" if name else key, partial(vars(holder).get, key)))
    for scope in scopes:
        for key in vars(scope.found):
            found.append((f"{scope.name}.{key}", partial(scope.read, key)))
    return found


_OF_MODULES = frozenset(vars(nn.Module()))


def _is_own(kind: type) -> bool:
    module = kind.__module__.split(".")[0]
    return module not in ("torch", "builtins", "abc", "typing", "autopar")


def _functions(value: Any) -> Iterator[FunctionType]:
    """The functions behind an attribute of a class."""
    inner = (getattr(value, name, None) for name in ("__func__", "fget"))
    yield from (f for f in (value, *inner) if isinstance(f, FunctionType))


def _hooks(module: nn.Module) -> Iterator[FunctionType]:
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    yield from (hook for hook in hooks if isinstance(hook, FunctionType))


def _mentioned(function: FunctionType, found: dict[Any, Scope]) -> Iterator[tuple[Scope, str, Any]]:
    """Globals and variables around it that a function speaks of."""
    space = function.__globals__
    name = f"global {space.get('__name__')}"
    scope = found.setdefault(id(space), Scope(name, space.get, space.__setitem__))
    yield from ((scope, key, space[key]) for key in _names(function.__code__) if key in space)
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for key, cell in cells:
        try:
            value = cell.cell_contents
        except ValueError:  # it is set later
            continue
        scope = found.setdefault(id(cell), _of_cell(function, cell))
        yield scope, key, value


def _of_cell(function: FunctionType, cell: Any) -> Scope:
    def write(_: str, value: Any) -> None:
        cell.cell_contents = value

    return Scope(f"(outside {function.__qualname__})", lambda _: cell.cell_contents, write)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _of_class(kind: type) -> Scope | None:
    scope = Scope(
        kind.__qualname__,
        lambda key: vars(kind).get(key),
        lambda key, value: setattr(kind, key, value),
    )
    functions = [f for value in vars(kind).values() for f in _functions(value)]
    names = {id(f): set(_names(f.__code__)) for f in functions}
    for key, value in vars(kind).items():
        if isinstance(value, _VALUES) and not key.startswith("__"):
            setattr(scope.found, key, value)
            scope.functions[key] = [f for f in functions if key in names[id(f)]]
    return scope if vars(scope.found) else None


def _lines(function: FunctionType, key: str) -> Iterator[str]:
    try:
        source, first = inspect.getsourcelines(function)
    except (OSError, TypeError):
        return
    code = function.__code__
    for i, line in enumerate(source):
        if _reads(line, key):
            yield f"{code.co_filename}:{first + i} in {code.co_name}: {line.strip()}"


def _reads(line: str, key: str) -> bool:
    setting = re.match(rf"\s*(global|nonlocal)\b[^;]*$|\s*{key}\s*=(?!=)(.*)", line)
    read = line if setting is None else setting[2] or ""
    return re.search(rf"\b{key}\b", read) is not None
