"""What other packages add to autopar: their entry points, and the sources that they consist of.

A registry calls `load` before it is read and `note` when something is registered. `digest` goes
into the key of cached plans and into what ranks compare, so that neither a plan nor a run mixes two
versions of a rule.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, TypeVar

from autopar.errors import AutoparError

__all__ = ["digest", "found", "is_same", "load", "loaded", "note", "taken"]

_T = TypeVar("_T")

_GROUPS = (
    "autopar.rules",
    "autopar.lowerings",
    "autopar.passes",
    "autopar.patterns",
    "autopar.schedules",
)
"""Groups whose entry points are imported, for what they register."""

_outcomes: dict[str, AutoparError | None] = {}
_noted: dict[tuple[str, str], Callable[..., Any]] = {}


def found(group: str) -> tuple[EntryPoint, ...]:
    """The entry points of a group, by name."""
    return tuple(sorted(entry_points(group=group), key=lambda e: (e.name, e.value)))


def load(group: str) -> None:
    """Import the entry points of a group, once.

    Raises:
        AutoparError: one cannot be imported, or what it registers is taken; names its package.
    """
    if group not in _outcomes:
        _outcomes[group] = None  # what is imported may ask the registry that it belongs to
        try:
            for entry in found(group):
                loaded(entry)
        except AutoparError as error:
            _outcomes[group] = error
    failure = _outcomes[group]
    if failure is not None:
        raise failure


def loaded(entry: EntryPoint) -> Any:
    """What an entry point names.

    Raises:
        AutoparError: it cannot be imported; names its package.
    """
    try:
        return entry.load()
    except Exception as error:
        owner = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unknown package"
        raise AutoparError(
            f"{owner} extends autopar with {entry.name} = {entry.value!r} ({entry.group}), and "
            f"importing that failed: {type(error).__name__}: {error}. Repair or uninstall it."
        ) from error


def note(kind: str, names: Iterable[str], function: Callable[..., Any]) -> None:
    """Remember what was registered; autopar's own needs no note.

    Args:
        kind: "rule", "work", "lowering", "pass", "pattern" or "schedule".
        names: ops, or the name of it.
        function: whose module's sources count.
    """
    if function.__module__.partition(".")[0] != "autopar":
        _noted.update({(kind, name): function for name in names})


def taken(table: Mapping[Any, _T], target: Any) -> _T | None:
    """What is registered for an op already, whether by the op or by its name."""
    if isinstance(target, str):
        return next((value for key, value in table.items() if str(key) == target), None)
    return table.get(target) or table.get(str(target))


def is_same(old: Callable[..., Any], new: Callable[..., Any]) -> bool:
    """True where `new` is `old` defined again: a module that was reloaded, a cell run again."""
    return (
        old.__module__.partition(".")[0] != "autopar"
        and (old.__module__, old.__qualname__) == (new.__module__, new.__qualname__)
    )  # fmt: skip


def digest() -> str:
    """Hash of all that extensions register, with their sources; "" where there are none."""
    for group in _GROUPS:
        load(group)
    if not _noted:
        return ""
    hashed = hashlib.sha256()
    for (kind, name), function in sorted(_noted.items(), key=lambda item: item[0]):
        hashed.update(repr((kind, name, function.__qualname__, _sources(function))).encode())
    return hashed.hexdigest()[:32]


def _sources(function: Callable[..., Any]) -> str:
    """Hash of the package that a function is in, else of its file, else of its bytecode."""
    package = getattr(sys.modules.get(function.__module__), "__package__", None)
    parent = sys.modules.get(package) if package else None
    if parent is not None and getattr(parent, "__path__", None):
        return _folder(tuple(parent.__path__))
    try:
        return _hash(Path(inspect.getfile(function)).read_bytes())
    except (OSError, TypeError):
        code = getattr(function, "__code__", None)
        return _hash(repr(code and (code.co_code, code.co_consts, code.co_names)).encode())


@lru_cache
def _folder(roots: tuple[str, ...]) -> str:
    files = sorted(path for root in roots for path in Path(root).rglob("*.py"))
    return _hash(*(path.read_bytes() for path in files))


def _hash(*parts: bytes) -> str:
    hashed = hashlib.sha256()
    for part in parts:
        hashed.update(len(part).to_bytes(8, "little") + part)
    return hashed.hexdigest()
