"""Rich tables as text."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

__all__ = ["bar", "plain_table", "render"]

_BAR = 24


def render(parts: Iterable[RenderableType], width: int | None = None) -> str:
    """Rich renderables as plain text, one below the other."""
    columns = width or shutil.get_terminal_size(fallback=(120, 24)).columns
    console = Console(
        file=io.StringIO(),
        width=columns,
        color_system=None,
        force_terminal=False,
        markup=False,
        emoji=False,
        highlight=False,
    )
    with console.capture() as captured:
        for part in parts:
            console.print(part)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    return "\n".join(lines).rstrip("\n") + "\n"


def plain_table(columns: Sequence[tuple[str, bool]]) -> Table:
    """An empty table; columns are `(header, right-aligned number)`."""
    table = Table(box=box.SIMPLE_HEAD, header_style="", pad_edge=False, collapse_padding=True)
    for header, number in columns:
        if number:
            table.add_column(header, justify="right", no_wrap=True)
        else:
            table.add_column(header, overflow="fold")
    return table


def bar(share: float, width: int = _BAR) -> str:
    """A bar of `share` (0 to 1) of `width` columns, to an eighth of a column."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    whole, rest = divmod(eighths, 8)
    return "█" * whole + (" ▏▎▍▌▋▊▉"[rest] if rest else "")
