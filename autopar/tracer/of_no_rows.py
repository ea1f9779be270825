"""What an expression of picked rows is where there are none, as far as its source shows.

Sums, means and losses of no rows are 0 in a traced program, and functions of rows are of none. So
`x[m].exp().mean()` is 0 there, `x[m].mean().exp()` is 1.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from typing import Literal

__all__ = ["Kind", "kind_of", "named_kinds"]

Kind = Literal["zero", "number", "other"]
"""0 where no rows are picked; a number there that is not 0; or rows, and what is not known."""

_REDUCING = frozenset(
    ("sum", "mean", "norm", "amax", "amin", "max", "min", "logsumexp", "var", "std", "nanmean")
)
_NOT_ZERO_OF_ZERO = frozenset(
    (
        *("exp", "exp2", "cos", "cosh", "acos", "arccos", "sigmoid", "logsigmoid", "softplus"),
        *("log", "log2", "log10", "logit", "reciprocal", "rsqrt", "sinc", "erfc", "softmax"),
        *("logical_not", "rsub"),
    )
)
_MODULES = ("torch", "F", "nn", "functional", "math", "special")


def named_kinds(assigned: Iterable[tuple[ast.expr, ast.expr]]) -> dict[str, Kind]:
    """Kinds of names, of what they are set to in order."""
    found: dict[str, Kind] = {}
    for target, value in assigned:
        if isinstance(target, ast.Name):
            found[target.id] = kind_of(value, found)
    return found


def kind_of(value: ast.expr, names: Mapping[str, Kind]) -> Kind:
    """What an expression is where no rows are picked.

    Args:
        value: the expression.
        names: kinds of the names in it.
    """
    if isinstance(value, ast.Name):
        return names.get(value.id, "other")
    if isinstance(value, ast.UnaryOp):
        return kind_of(value.operand, names)
    if isinstance(value, ast.BinOp):
        return _of_two(value, kind_of(value.left, names), kind_of(value.right, names))
    if isinstance(value, ast.Call):
        return _of_call(value, names)
    return "other"


def _of_two(value: ast.BinOp, left: Kind, right: Kind) -> Kind:
    kinds = {left, right}
    if isinstance(value.op, ast.Mult):
        return "zero" if "zero" in kinds else "number" if "number" in kinds else "other"
    if isinstance(value.op, (ast.Add, ast.Sub)):
        constants = [x for x in (value.left, value.right) if isinstance(x, ast.Constant)]
        if constants:
            added = any(constant.value != 0 for constant in constants)
            return "number" if added and "zero" in kinds else (kinds - {"other"} or {"other"}).pop()
        return "number" if "number" in kinds else "zero" if kinds == {"zero"} else "other"
    if isinstance(value.op, ast.Pow) and isinstance(value.left, ast.Constant):
        return "number" if right == "zero" else right
    return left


def _of_call(call: ast.Call, names: Mapping[str, Kind]) -> Kind:
    name, operands = _name(call), _operands(call)
    kinds = [kind_of(operand, names) for operand in operands]
    first = kinds[0] if kinds else "other"
    if name in _NOT_ZERO_OF_ZERO:
        return "number" if first == "zero" else first
    if first != "other":
        return first
    if name in _REDUCING and _leaves_no_rows(call, operands):
        return "zero"
    return "zero" if name.endswith("_loss") or name == "cross_entropy" else "other"


def _leaves_no_rows(call: ast.Call, operands: list[ast.expr]) -> bool:
    """True for a reduction of all, or of the rows: other dims leave a value for each row."""
    rest = call.args if operands and operands[0] not in call.args else call.args[1:]
    dims = [*rest, *(k.value for k in call.keywords if k.arg in ("dim", "axis"))]
    return all(isinstance(dim, ast.Constant) and dim.value in (0, None) for dim in dims)


def _name(call: ast.Call) -> str:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _operands(call: ast.Call) -> list[ast.expr]:
    """What is computed with: the owner of a method, or the arguments of a function."""
    if not isinstance(call.func, ast.Attribute):
        return call.args
    root = call.func.value
    while isinstance(root, ast.Attribute):
        root = root.value
    outside = isinstance(root, ast.Name) and root.id in (*_MODULES, "self")
    return call.args if outside else [call.func.value, *call.args]
