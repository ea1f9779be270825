"""Rich tables as text, in any width: labels stay, and what is told twice goes first."""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Collection, Iterable, Sequence
from copy import copy
from dataclasses import replace

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table

__all__ = ["bar", "plain_table", "render", "shown"]

_BAR = 24
_LABEL = 26  # columns that labels get rather than the columns that can be left out
_FOLDED = 16  # columns to which other cells are folded before labels are
_READABLE = 12  # columns that labels keep as long as may be
_SHORT = 5  # columns of a number's digits
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class _PlainTable(Table):
    """A table that leaves out columns, then folds the widest, until it fits.

    Args:
        spare: columns that may be left out, the first first.
    """

    def __init__(self, spare: Collection[int]) -> None:
        super().__init__(box=box.SIMPLE_HEAD, header_style="", pad_edge=False,
                         collapse_padding=True)  # fmt: skip
        self.spare = spare

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        natural = [
            max((cell_len(line) for cell in (c.header, *c.cells) for line in _lines(cell)),
                default=0)
            for c in self.columns
        ]  # fmt: skip
        kept = list(range(len(natural)))
        most = [_LABEL, *[_FOLDED] * len(natural)]
        for column in self.spare:  # as it is or not at all
            least = [n if i in self.spare else min(n, most[i]) for i, n in enumerate(natural)]
            if _fits([least[i] for i in kept], options.max_width):
                break
            kept.remove(column)
        columns = [self.columns[i] for i in kept]
        fixed = {place for place, i in enumerate(kept) if i in self.spare}
        widths = _shrunk([natural[i] for i in kept], options.max_width, fixed)
        narrow = copy(self)
        narrow.columns = [
            replace(column, _index=place, width=width, overflow="fold")
            for place, (column, width) in enumerate(zip(columns, widths, strict=True))
        ]
        yield from Table.__rich_console__(narrow, console, options)


def _lines(cell: object) -> list[str]:
    return str(cell).split("\n")


def _fits(widths: Sequence[int], width: int) -> bool:
    """True if columns of these widths, two apart and one from both edges, fit."""
    return sum(widths) + 2 * len(widths) <= width


def _shrunk(widths: list[int], width: int, fixed: Collection[int]) -> list[int]:
    """The widths with the widest made narrower until they fit, that of the labels rather late."""
    others = range(1, len(widths))
    for places, least in ((others, _FOLDED), (range(len(widths)), _READABLE), (others, _SHORT),
                          (range(len(widths)), 1)):  # fmt: skip
        loose = [i for i in places if i not in fixed]
        while not _fits(widths, width) and any(widths[i] > least for i in loose):
            widths[max(loose, key=widths.__getitem__)] -= 1
    return widths


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


def plain_table(columns: Sequence[tuple[str, bool]], spare: Collection[int] = ()) -> Table:
    """An empty table.

    Args:
        columns: `(header, right-aligned number)`.
        spare: columns that a narrow page may do without, the first to leave first.
    """
    table = _PlainTable(spare)
    for header, number in columns:
        table.add_column(header, justify="right" if number else "left")
    return table


def shown(name: str) -> str:
    """A name of the user's on one line: control characters as Python writes them."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], name)


def bar(share: float, width: int = _BAR) -> str:
    """A bar of `share` (0 to 1) of `width` columns, to an eighth of a column."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    whole, rest = divmod(eighths, 8)
    return "█" * whole + (" ▏▎▍▌▋▊▉"[rest] if rest else "")
