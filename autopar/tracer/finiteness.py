"""Branches that clamp values which are not finite: a forward is traced as if all were.

    if not torch.isfinite(x).all():
        x = torch.clamp(x, min=-largest, max=largest)

Where all values are finite, the graph is exact. Where one is not, it goes on unclamped, mostly as
far as the loss. The source has to show that the other side of the branch does no more than to clamp
what the test asks about.
"""

from __future__ import annotations

import ast

from autopar.tracer.emptiness import may_leave, method_of

__all__ = ["all_are_finite"]

_ALL_FINITE = {("isfinite", "all"): True, ("isinf", "any"): False, ("isnan", "any"): False}
_CLAMPS = ("clamp", "clip", "nan_to_num", "clamp_", "clip_", "nan_to_num_")


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
    if may_leave(finite):
        return None  # the other side is all that follows
    clamps = [statement for statement in other if _clamps(statement, asked)]
    read = {n.id for s in clamps for n in ast.walk(s) if isinstance(n, ast.Name)} - {asked}
    only = all(s in clamps or _is_bound(s, read) for s in other)
    return truth if clamps and only else None


def _of_finite(leaf: ast.expr) -> tuple[bool | None, str]:
    """The truth of `torch.isfinite(x).all()` and its like where x is finite; and x, as written."""
    if not isinstance(leaf, ast.Call) or leaf.args or not isinstance(leaf.func, ast.Attribute):
        return None, ""
    each = leaf.func.value
    if not isinstance(each, ast.Call):
        return None, ""
    return _ALL_FINITE.get((method_of(each), method_of(leaf))), _of_what(each)


def _clamps(statement: ast.stmt, asked: str) -> bool:
    """True for one that replaces what is asked about by itself, clamped."""
    if not isinstance(statement, (ast.Assign, ast.Expr)):
        return False
    call = statement.value
    if not isinstance(call, ast.Call) or method_of(call) not in _CLAMPS:
        return False
    if isinstance(statement, ast.Expr):
        same = method_of(call).endswith("_")
    else:
        same = [ast.unparse(target) for target in statement.targets] == [asked]
    return same and _of_what(call) == asked


def _is_bound(statement: ast.stmt, read: set[str]) -> bool:
    """True for one that names the largest number of a dtype, as something that a clamp reads."""
    if not isinstance(statement, ast.Assign):
        return False
    named = {ast.unparse(target) for target in statement.targets}
    numbers = (n.attr for n in ast.walk(statement.value) if isinstance(n, ast.Attribute))
    return named <= read and "finfo" in numbers


def _of_what(call: ast.Call) -> str:
    """`x` of `torch.clamp(x, …)` and of `x.clamp(…)`, as it is written."""
    owner = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    return ast.unparse(call.args[0]) if owner == "torch" and call.args else owner
