"""Sizes and times as people read them."""

from __future__ import annotations

import math
import re
from numbers import Integral, Real

from autopar.errors import AutoparError

__all__ = ["format_bytes", "format_seconds", "parse_bytes", "parse_seconds", "without_residue"]

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}

_AGES_S = 1e12  # no search takes so long
_ROUNDING_S = 1e-12  # less than any clock tells: what sums of seconds are off by
_ROUNDING = 1e-8  # relative: stored seconds have nine digits


def parse_bytes(size: object) -> int:
    """Bytes of `"16GiB"` (2^30 each), `"16GB"` (10^9 each), or a number.

    Raises:
        AutoparError: it is none of these, or negative.
    """
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
        if match is not None and match[2].upper() in _UNITS:
            return int(float(match[1]) * _UNITS[match[2].upper()])
    elif isinstance(size, Real) and not isinstance(size, bool) and 0 <= float(size) < math.inf:
        return int(size) if isinstance(size, Integral) else int(float(size))
    raise AutoparError(
        f"{size!r} is not a size: write bytes, or 16GiB (2^30 bytes each), or 16GB (10^9)"
    )


def format_bytes(num_bytes: float) -> str:
    """`1.50 GiB`: binary units."""
    if abs(num_bytes) < 1024:
        return f"{num_bytes:.0f} B"
    value = float(num_bytes)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if abs(value) < 1024:
            return f"{value:.2f} {unit}"
    return f"{value / 1024:.2f} PiB"


def without_residue(part: float, whole: float) -> float:
    """`part`, and 0 where it is only what rounding left of a difference of `whole`."""
    return 0.0 if abs(part) <= _ROUNDING * abs(whole) else part


def format_seconds(seconds: float) -> str:
    """`1.25 ms`: the unit that leaves one to three digits before the point, from ns to s."""
    if abs(seconds) < _ROUNDING_S:
        return "0 s"
    for least, factor, unit in ((1, 1, "s"), (1e-3, 1e3, "ms"), (1e-6, 1e6, "µs")):
        if abs(seconds) >= least:
            return f"{seconds * factor:.4g} {unit}"
    return f"{seconds * 1e9:.4g} ns"


def parse_seconds(given: object) -> float | None:
    """A user's time limit; None for none.

    Raises:
        AutoparError: not a number above 0.
    """
    if given is None:
        return None
    if isinstance(given, (int, float)) and not isinstance(given, bool) and 0 < given < _AGES_S:
        return float(given)
    raise AutoparError(f"time_limit={given!r} must be a number of seconds above 0, or None")
