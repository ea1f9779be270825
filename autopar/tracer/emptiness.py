"""Branches on whether a mask picks anything: a forward is traced as where it does.

    if mask.any():                    if rows.numel() == 0:
        loss = f(x[mask], y[mask])        continue

A program for any number of picked rows is one for none, too, if what it makes of none is what the
other side does: nothing, or a zero. The source has to show that; what the side for some rows does
beside picking is not looked at, so a warning names the line.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

__all__ = ["some_are_picked"]

_SOME = (ast.Gt, ast.GtE, ast.NotEq)
_NONE = (ast.Eq, ast.Lt, ast.LtE)
_LEAVING = (ast.Return, ast.Break, ast.Continue, ast.Raise)
_ZEROS = ("zeros", "zeros_like", "new_zeros")


def some_are_picked(check: ast.If, leaf: ast.expr, wanted: bool) -> bool | None:
    """The truth of a part of a test where rows are picked; None if the test is of another kind, or
    the side for no rows does something.

    Args:
        check: the statement.
        leaf: what it asks.
        wanted: the truth of `leaf` that leads into the body.
    """
    truth = _means_some(leaf)
    if truth is None:
        return None
    some, none = (check.body, check.orelse) if truth is wanted else (check.orelse, check.body)
    if any(isinstance(n, _LEAVING) for statement in some for n in ast.walk(statement)):
        return None  # the other side is all that follows
    mask = _asked_of_values(leaf)
    if mask is not None and mask not in set(_picking(some)):
        return None
    return truth if all(map(_does_nothing, none)) else None


def _means_some(leaf: ast.expr) -> bool | None:
    """The truth of an expression where a number of rows is not 0."""
    if isinstance(leaf, ast.Call):
        return True if _method(leaf) == "any" and not leaf.args else None
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
        return named or _method(value) in ("size", "numel", "sum")
    shape = value.value if isinstance(value, ast.Subscript) else None
    return isinstance(shape, ast.Attribute) and shape.attr == "shape"


def _method(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _asked_of_values(leaf: ast.expr) -> str | None:
    """The mask of `mask.any()` and `mask.sum() > 0`, as it is written."""
    call = leaf.left if isinstance(leaf, ast.Compare) else leaf
    if isinstance(call, ast.Call) and _method(call) in ("any", "sum"):
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
    name = _method(value)
    if name in _ZEROS:
        return True
    if name == "tensor":
        return bool(value.args) and _is_zero(value.args[0])
    inner = value.func.value if isinstance(value.func, ast.Attribute) else None
    return name in ("to", "float", "sum", "type_as") and inner is not None and _is_zero(inner)
