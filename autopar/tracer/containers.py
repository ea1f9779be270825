"""Lists and mappings in attributes of a model, with what stands in them: kept, and put back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from torch import nn

from autopar.tracer.kept import holders

__all__ = [
    "OWN",
    "REFILLED",
    "Containers",
    "containers_of",
    "is_unchanged",
    "kept_attributes",
    "pairs_of",
    "refill",
    "same_containers",
]

OWN = vars(nn.Module())
"""What torch keeps on a module: buffers, hooks."""
REFILLED = (list, deque, dict)
"""Types of what can be put back into what it was."""
Pairs: TypeAlias = list[tuple[Any, Any]]
Containers = dict[str, tuple[Any, Pairs]]
"""Lists and mappings of a holder, by attribute, with what stands in them."""


def containers_of(holder: Any) -> Containers:
    """Those in the attributes of a holder."""
    return {
        key: (value, pairs_of(value))
        for key, value in vars(holder).items()
        if key not in OWN and isinstance(value, REFILLED)
    }


def pairs_of(value: Any) -> Pairs:
    """What stands in a container, by key or place."""
    return list(value.items() if isinstance(value, dict) else enumerate(value))


def is_unchanged(value: Any, pairs: Pairs) -> bool:
    """True if the same things stand in a container."""
    keyed, after = isinstance(value, dict), pairs_of(value)
    return len(after) == len(pairs) and all(
        a[1] is b[1] and (not keyed or a[0] is b[0]) for a, b in zip(after, pairs, strict=True)
    )


def refill(value: Any, pairs: Pairs) -> None:
    """Put back what stood in a container."""
    if is_unchanged(value, pairs):
        return  # it may be one that refuses writes
    value.clear()
    if isinstance(value, dict):
        value.update(pairs)
    else:
        value.extend(x for _, x in pairs)


@contextmanager
def kept_attributes(model: nn.Module) -> Iterator[None]:
    """Afterwards attributes, and what lists and mappings in them hold, are what they were."""
    before = [(x, dict(vars(x)), containers_of(x)) for x in holders(model).values()]
    try:
        yield
    finally:
        for holder, known, inside in before:
            vars(holder).clear()
            vars(holder).update(known)
            for value, pairs in inside.values():
                refill(value, pairs)


@contextmanager
def same_containers(model: nn.Module) -> Iterator[None]:
    """Afterwards attributes hold the same lists and mappings, with the same things in them.

    An export puts copies into their place: what several modules share would be shared no more.
    """
    before = [
        (holder, {k: v for k, v in vars(holder).items() if k not in OWN and _is_container(v)})
        for holder in holders(model).values()
    ]
    inside = _all_inside(value for _, known in before for value in known.values())
    try:
        yield
    finally:
        for holder, known in before:
            vars(holder).update(known)
        for value, pairs in inside:
            refill(value, pairs)


def _is_container(value: Any) -> bool:
    return isinstance(value, (*REFILLED, tuple))


def _all_inside(given: Iterable[Any]) -> list[tuple[Any, Pairs]]:
    """Lists and mappings, those inside of others too, with what stands in them."""
    found: list[tuple[Any, Pairs]] = []
    seen, waiting = set[int](), list(given)
    while waiting:
        value = waiting.pop()
        if id(value) in seen or not _is_container(value):
            continue
        seen.add(id(value))
        pairs = pairs_of(value)
        waiting += (x for _, x in pairs)
        if not isinstance(value, tuple):
            found.append((value, pairs))
    return found
