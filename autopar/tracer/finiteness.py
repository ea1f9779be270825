"""Branches that clamp values which are not finite: a forward is traced as if all were.

    if not torch.isfinite(x).all():
        x = torch.clamp(x, min=-largest, max=largest)

Where all values are finite, as in any step that is of use, the graph is exact. Where one is not, it
goes on to the loss instead. The source has to show that the other side of the branch does no more
than to clamp what the test asks about.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

__all__ = ["all_are_finite"]

_ALL_FINITE = {("isfinite", "all"): True, ("isinf", "any"): False, ("isnan", "any"): False}
_CLAMPS = ("clamp", "clip", "nan_to_num", "clamp_", "clip_", "nan_to_num_")
_LEAVING = (ast.Return, ast.Break, ast.Continue, ast.Raise)


def all_are_finite(check: ast.If, leaf: ast.expr, wanted: bool) -> bool | None:
    """The truth of a part of a test where all values are finite; None if the test is of another
    kind, or the side for others does more than to clamp them.

    Args:
        check: the statement.
        leaf: what it asks.
        wanted: the truth of `leaf` that leads into the body.
    """
    truth, asked = _of_finite(leaf)
    if truth is None:
        return None
    finite, other = (check.body, check.orelse) if truth is wanted else (check.orelse, check.body)
    if any(isinstance(n, _LEAVING) for statement in finite for n in ast.walk(statement)):
        return None  # the other side is all that follows
    clamps = [_clamps(statement, asked) for statement in other]
    only = all(is_one or _is_bound(s) for is_one, s in zip(clamps, other, strict=True))
    return truth if any(clamps) and only else None


def _of_finite(leaf: ast.expr) -> tuple[bool | None, str]:
    """The truth of `torch.isfinite(x).all()` and its like where x is finite; and x, as written."""
    of_all = _call(leaf)
    each = None if of_all is None or of_all.args else _call(_owner(of_all))
    if of_all is None or each is None:
        return None, ""
    truth = _ALL_FINITE.get((_name(each), _name(of_all)))
    values = each.args[0] if each.args else _owner(each)
    return truth, "" if values is None else ast.unparse(values)


def _clamps(statement: ast.stmt, asked: str) -> bool:
    """True for one that replaces what is asked about by itself, clamped."""
    if isinstance(statement, ast.Assign):
        same = [ast.unparse(target) for target in statement.targets] == [asked]
    else:
        same = isinstance(statement, ast.Expr)
    call = _call(statement.value) if isinstance(statement, (ast.Assign, ast.Expr)) else None
    if call is None or not same or _name(call) not in _CLAMPS:
        return False
    in_place = _name(call).endswith("_")
    values = {ast.unparse(value) for value in _given(call)}
    return asked in values and (in_place or isinstance(statement, ast.Assign))


def _is_bound(statement: ast.stmt) -> bool:
    """True for one that names the largest number of a dtype."""
    return isinstance(statement, ast.Assign) and any(
        isinstance(n, ast.Attribute) and n.attr == "finfo" for n in ast.walk(statement.value)
    )


def _given(call: ast.Call) -> Iterator[ast.expr]:
    """The owner of a method or the first argument of a function."""
    yield from call.args[:1]
    owner = _owner(call)
    if owner is not None:
        yield owner


def _call(value: ast.expr | None) -> ast.Call | None:
    return value if isinstance(value, ast.Call) else None


def _owner(call: ast.Call) -> ast.expr | None:
    return call.func.value if isinstance(call.func, ast.Attribute) else None


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""
