"""Loops over the places where a mask selects anything: a forward is traced as if all places did.

    mask = F.one_hot(chosen, num_experts).permute(2, 1, 0)           # (experts, k, tokens)
    for i in (mask.sum((-1, -2)) > 0).nonzero():
        nth, token = torch.where(mask[i[0]])
        out.index_add_(0, token, expert(i, x[token]))

How often the loop runs depends on values. A pass for a place that the mask never selects changes
nothing, if all that the body leaves behind is written at rows that `mask[i]` picks, or is a sum or
a mean of them. So the loop may run over all places. The functions that made the places have to show
which mask they are of, and the source that the body leaves nothing else; a warning names the line.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from autopar.tracer.diagnose import is_outside
from autopar.tracer.emptiness import Around, assigned, method_of
from autopar.tracer.of_no_rows import kind_of
from autopar.tracer.sources import described, function_at, nodes_of

__all__ = ["HitLoops"]

_MOVING = frozenset(
    "permute transpose movedim moveaxis to long int float double bool contiguous clone detach "
    "view reshape".split()
)
_TURNED = tuple(getattr(torch.Tensor, name).__get__ for name in ("T", "mT"))
_ABOVE = frozenset("greater gt __gt__ ne not_equal __ne__".split())
_FLAT = frozenset("squeeze flatten view reshape ravel".split())
_SAME_PLACES = (*_FLAT, "tolist", "unbind", "nonzero", "where", "argwhere")
_WRITES = ("index_add_", "index_copy_", "index_put_", "scatter_add_")
_LEAVING = (ast.Return, ast.Break, ast.Raise, ast.Yield, ast.YieldFrom)


@dataclass(frozen=True, slots=True)
class _Made:
    """A tensor that says of each place of `mask` whether, or how often, it selects anything.

    `step` is "count", "any", or, of the places that select something, "column" (u, 1) or "places"
    (u,).
    """

    step: str
    mask: Tensor
    version: int


class HitLoops:
    """Knows masks, and the places where they select something. Tensors are kept, so that no other
    gets the identity of one.

    Args:
        lines: filled with the line of each loop that runs over all places.
    """

    def __init__(self, lines: dict[str, None]) -> None:
        self._lines = lines
        self._made: dict[int, tuple[Tensor, int, _Made]] = {}
        self._counts: dict[int, Tensor] = {}

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Remember what a function made of a mask."""
        name, given = getattr(func, "__name__", ""), args[0] if args else None
        if isinstance(result, tuple) and len(result) == 1 and name in ("where", "nonzero"):
            (result,) = result
            name = "where"
        if not isinstance(result, Tensor):
            return
        if name == "one_hot" or (
            (name in _MOVING or func in _TURNED) and id(given) in self._counts
        ):
            self._counts[id(result)] = result
        if isinstance(given, Tensor) and (made := self._next(name, args, kwargs, result)):
            self._made[id(result)] = result, result._version, made

    def all_places(self, func: Any, args: Any) -> Sequence[Any] | None:
        """What a loop over places of a mask gets instead of `func(*args)`: all of them."""
        if func is not torch.Tensor.unbind:  # that of `__iter__`, and of a fake tensor's `tolist`
            return None
        made = self._of(args[0])
        if made is None or made.step not in ("column", "places"):
            return None
        if made.mask._version != made.version:
            return None
        frame = _outside(sys._getframe(2))
        if frame is None or not _changes_picked_rows_only(frame, made.mask):
            return None
        self._lines[described(frame)] = None
        places = range(made.mask.shape[0])
        return [torch.tensor([i] if made.step == "column" else i) for i in places]

    def _of(self, value: Any) -> _Made | None:
        tensor, version, made = self._made.get(id(value), (None, 0, None))
        return made if tensor is not None and tensor._version == version else None

    def _next(self, name: str, args: Any, kwargs: Any, result: Tensor) -> _Made | None:
        """What a function makes of a mask, or of what was made of one."""
        given, made = args[0], self._of(args[0])
        if made is None:
            selects = given.dtype is torch.bool or id(given) in self._counts
            if name not in ("sum", "any") or not selects or result.dim() != 1:
                return None
            if not _all_but_first(given, args[1:], kwargs):
                return None
            return _Made("any" if name == "any" else "count", given, given._version)
        step = None
        if made.step == "count" and name in _ABOVE and args[1:] == (0,):
            step = "any"
        elif made.step in ("any", "count") and name in ("nonzero", "argwhere", "where"):
            step = "places" if name == "where" else "column"
        elif made.step == "column" and name in _FLAT and result.dim() == 1:
            step = "places"
        return None if step is None else _Made(step, made.mask, made.version)


def _all_but_first(mask: Tensor, args: Any, kwargs: Any) -> bool:
    """True if a reduction is over all dims of a mask but the first."""
    dims = kwargs.get("dim", args[0] if args else None)
    dims = (dims,) if isinstance(dims, int) else dims
    if not isinstance(dims, (tuple, list)) or mask.dim() < 2:
        return False
    return {dim % mask.dim() for dim in dims} == set(range(1, mask.dim()))


def _outside(frame: FrameType | None) -> FrameType | None:
    """The frame that loops, behind those of torch that pass on its question."""
    while frame is not None and not is_outside(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _changes_picked_rows_only(frame: FrameType, mask: Tensor) -> bool:
    """True if the loop that a frame is at does nothing in a pass whose rows are none."""
    loops = [
        node
        for node in nodes_of(frame.f_code.co_filename)
        if isinstance(node, ast.For) and _spans(node.iter, frame.f_lineno)
    ]
    function = function_at(frame)
    if len(loops) != 1 or function is None or loops[0].orelse:
        return False
    (loop,) = loops
    masks = {name for name, value in frame.f_locals.items() if value is mask}
    inner = [node for statement in loop.body for node in ast.walk(statement)]
    if any(isinstance(node, _LEAVING) for node in inner) or not _is_place(loop):
        return False
    if any(isinstance(n, ast.Name) and n.id in masks and not _is_read(n) for n in inner):
        return False
    picked = frozenset(_picked(loop, masks, mask.dtype is torch.bool))
    end = loop.end_lineno or loop.lineno
    around = _Pass(check=loop, end=end, function=function, none=[], asked=picked)
    return bool(picked) and all(map(around.leaves, inner))


def _spans(node: ast.expr, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _is_read(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Load)


def _is_place(loop: ast.For) -> bool:
    """True for `for i in places`, `in places.tolist()` and such; other calls may change them."""
    over = loop.iter
    if isinstance(over, ast.Subscript) and ast.unparse(over.slice) == "0":
        over = over.value  # the places that `where` returns in a tuple
    same = isinstance(over, ast.Call) and method_of(over) in _SAME_PLACES
    return isinstance(loop.target, ast.Name) and (same or isinstance(over, ast.Name))


def _picked(loop: ast.For, masks: set[str], is_bool: bool) -> Iterator[str]:
    """Names of what `mask[i]` picks: of its places, and of itself where it is of booleans."""
    places = {ast.unparse(loop.target)}
    of_place: set[str] = set()
    statements = [node for statement in loop.body for node in ast.walk(statement)]
    for target, value in (pair for s in statements for pair in assigned(s)):
        names = {n.id for n in ast.walk(value) if isinstance(n, ast.Name)}
        if not isinstance(target, ast.Name):
            continue
        if names - {"int"} and names - {"int"} <= places:
            places.add(target.id)
        elif _selects(value, masks, places, of_place):
            if _picks(value):
                yield target.id
            elif names <= masks | places | of_place | {"int", "torch"}:
                of_place.add(target.id)
                yield from [target.id] if is_bool else []


def _selects(value: ast.expr, masks: set[str], places: set[str], of_place: set[str]) -> bool:
    """True for an expression of `mask[i]`, alone or as what `where` and `nonzero` look at."""
    while isinstance(value, ast.Call):
        method = isinstance(value.func, ast.Attribute) and ast.unparse(value.func.value) != "torch"
        if method:
            assert isinstance(value.func, ast.Attribute)
            value = value.func.value
        elif len(value.args) == 1 and not value.keywords:
            value = value.args[0]
        else:
            return False
    if isinstance(value, ast.Subscript):
        names = {n.id for n in ast.walk(value.slice) if isinstance(n, ast.Name)} - {"int"}
        return ast.unparse(value.value) in masks and bool(names) and names <= places
    return isinstance(value, ast.Name) and value.id in of_place


def _picks(value: ast.expr) -> bool:
    calls = (n for n in ast.walk(value) if isinstance(n, ast.Call))
    return any(method_of(call) in ("where", "nonzero") for call in calls)


class _Pass(Around):
    """A pass of a loop: of names that were there before, it may change picked rows alone."""

    def leaves(self, statement: ast.AST) -> bool:
        """True for one that leaves all as it was, or adds 0, where no rows are picked."""
        if isinstance(statement, (ast.Delete, ast.Global, ast.Nonlocal, ast.NamedExpr)):
            return False
        if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
            name = statement.target
            if not (self._is_older(name) and self._is_read(name.id)):
                return True
        return super().leaves(statement)

    def _adds(self, value: ast.expr) -> bool:
        return kind_of(value, self._kinds) != "zero"

    def _sets(self, target: ast.expr, value: ast.expr) -> bool:
        if isinstance(target, ast.Subscript):
            return self._at_rows(target) or not self._is_older(target.value)
        if not isinstance(target, ast.Name):
            return False
        older = self._is_older(target) and self._is_read(target.id)
        return not older or self._is_written_to(target.id, value)

    def _is_written_to(self, name: str, value: ast.expr) -> bool:
        """True for `out.index_add(0, places, rows)`, of the name itself."""
        if not isinstance(value, ast.Call) or f"{method_of(value)}_" not in _WRITES:
            return False
        assert isinstance(value.func, ast.Attribute)
        return ast.unparse(value.func.value) == name and self._names_rows(value)

    def _calls(self, call: ast.Call) -> bool:
        """A call whose result no one takes is there for what it does."""
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        if owner is None:
            return ast.unparse(call.func) == "print"
        if method_of(call) in _WRITES and self._names_rows(call):
            return True
        return not self._is_older(owner)

    def _names_rows(self, call: ast.Call) -> bool:
        places = call.args[1:2] if method_of(call).startswith("index_add") else call.args
        return any(ast.unparse(place) in self.asked for place in places)
