"""Sizes and times as people read them."""

from __future__ import annotations

__all__ = ["format_bytes", "format_seconds"]


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


def format_seconds(seconds: float) -> str:
    """`1.25 ms`: the unit that leaves one to three digits before the point."""
    if seconds >= 1 or seconds == 0:
        return f"{seconds:.4g} s"
    return f"{seconds * 1e3:.4g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.4g} us"
