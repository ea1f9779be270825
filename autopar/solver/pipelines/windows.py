"""Lower bounds of runs of blocks that follow each other, and of the runs that these make up.

What lies between two blocks is free in the bounds of each, so their sum leaves out what it costs to
hand values on. Of several equal blocks in a row, a window, it is counted. With R(i, j) what blocks
i to j take at least on one rank, b_k what block k does and w_k what the window does that begins
with it and is L blocks long,

    R(i, j) >= R(i, j - 1) + b_(j-1)        R(i, j) >= R(i, j - L) + w_(j-L)

Windows are as long as suits the blocks of a rank: three and six for ranks of six.
The last blocks of a model are one, too, with what is around the last of them, such as a head.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autopar.core.extended_fold import extended
from autopar.core.graph import Repeat, TracedModel
from autopar.solver.discrete.problem import Array
from autopar.solver.pipelines.cuts import runs_of

__all__ = ["Window", "WindowKind", "between", "kinds_for", "runs_with", "widened", "windows_of"]

_LONGEST = (4, 8)  # blocks of windows: with short ones, ranks that hold a few less have as many
_INNER = max(_LONGEST)  # periods that stand for others in the graph of a window


class WindowKind(NamedTuple):
    """Which windows are bounded.

    Attributes:
        name: of what is bounded, out of `functionals`.
        length: blocks of each, or as many periods as have no more.
        last: that of the last blocks, in place of those of equal ones.
    """

    name: str
    length: int
    last: bool = False


@dataclass(frozen=True, slots=True)
class Window:
    """Bounds of equal runs of blocks.

    Attributes:
        length: blocks of each.
        starts: first block of each.
        name: of what is bounded, out of `functionals`.
        found: seconds of a step of each, with what is around its blocks, (len(starts),).
    """

    length: int
    starts: tuple[int, ...]
    name: str
    found: Array


def kinds_for(name: str, num_blocks: int, ranks: int) -> list[WindowKind]:
    """Windows that count most of what blocks hand on inside of ranks that hold about as many."""
    most = -(-num_blocks // ranks)
    lengths: set[int] = set()
    for held, longest in itertools.product((num_blocks // ranks, most), _LONGEST):
        counted = {n: held // n * (n - 1) for n in range(2, min(held, longest) + 1)}
        lengths.update(sorted(counted, key=lambda n: (counted[n], n))[-1:])
    inside = [WindowKind(name, length) for length in sorted(lengths)]
    return inside + [WindowKind(name, n, last=True) for n in range(1, min(most, _INNER) + 1)]


def runs_with(seconds: Array, name: str, windows: Sequence[Window]) -> Array:
    """Bounds of all runs, as `runs_of` lays them out.

    Args:
        seconds: of each block, (n,).
        name: of what is bounded.
        windows: of some runs.
    """
    found = runs_of(seconds)
    known = [
        (w.length, dict(zip(w.starts, w.found.tolist(), strict=True)))
        for w in windows
        if w.name == name
    ]
    if not known:
        return found
    for end in range(1, len(found)):
        before = found[: end - 1, end - 1] + seconds[end - 1]
        found[: end - 1, end] = np.maximum(found[: end - 1, end], before)
        for length, values in known:
            start = end - length
            if start in values:
                value = np.append(found[:start, start], 0.0) + values[start]
                found[: start + 1, end] = np.maximum(found[: start + 1, end], value)
    return found


def between(first: Array, second: Array, share: float) -> Array:
    """Bounds of runs on the line from some to others; what is infinite, of no blocks, stays so."""
    ends = np.isfinite(first)
    line = (1 - share) * np.where(ends, first, 0.0) + share * np.where(ends, second, 0.0)
    return np.where(ends, line, np.inf)


def windows_of(
    traced: TracedModel, names: Sequence[str], longest: int
) -> list[tuple[Repeat, int, list[int]]]:
    """The equal runs of a folded model: what repeats, blocks of each, and where they begin.

    Args:
        traced: folded, or without repeats.
        names: FQN of every block of the model.
        longest: blocks of each at most, if a period does not have more.
    """
    found: list[tuple[Repeat, int, list[int]]] = []
    place = {name: i for i, name in enumerate(names)}
    for repeat in traced.repeats:
        periods = min(max(1, longest // repeat.period), repeat.times)
        length = periods * repeat.period
        firsts = range(repeat.first, repeat.first + repeat.times * repeat.period - length + 1)
        starts = [
            place[f"{repeat.container}.{number}"]
            for number in firsts[:: repeat.period]
            if f"{repeat.container}.{number}" in place
        ]
        if length > 1 and starts:
            found.append((repeat, length, starts))
    return found


def widened(traced: TracedModel) -> TracedModel:
    """A folded graph with as many equal periods as a window has."""
    periods = {
        r.container: sorted({-2, -1, *range(min(_INNER, r.times)), r.times}) for r in traced.repeats
    }
    return extended(traced, periods)
