"""What the source of a running frame shows."""

from __future__ import annotations

import ast
import linecache
from functools import cache
from types import FrameType

from autopar.tracer.diagnose import is_outside

__all__ = ["described", "function_at", "nodes_of"]


def described(frame: FrameType | None) -> str:
    """File, line and source of a check; where torch makes it, of the user's call."""
    inner = frame
    while frame is not None and not is_outside(frame.f_code.co_filename):
        frame = frame.f_back
    frame = frame or inner
    assert frame is not None
    name = frame.f_code.co_filename
    line = linecache.getline(name, frame.f_lineno).strip()
    return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}: {line}"


def function_at(frame: FrameType) -> ast.AST | None:
    """The innermost function around the line that a frame is at."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (n for n in nodes_of(frame.f_code.co_filename) if isinstance(n, kinds))
    around = [n for n in nodes if n.lineno <= frame.f_lineno <= (n.end_lineno or 0)]
    return max(around, key=lambda n: n.lineno, default=None)


@cache
def nodes_of(filename: str) -> tuple[ast.AST, ...]:
    """Functions of a file, and statements that check, catch or loop; none without its source."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return ()
    checks = (ast.If, ast.Assert, ast.Try, ast.TryStar, ast.With, ast.AsyncWith)
    kinds = (*checks, ast.For, ast.FunctionDef, ast.AsyncFunctionDef)
    return tuple(node for node in ast.walk(tree) if isinstance(node, kinds))
