"""What the command line takes: values of its options."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autopar.core.placement import parse_placement
from autopar.core.units import parse_bytes
from autopar.errors import AutoparError, ConstraintError, ShardingError

__all__ = [
    "chosen_fusion",
    "constraints",
    "fusion",
    "json_value",
    "mesh",
    "pin",
    "positive",
    "size",
    "whole",
]


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


def fusion(text: str) -> tuple[str, tuple[str, ...] | None]:
    """`on`, `off`, or a key of `fusion=` with names: `off=rotary,generated`."""
    key, equals, names = text.partition("=")
    given = tuple(name.strip() for name in names.split(",") if name.strip())
    if key not in ("on", "off", "only") or bool(equals) != bool(given) or text == "only":
        raise argparse.ArgumentTypeError(
            f"{text!r} is none of: on, off, off=NAMES, on=NAMES, only=NAMES (names of kernels, "
            "with commas between them)"
        )
    return key, given or None


def chosen_fusion(given: Sequence[tuple[str, tuple[str, ...] | None]] | None) -> Any:
    """What all `--fusion` together mean, as `autopar.plan` takes it.

    Raises:
        AutoparError: they contradict each other, or a name is unknown.
    """
    if not given:
        return None
    whole = {key for key, names in given if names is None}
    listed: dict[str, list[str]] = {}
    for key, names in given:
        listed.setdefault(key, []).extend(names or ())
    lists = {key: names for key, names in listed.items() if names}
    if whole == {"on", "off"} or (whole == {"off"} and lists):
        raise AutoparError("--fusion off leaves no kernel: give it alone, or name what is off")
    chosen = lists or (whole == {"on"})
    import torch

    from autopar.codegen.fusion import Fusion

    Fusion.parse(chosen, torch.device("cpu"))
    return chosen


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
