"""Branches on whether a mask selects anything: a forward is traced as if it did.

    if mask.any():                    if rows.numel() == 0:
        loss = f(x[mask], y[mask])        continue

The program for some selected rows also serves for none, if for none it computes what the other side
of the branch does: nothing, or a zero. The source has to show that. What the taken side computes of
the rows is looked at no further than names and functions show, so a warning names the line. But it
may not count (`terms += 1`), collect (`losses.append(...)`), add what is not 0 of no rows
(`x[mask].mean().exp()`) or replace a value that is read later.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from autopar.tracer.of_no_rows import Kind, kind_of, named_kinds

__all__ = ["Around", "assigned", "may_leave", "method_of", "some_are_picked"]

_SOME = (ast.Gt, ast.GtE, ast.NotEq)
_NONE = (ast.Eq, ast.Lt, ast.LtE)
_LEAVING = (ast.Return, ast.Break, ast.Continue, ast.Raise)
_ROWS_INTO = (
    *("index_add", "index_copy", "index_put", "masked_scatter", "masked_fill", "scatter_add"),
    *("add", "sub"),
)
_COLLECTING = ("append", "extend", "insert", "add", "update", "setdefault")
_ZEROS = ("zeros", "zeros_like", "new_zeros")


def some_are_picked(
    check: ast.If, leaf: ast.expr, wanted: bool, function: ast.AST | None
) -> bool | None:
    """The truth of a part of a test where rows are picked; None if the test is of another kind, or
    the side for no rows does something.

    Args:
        check: the statement.
        leaf: what it asks.
        wanted: the truth of `leaf` that leads into the body.
        function: that which it is in.
    """
    truth = _means_some(leaf)
    if truth is None or function is None:
        return None
    some, none = (check.body, check.orelse) if truth is wanted else (check.orelse, check.body)
    if may_leave(some):
        return None  # the other side is all that follows
    mask = _asked_of_values(leaf)
    if mask is not None and mask not in set(_picking(some)):
        return None
    end = check.end_lineno or check.lineno
    if any(isinstance(statement, ast.Continue) for statement in none):
        some, end = _rest_of_loop(check, function)
    around = Around(
        check=check, end=end, function=function, none=none, asked=_asked_names(leaf, function)
    )
    if not all(around.leaves(inner) for statement in some for inner in ast.walk(statement)):
        return None
    return truth if all(map(_does_nothing, none)) else None


def _means_some(leaf: ast.expr) -> bool | None:
    """The truth of an expression where a number of rows is not 0."""
    if isinstance(leaf, ast.Call):
        return True if method_of(leaf) == "any" and not leaf.args else None
    if not isinstance(leaf, ast.Compare) or len(leaf.ops) != 1:
        return None
    (op,), (bound,) = leaf.ops, leaf.comparators
    least = 1 if isinstance(op, (ast.GtE, ast.Lt)) else 0
    if not isinstance(bound, ast.Constant) or bound.value != least or not _counts(leaf.left):
        return None
    if isinstance(op, _SOME):
        return True
    return False if isinstance(op, _NONE) else None


def _counts(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        named = isinstance(value.func, ast.Name) and value.func.id == "len"
        return named or method_of(value) in ("size", "numel", "sum")
    shape = value.value if isinstance(value, ast.Subscript) else None
    return isinstance(shape, ast.Attribute) and shape.attr == "shape"


def may_leave(body: list[ast.stmt]) -> bool:
    """True if some statements may end the function, or a pass of a loop, that they are in."""
    return any(isinstance(n, _LEAVING) for statement in body for n in ast.walk(statement))


def method_of(call: ast.Call) -> str:
    """The name of the method that is called; of a function of a module, its name too."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _asked_of_values(leaf: ast.expr) -> str | None:
    """The mask of `mask.any()` and `mask.sum() > 0`, as it is written."""
    call = leaf.left if isinstance(leaf, ast.Compare) else leaf
    if isinstance(call, ast.Call) and method_of(call) in ("any", "sum"):
        assert isinstance(call.func, ast.Attribute)
        return ast.unparse(call.func.value)
    return None


def _picking(body: list[ast.stmt]) -> Iterator[str]:
    """What stands in brackets somewhere in some statements."""
    for node in (inner for statement in body for inner in ast.walk(statement)):
        if isinstance(node, ast.Subscript):
            places = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            yield from map(ast.unparse, places)


def _does_nothing(statement: ast.stmt) -> bool:
    """True for one that goes on, or that sets a zero."""
    if isinstance(statement, (ast.Assign, ast.AnnAssign)):
        return statement.value is not None and _is_zero(statement.value)
    return isinstance(statement, (ast.Pass, ast.Continue))


def _is_zero(value: ast.expr) -> bool:
    if isinstance(value, ast.Constant):
        return value.value == 0 and value.value is not False
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult):
        return _is_zero(value.left) or _is_zero(value.right)
    if not isinstance(value, ast.Call):
        return False
    name = method_of(value)
    if name in _ZEROS:
        return True
    if name == "tensor":
        return bool(value.args) and _is_zero(value.args[0])
    inner = value.func.value if isinstance(value.func, ast.Attribute) else None
    return name in ("to", "float", "sum", "type_as") and inner is not None and _is_zero(inner)


# --- what the side for some rows does to names of the function ------------------------------------
@dataclass(frozen=True)
class Around:
    """A branch, the function that it is in, and what its test asks of."""

    check: ast.If | ast.For
    end: int
    function: ast.AST
    none: list[ast.stmt]
    asked: frozenset[str]

    def leaves(self, statement: ast.AST) -> bool:
        """True for one that leaves all as it was, or adds 0, where no rows are picked."""
        if isinstance(statement, ast.AugAssign):
            plain = isinstance(statement.op, (ast.Add, ast.Sub))
            if isinstance(statement.target, ast.Subscript):
                return self._at_rows(statement.target)
            return plain and not self._adds(statement.value)
        if isinstance(statement, (ast.Assign, ast.AnnAssign)):
            return all(self._sets(target, value) for target, value in assigned(statement))
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            return self._calls(statement.value)
        return True

    @cached_property
    def _kinds(self) -> dict[str, Kind]:
        """Of names in the function, where no rows are picked."""
        inner = [s for s in ast.walk(self.function) if isinstance(s, (ast.Assign, ast.AnnAssign))]
        before = sorted((s for s in inner if s.lineno <= self.end), key=lambda s: s.lineno)
        return named_kinds(pair for statement in before for pair in assigned(statement))

    def _adds(self, value: ast.expr) -> bool:
        """True for what is not 0 of no rows."""
        return _has_number(value) or any(
            kind_of(term, self._kinds) == "number" for term in _terms(value)
        )

    def _at_rows(self, target: ast.Subscript) -> bool:
        places = target.slice.elts if isinstance(target.slice, ast.Tuple) else [target.slice]
        return any(ast.unparse(place) in self.asked for place in places)

    def _sets(self, target: ast.expr, value: ast.expr) -> bool:
        if isinstance(target, ast.Subscript):
            return self._at_rows(target) or not self._is_older(target.value)
        if not isinstance(target, ast.Name):
            return True
        if self._is_set_otherwise(target.id):
            return not self._adds(value)
        if not self._is_older(target) or not self._is_read(target.id):
            return True
        return not self._adds(value) and (
            self._was_zero(target.id)
            or any(isinstance(t, ast.Name) and t.id == target.id for t in _terms(value))
            or target.id in _owners_of_rows(value)
        )

    def _calls(self, call: ast.Call) -> bool:
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        collects = method_of(call) in _COLLECTING
        changes = method_of(call).endswith("_") and method_of(call)[:-1] not in _ROWS_INTO
        return owner is None or not (collects or changes) or not self._is_older(owner)

    def _is_set_otherwise(self, name: str) -> bool:
        return any(_id(t) == name for statement in self.none for t, _ in assigned(statement))

    def _was_zero(self, name: str) -> bool:
        """True if a name was last set to a zero or None."""
        inner = [s for s in ast.walk(self.function) if isinstance(s, ast.stmt)]
        before = [s for s in inner if s.lineno < self.check.lineno]
        sets = [(s.lineno, v) for s in before for t, v in assigned(s) if _id(t) == name]
        last = max(sets, key=lambda one: one[0], default=(0, None))[1]
        if last is None:
            return False
        nothing = isinstance(last, ast.Constant) and last.value is None
        return nothing or _is_zero(last)

    def _is_older(self, owner: ast.expr) -> bool:
        """True if a name, or the one that an expression begins with, was there before."""
        while isinstance(owner, (ast.Attribute, ast.Subscript)):
            owner = owner.value
        if not isinstance(owner, ast.Name):
            return False
        arguments = [n.arg for n in ast.walk(self.function) if isinstance(n, ast.arg)]
        stores = [n for n in self._names(owner.id) if not isinstance(n.ctx, ast.Load)]
        return owner.id in arguments or any(n.lineno < self.check.lineno for n in stores)

    def _is_read(self, name: str) -> bool:
        """True if what is next done with a name, behind the branch, is to read it."""
        around = (n for n in ast.walk(self.function) if isinstance(n, (ast.For, ast.While)))
        starts = [s.lineno for s in around if s.lineno < self.check.lineno <= (s.end_lineno or 0)]
        return any(self._is_read_next(name, start) for start in (self.end, *starts))

    def _is_read_next(self, name: str, line: int) -> bool:
        behind = [n.lineno for n in self._names(name) if n.lineno > line]
        if line == self.end:
            behind = [n for n in behind if not self._is_beside(n)]
        plain = (s for s in ast.walk(self.function) if isinstance(s, ast.stmt))
        for s in (s for s in plain if behind and not hasattr(s, "body")):
            if s.lineno <= min(behind) <= (s.end_lineno or s.lineno):
                here = [n for n in ast.walk(s) if isinstance(n, ast.Name) and n.id == name]
                return isinstance(s, ast.AugAssign) or any(
                    isinstance(n.ctx, ast.Load) for n in here
                )
        return bool(behind)  # in the head of a statement

    def _is_beside(self, line: int) -> bool:
        """True for a line of an `else` whose `if` the branch is in."""
        others = (n for n in ast.walk(self.function) if isinstance(n, ast.If) and n.orelse)
        return any(
            n.lineno < self.check.lineno <= (n.body[-1].end_lineno or 0)
            and n.orelse[0].lineno <= line <= (n.orelse[-1].end_lineno or 0)
            for n in others
        )

    def _names(self, name: str) -> list[ast.Name]:
        walked = ast.walk(self.function)
        return [n for n in walked if isinstance(n, ast.Name) and n.id == name]


def _rest_of_loop(check: ast.If, function: ast.AST) -> tuple[list[ast.stmt], int]:
    """What a loop does behind a `continue`, and its last line."""
    end = check.end_lineno or check.lineno
    loops = [n for n in ast.walk(function) if isinstance(n, (ast.For, ast.While))]
    around = [n for n in loops if n.lineno <= check.lineno <= (n.end_lineno or 0)]
    loop = max(around, key=lambda n: n.lineno)
    rest = [n for n in ast.walk(loop) if isinstance(n, ast.stmt) and n.lineno > end]
    return rest, loop.end_lineno or end


def _asked_names(leaf: ast.expr, function: ast.AST) -> frozenset[str]:
    """Masks and places that a test asks about, as they are written, with those of the same call:
    `places.numel()` of `places, nth = torch.where(mask)` is about both.
    """
    asked = {ast.unparse(n) for n in ast.walk(leaf) if isinstance(n, ast.expr)}
    for targets in (n.targets for n in ast.walk(function) if isinstance(n, ast.Assign)):
        for target in (t for t in targets if isinstance(t, ast.Tuple)):
            names = set(map(ast.unparse, target.elts))
            asked |= names if names & asked else set()
    return frozenset(asked)


def assigned(statement: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Targets with what they are set to; of a tuple that is not written out, the whole."""
    if isinstance(statement, ast.AnnAssign) and statement.value is not None:
        yield statement.target, statement.value
    if not isinstance(statement, ast.Assign):
        return
    value = statement.value
    for target in statement.targets:
        if isinstance(target, (ast.Tuple, ast.List)):
            values = [value] * len(target.elts)
            if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts):
                values = value.elts
            yield from zip(target.elts, values, strict=True)
        else:
            yield target, value


def _id(target: ast.expr) -> str:
    return target.id if isinstance(target, ast.Name) else ""


def _terms(value: ast.expr) -> Iterator[ast.expr]:
    """What an expression adds up."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, (ast.Add, ast.Sub)):
        yield from _terms(value.left)
        yield from _terms(value.right)
    elif isinstance(value, ast.UnaryOp):
        yield from _terms(value.operand)
    elif isinstance(value, ast.IfExp):
        yield from _terms(value.body)
        yield from _terms(value.orelse)
    else:
        yield value


def _owners_of_rows(value: ast.expr) -> Iterator[str]:
    """`out` of `out.view(-1).index_add(0, places, rows).view_as(x)`."""
    into = False
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        into = into or value.func.attr in _ROWS_INTO
        value = value.func.value
    if into:
        yield _id(value)


def _has_number(value: ast.expr) -> bool:
    """True for what is not 0 of no rows, as it adds a number."""
    return any(isinstance(term, ast.Constant) and term.value != 0 for term in _terms(value))
