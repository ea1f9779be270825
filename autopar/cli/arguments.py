"""What the command line takes: values of its options."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopar.core.placement import parse_placement
from autopar.core.units import parse_bytes
from autopar.errors import AutoparError, ConstraintError, ShardingError

__all__ = ["constraints", "json_value", "mesh", "pin", "positive", "size", "whole"]


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
    try:
        return parse_bytes(text)
    except AutoparError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


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
