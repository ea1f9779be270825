"""Where a pipeline is cut: runs of blocks for its ranks, so that the step takes least.

Rank r, which holds blocks i to j, is done no sooner than `ranks[r][i, j]`. The least that any cuts
can do is found by dynamic programming over the ranks,

    best_r(j) = min_i max(best_(r-1)(i), ranks[r][i, j]),

and among the cuts that do so, those are taken whose stages differ least: the sum of the squares of
their seconds is minimised in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.solver.discrete.problem import Array

__all__ = ["least_cuts", "least_done", "runs_of"]

_ROUNDING = 1e-9  # relative, of sums of seconds


def runs_of(seconds: Array) -> Array:
    """Seconds of each run of blocks, by its first and the one behind its last; infinite if empty.

    Args:
        seconds: of each block, (n,).

    Returns:
        (n + 1, n + 1).
    """
    total = np.concatenate([[0.0], np.cumsum(seconds)])
    size = len(total)
    behind = np.arange(size)[:, None] < np.arange(size)
    return np.where(behind, total[None, :] - total[:, None], np.inf)


def least_done(
    ranks: Sequence[Array], back: Sequence[Array], tail: Array, joint: Sequence[bool]
) -> float:
    """When the last rank is done at the soonest, where each may be waited for by the first.

    Args:
        ranks: of each rank, when it is done if it holds a run, as `runs_of` lays them out.
        back: of each rank, when the first one has what it waits for.
        tail: what the first one does from then on, by the block behind its own run.
        joint: True for a block that must stay with the one before.

    Returns:
        Seconds, infinite where there are no such cuts.
    """
    size = len(tail)
    free = np.array([*(not j for j in joint), True])
    wall = np.where(free, 0.0, np.inf)[:, None]
    ends = range(1, size) if len(ranks) > 1 else range(size - 1, size)
    least = np.inf
    for end in ends:
        first = max(ranks[0][0, end], back[0][0, end] + tail[end])
        if not free[end] or first >= least:
            continue
        best = np.where(np.arange(size) == end, first, np.inf)
        for done, returned in zip(ranks[1:], back[1:], strict=True):
            best = np.maximum(best[:, None], np.maximum(done, returned + tail[end]) + wall).min(0)
        least = min(least, float(best[-1]))
    return least


def least_cuts(
    ranks: Sequence[Array], stages: Array, joint: Sequence[bool]
) -> tuple[float, list[int]]:
    """Cuts with which the last rank to be done is done soonest.

    Args:
        ranks: of each rank, when it is done if it holds a run, as `runs_of` lays them out.
        stages: seconds of each run, for what does not matter to the last rank to be done.
        joint: True for a block that must stay with the one before.

    Returns:
        When that is, infinite where there are no such cuts, and the first block of all stages but
        the first.
    """
    size = len(stages)
    free = np.array([*(not j for j in joint), True])
    wall = np.where(free, 0.0, np.inf)[:, None]
    best = np.where(np.arange(size) == 0, 0.0, np.inf)
    for done in ranks:
        best = np.maximum(best[:, None], done + wall).min(axis=0)
    least = float(best[-1])
    if not np.isfinite(least):
        return least, []
    total = np.where(np.arange(size) == 0, 0.0, np.inf)
    choices: list[Array] = []
    for done in ranks:
        fits = done + wall <= least * (1 + _ROUNDING)
        with_last = np.where(fits, total[:, None] + stages**2, np.inf)
        choices.append(with_last.argmin(axis=0))
        total = with_last.min(axis=0)
    starts: list[int] = []
    end = size - 1
    for begin in reversed(choices[1:]):
        end = int(begin[end])
        starts.append(end)
    return least, starts[::-1]
