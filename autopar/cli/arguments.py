"""What the command line takes: values of its options."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopar.core.placement import parse_placement
from autopar.errors import ConstraintError, ShardingError

__all__ = ["constraints", "json_value", "mesh", "pin", "positive", "size", "whole"]

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def whole(text: str) -> int:
    """A whole number of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def mesh(text: str) -> tuple[int, ...]:
    """Sizes of mesh axes: `4x8`."""
    return tuple(positive(size) for size in re.split("[x×,]", text))


def size(text: str) -> int:
    """Bytes: `16GiB`, `16GB`, or a number."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size: write bytes, or 16GiB (2^30 bytes each), or 16GB (10^9)"
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])


def json_value(text: str) -> Any:
    """Any JSON."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON ({error})") from None


def pin(text: str) -> tuple[str, tuple[str, ...]]:
    """`GLOB=Shard(0),Replicate()`: parameters, and a placement for each mesh axis."""
    glob, equals, layout = text.partition("=")
    placements = tuple(p.strip() for p in re.findall(r"[^,()]+(?:\([^)]*\))?", layout))
    if not glob or not equals or not placements:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a pin: write GLOB=Shard(0),Replicate(), one placement per mesh axis"
        )
    try:
        parsed = tuple(parse_placement(p).short for p in placements)
    except ShardingError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    return glob, parsed


def constraints(text: str | None) -> Mapping[str, Any] | None:
    """The dict form of constraints, given as JSON or as a file of it."""
    if text is None:
        return None
    source = text
    if not text.lstrip().startswith("{"):
        try:
            source = Path(text).read_text()
        except OSError as error:
            raise ConstraintError(
                f"--constraints {text!r} is neither a JSON object nor a readable file ({error})"
            ) from error
    try:
        value = json.loads(source)
    except json.JSONDecodeError as error:
        raise ConstraintError(f"--constraints {text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConstraintError(f"--constraints must be a JSON object, not {type(value).__name__}")
    return value
