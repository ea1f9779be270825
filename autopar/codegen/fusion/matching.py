"""Trees of ops to look for in an emitted graph.

A pattern is built from `Op`, `V` (any value) and `K` (any number); numbers and lists in it stand
for themselves. Views that change nothing and casts between floating dtypes are looked through, and
the operands of sums and products match in either order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from autopar.core.graph import value_of

__all__ = ["K", "Match", "Op", "V", "find", "look_through"]

aten = torch.ops.aten
_COMMUTE = frozenset(
    {aten.add.Tensor, aten.mul.Tensor, aten.logical_and.default, aten.logical_or.default}
)
_SAME = frozenset({aten.alias.default, aten.detach.default})
_TOLERANCE = 1e-6  # of numbers that a model spells with more or fewer digits


@dataclass(frozen=True, slots=True)
class V:
    """Any value, the same one wherever the name stands."""

    name: str


@dataclass(frozen=True, slots=True)
class K:
    """Any number or list, the same one wherever the name stands."""

    name: str


class Op:
    """A call of one of `targets` with operands that match.

    Args:
        targets: an op or several.
        *args: patterns of the positional arguments; further arguments of the call are refused.
        name: binds the call's node.
        given: True where the call is read only (its phase may be another, and it stays).
    """

    def __init__(self, targets: Any, *args: Any, name: str = "", given: bool = False) -> None:
        self.targets = targets if isinstance(targets, tuple) else (targets,)
        self.args = args
        self.name = name
        self.given = given


@dataclass(slots=True)
class Match:
    """What a pattern found.

    Attributes:
        root: the node that was looked at.
        bound: nodes and numbers by name.
        inner: nodes of the pattern that are not `given`, the root among them.
    """

    root: fx.Node
    bound: dict[str, Any] = field(default_factory=dict)
    inner: frozenset[fx.Node] = frozenset()

    def __getitem__(self, name: str) -> Any:
        return self.bound[name]


def _is_tensor(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), Tensor)


def is_cast(node: fx.Node) -> bool:
    """True for a cast from one floating dtype to another."""
    if node.target is not aten._to_copy.default or not _is_tensor(node.args[0]):
        return False
    source = node.args[0]
    assert isinstance(source, fx.Node)
    same_place = value_of(source).device == value_of(node).device
    floating = value_of(source).is_floating_point() and value_of(node).is_floating_point()
    return same_place and floating and "memory_format" not in node.kwargs


def look_through(node: fx.Node, *, rounding: bool = True) -> fx.Node:
    """The source of views that change nothing and of casts; with `rounding`, narrowing ones too."""
    while True:
        if node.target not in _SAME and not is_cast(node):
            return node
        source = node.args[0]
        assert isinstance(source, fx.Node)
        if not rounding and node.target not in _SAME:
            narrow, wide = value_of(source).dtype, value_of(node).dtype
            if torch.promote_types(narrow, wide) != wide:
                return node
        node = source


def find(pattern: Op, root: fx.Node) -> Match | None:
    """The first way in which the pattern matches at `root`, or None."""
    for bound, inner in _match_op(pattern, root, {}, frozenset(), root.meta.get("phase")):
        return Match(root, bound, inner)
    return None


_State = tuple[dict[str, Any], frozenset[fx.Node]]


def _match(
    pattern: Any, arg: Any, bound: dict[str, Any], inner: frozenset[fx.Node], phase: Any
) -> Iterator[_State]:
    if isinstance(pattern, V):
        if not isinstance(arg, fx.Node):
            return
        known = bound.get(pattern.name)
        if known is None:
            yield {**bound, pattern.name: look_through(arg, rounding=False)}, inner
        elif look_through(known) is look_through(arg):
            yield bound, inner
    elif isinstance(pattern, K):
        if isinstance(arg, fx.Node):
            return
        known = bound.get(pattern.name)
        if known is None or known == arg:
            yield {**bound, pattern.name: arg}, inner
    elif isinstance(pattern, Op):
        if isinstance(arg, fx.Node):
            yield from _match_op(pattern, look_through(arg), bound, inner, phase)
    elif isinstance(pattern, (list, tuple)):
        if isinstance(arg, (list, tuple)) and len(arg) == len(pattern):
            yield from _match_all(tuple(pattern), tuple(arg), bound, inner, phase)
    elif isinstance(arg, fx.Node):
        return
    elif isinstance(pattern, float) and isinstance(arg, (int, float)):
        if arg == pattern or abs(arg - pattern) <= _TOLERANCE * abs(pattern) < math.inf:
            yield bound, inner
    elif pattern == arg:
        yield bound, inner


def _match_op(
    pattern: Op, node: fx.Node, bound: dict[str, Any], inner: frozenset[fx.Node], phase: Any
) -> Iterator[_State]:
    if node.op != "call_function" or node.target not in pattern.targets:
        return
    if not pattern.given and node.meta.get("phase") != phase:
        return
    if len(node.args) != len(pattern.args) or node.kwargs:
        return
    if pattern.name:
        if bound.get(pattern.name, node) is not node:
            return
        bound = {**bound, pattern.name: node}
    if not pattern.given:
        inner = inner | {node}
    orders = [pattern.args]
    if node.target in _COMMUTE:
        orders.append((pattern.args[1], pattern.args[0]))
    for order in orders:
        yield from _match_all(order, node.args, bound, inner, phase)


def _match_all(
    patterns: tuple[Any, ...],
    args: tuple[Any, ...],
    bound: dict[str, Any],
    inner: frozenset[fx.Node],
    phase: Any,
) -> Iterator[_State]:
    if not patterns:
        yield bound, inner
        return
    for state in _match(patterns[0], args[0], bound, inner, phase):
        yield from _match_all(patterns[1:], args[1:], *state, phase)
