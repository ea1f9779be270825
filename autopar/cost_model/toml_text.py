"""Writes nested tables as TOML text (the standard library only reads it)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["to_toml"]


def to_toml(table: Mapping[str, Any], comment: str = "") -> str:
    """TOML text of a table of numbers, strings, lists, tables and lists of tables.

    Args:
        table: keys are written in their order, plain values before tables; None is left out.
        comment: stands on top; one line each with a "#".
    """
    lines = [f"# {line}" for line in comment.splitlines()]
    _write(lines, table, ())
    return "\n".join(lines) + "\n"


def _write(lines: list[str], table: Mapping[str, Any], path: tuple[str, ...]) -> None:
    inner = {k: v for k, v in table.items() if _is_table(v) or _is_tables(v)}
    for key, value in table.items():
        if key not in inner and value is not None:
            lines.append(f"{_key(key)} = {_value(value)}")
    for key, value in inner.items():
        name = ".".join(_key(k) for k in (*path, key))
        for row in [value] if _is_table(value) else value:
            lines += ["", f"[{name}]" if _is_table(value) else f"[[{name}]]"]
            _write(lines, row, (*path, key))


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_tables(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(map(_is_table, value))


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value)  # TOML's basic strings have JSON's escapes
    if isinstance(value, Sequence):
        return f"[{', '.join(_value(v) for v in value)}]"
    return repr(value)
