"""Equal blocks of a folded graph that are recomputed or placed in different ways are told apart.

A folded graph holds one period of a run of equal blocks for many. Where the first so many of these
are of one kind and the others of another, it must hold one of each, and before each of them another
period of its kind, as values that the blocks of a run hand each other are read there: with `n` of
kind A and `m` of kind B, the graph holds A, A, A (`n - 1` times), A, B, B (`m - 1` times), last:
what the last A hands on is kept as B wants it, on the device, in host memory or not at all.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace

from autopar.core.blocks import Block
from autopar.core.extended_fold import extended
from autopar.core.graph import Repeat, TracedModel

__all__ = ["split_repeats", "told_apart"]


def told_apart(traced: TracedModel, kinds: Mapping[Block, Hashable]) -> TracedModel:
    """The folded graph with a stand-in for each run of blocks of one kind.

    Args:
        traced: folded or not.
        kinds: of each block of the model.

    Raises:
        ConstraintError: the blocks that repeat are not equal in microbatches.
    """
    split = [_split(repeat, kinds) for repeat in traced.repeats]
    if all(kept == [0] for kept, _ in split):
        return traced
    periods = {r.container: kept for r, (kept, _) in zip(traced.repeats, split, strict=True)}
    repeats = tuple(made for _, found in split for made in found)
    return replace(extended(traced, periods), repeats=repeats)


def split_repeats(
    repeats: tuple[Repeat, ...], kinds: Mapping[Block, Hashable]
) -> tuple[Repeat, ...]:
    """The repeats of the graph in which blocks of these kinds are told apart."""
    return tuple(made for repeat in repeats for made in _split(repeat, kinds)[1])


def _split(repeat: Repeat, kinds: Mapping[Block, Hashable]) -> tuple[list[int], list[Repeat]]:
    """Periods that the graph holds of those that the folded one stands for, and its repeats."""

    def of(period: int) -> list[Hashable]:
        start = repeat.first + period * repeat.period
        blocks = (Block(repeat.container, start + i) for i in range(repeat.period))
        return [kinds[block] for block in blocks if block in kinds]

    kept: list[int] = []
    made: list[Repeat] = []
    period = 0
    while period < repeat.times:
        kept.append(period)
        end = period + 1
        if of(period) == of(period - 1):
            while end < repeat.times and of(end) == of(period):
                end += 1
            if end - period > 1 and of(end) != of(period)[: len(of(end))]:
                end -= 1
        if end - period > 1:
            first = repeat.first + period * repeat.period
            made.append(replace(repeat, first=first, times=end - period))
        period = end
    return kept, made
