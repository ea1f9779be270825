"""Mixtures: the first blocks as in one plan, those behind them as in one that takes less time.

Plans that recompute and place all equal blocks alike leave steps in the frontier of time and
memory. Under a limit L, of two plans met, one that is too large, `(t, m)`, and one that recomputes
as much or more and fits, `(t', m')`, a mixture takes about

    t' + (t - t') * (L - m') / (m - m')

seconds, or a block's share less. Plans of all kinds are met at the price of a byte that this line
stands for, until it moves no more. The two that promise least say which kinds to mix, and how a
block of each is placed; how many blocks are of the stronger kind is found by pricing mixtures, and
that one is solved as any other step. Blocks in front are recomputed more: when the backward comes
to them, that of the others is done, and what they compute again has the room that these held.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from autopar.core.block_kinds import (
    RECOMPUTATIONS,
    Checkpoint,
    as_checkpoint,
    kinds_of,
    pinned_kinds,
    sections_of,
)
from autopar.core.blocks import Block, Blocks, section_of
from autopar.core.graph import TracedModel
from autopar.solver.found import Met
from autopar.solver.mixer import Mixer, Point
from autopar.solver.variant import Variant

__all__ = ["Make", "free_blocks", "mixtures", "uniform_checkpoints"]

_WORTH = 5e-3  # of the seconds of the best plan: what a mixture must promise to save
_NEARLY = 0.03  # by how much more a pair of kinds may promise to take than the best pair
_ROUNDING = 1e-9  # relative, of seconds
_PRICES = 4  # of a byte, at which plans of all kinds are looked for

Make = Callable[[object, Checkpoint], Variant]


def uniform_checkpoints(
    traced: TracedModel, pinned: Checkpoint | None, away: bool = False
) -> list[Checkpoint]:
    """Each kind of recomputation, of all blocks that no pin speaks of.

    Args:
        traced: the step.
        pinned: what is pinned.
        away: "host" is one of the kinds.

    Raises:
        ConstraintError: a pin speaks of a block that there is not.
    """
    free = [kind for kind in RECOMPUTATIONS if away or kind != "host"]
    if pinned is None:
        return list(free)
    if isinstance(pinned, str):
        return [pinned]
    blocks = Blocks(traced).every()
    fixed, starts = pinned_kinds(pinned, blocks), sections_of(pinned)
    sections = {b: section_of(b, starts) for b in blocks}
    found = [as_checkpoint({b: fixed.get(b, kind) for b in blocks}, sections) for kind in free]
    return [checkpoint for i, checkpoint in enumerate(found) if checkpoint not in found[:i]]


def free_blocks(traced: TracedModel, pinned: Checkpoint | None) -> list[Block]:
    """Blocks that no pin speaks of, in the order in which they run."""
    if isinstance(pinned, str):
        return []
    blocks = Blocks(traced).every()
    fixed = pinned_kinds(pinned, blocks) if pinned is not None else {}
    return [block for block in blocks if block not in fixed]


def mixtures(
    tried: Sequence[Variant],
    kinds: Sequence[Checkpoint],
    free: Sequence[Block],
    make: Make,
    below_s: float = math.inf,
    apart: bool = False,
) -> list[Variant]:
    """Mixtures of two of the kinds tried, searched; none where none promises to be faster.

    Args:
        tried: searched, each with all of `free` of one kind.
        kinds: all checkpoints of which this may be said.
        free: blocks whose kind is open, in the order in which they run.
        make: the variant of a checkpoint, with the optimizer in some place.
        below_s: seconds that the plan must stay below to be of use.
        apart: mix plans of one kind, too, which differ in placements alone.
    """
    found: list[Variant] = []
    seen: list[object] = []
    for held in (v.search.optimizer for v in tried):
        if len(free) > 1 and not any(held is other for other in seen):
            seen.append(held)
            alike = [v for v in tried if v.search.optimizer is held]
            best = min((*tried, *found), key=lambda v: v.seconds)
            # the kind that computes least comes first, and no mixture with it is faster
            if alike[0].search.memory.is_slow(min(below_s, best.seconds)):
                continue
            # kinds that were not searched, as a cheaper one fits without a limit, may mix better
            known = [v.checkpoint for v in alike]
            others = [kind for kind in kinds if kind not in known]
            given = alike, others, free, partial(make, held), best, below_s
            found += _mixtures(*given, apart)
    return found


def _mixtures(
    tried: Sequence[Variant],
    others: Sequence[Checkpoint],
    free: Sequence[Block],
    make: Callable[[Checkpoint], Variant],
    best: Variant,
    below_s: float,
    apart: bool,
) -> list[Variant]:
    """Those with the optimizer in one place, if they promise to be faster than the best other."""
    least_s = min(below_s, best.seconds * (1 - _WORTH))
    pairs = _promising(tried, others, free, make, least_s, apart)
    priced = []
    for cheap, strong in pairs:
        mixer = Mixer(cheap, strong, free, make)
        mixture = mixer.fewest() or mixer.fewest_as_strong()
        if mixture is not None:
            priced.append((mixture.fit.solution.objective, mixture, mixer))
    if not priced:
        return []
    _, first, mixer = min(priced, key=lambda row: row[0])
    price, found = best.search.memory.price, [first.variant]
    first.variant.search.memory.seed(first.chosen)
    to_beat_s = min(below_s, best.seconds)
    first.variant.search.start(to_beat_s, price)
    least_s = min(v.search.memory.bound for v in tried)
    first.variant.search.memory.finish(to_beat_s, least_s)
    fewer = mixer.fewer(first)
    if fewer is not None:
        found.append(fewer.variant)
        memory = fewer.variant.search.memory
        memory.seed(fewer.chosen)
        if memory.bound < least_s:  # else others say what no plan is below
            fewer.variant.search.start(min(to_beat_s, first.variant.seconds), price)
    return found


def _promising(
    tried: Sequence[Variant],
    others: Sequence[Checkpoint],
    free: Sequence[Block],
    make: Callable[[Checkpoint], Variant],
    below_s: float,
    apart: bool,
) -> list[tuple[Point, Point]]:
    """For each two kinds, the plans between which a mixture comes below the limit soonest.

    Pairs that promise as much as the best, or nearly so, come back. One block more than would fit
    is of the cheap kind (`_share`): where plans of the stronger kind peak as the last one's
    backward begins, what that would compute again is there in any case.

    Args:
        tried: variants.
        others: kinds that compute more than all of these, of which variants are made at need.
        free, make, below_s, apart: see `mixtures`.
    """
    block, least = free[-1], 1 / len(free)
    order: tuple[str, ...] = RECOMPUTATIONS
    limit = tried[0].search.memory.limit

    def free_s(variant: Variant) -> float:
        return variant.search.memory.approximate().bound

    def points(variants: Iterable[Variant]) -> list[Point]:
        return [
            Point(kinds_of(variant.checkpoint, [block])[block], variant, met)
            for variant in variants
            for met in variant.search.memory.met()
        ]

    def may_help(bound: float) -> bool:
        shares = ((p.met.seconds, _share(limit / p.met.peak, least)) for p in large)
        return bound < below_s or any(bound + (s - bound) * r < below_s for s, r in shares)

    # what fits is no faster than the best plan, so that the other plan of a pair must be
    variants = [v for v in tried if free_s(v) < below_s]
    large = [p for p in points(variants) if p.met.peak > limit]
    variants += [v for v in tried if free_s(v) >= below_s and may_help(free_s(v))]
    least_s = max(free_s(v) for v in tried)
    variants += [make(kind) for kind in others if may_help(least_s)]
    _meet(variants, limit, below_s, least)
    known = points(variants)
    pairs = [(c, s) for c, s in _pairs(known, limit) if order.index(c.kind) < order.index(s.kind)]
    if apart:
        sure = [p._replace(met=_sure(p.met, p.variant)) for p in known]
        pairs += [(c, s) for c, s in _pairs(sure, limit) if c.kind == s.kind]
    found: dict[tuple[str, str], tuple[float, Point, Point]] = {}
    for cheap, strong in pairs:
        room = (limit - strong.met.peak) / (cheap.met.peak - strong.met.peak)
        share = _share(room, least)
        seconds = strong.met.seconds + (cheap.met.seconds - strong.met.seconds) * share
        kinds = cheap.kind, strong.kind
        if seconds < found.get(kinds, (below_s,))[0]:
            found[kinds] = seconds, cheap, strong
    most_s = min((row[0] for row in found.values()), default=0.0) * (1 + _NEARLY)
    return [(cheap, strong) for seconds, cheap, strong in found.values() if seconds <= most_s]


def _share(of_room: float, block: float) -> float:
    """Blocks of the cheap kind: one more than there is room for, and not all of them.

    One that is left may take half as long as the mean of all.
    """
    return min(of_room + block, 1.0 - block / 2)


def _pairs(points: Sequence[Point], limit: float) -> Iterator[tuple[Point, Point]]:
    """Plans that are too large, each with each one that fits."""
    large = [p for p in points if p.met.peak > limit]
    return itertools.product(large, (p for p in points if p.met.peak <= limit))


def _sure(met: Met, variant: Variant) -> Met:
    """A plan met; one that seems to fit but is faster than the best that does holds more.

    Where both plans are of one kind, it would be taken for the other of a pair.
    """
    limit = variant.search.memory.limit
    if met.peak <= limit and met.seconds < variant.seconds * (1 - _ROUNDING):
        return met._replace(peak=limit + 1.0)
    return met


def _meet(variants: Sequence[Variant], limit: float, below_s: float, least: float) -> None:
    """Look for plans of several kinds between which a mixture promises less.

    Args:
        variants: of each kind.
        limit: bytes.
        below_s: what none is looked for above.
        least: share of a block.
    """
    for _ in range(_PRICES if len(variants) > 1 else 0):
        met = [met for v in variants for met in v.search.memory.met()]
        price = _price(met, limit)
        found = [v.search.memory.meet(price) for v in variants]
        told = [seconds for seconds in found if seconds is not None]
        peaks = [m.peak for m in met]
        block_s = price * least * (max(peaks) - min(peaks))  # what one block more may save
        if not told or (len(told) == len(found) and min(told) - block_s >= below_s):
            return


def _price(met: Sequence[Met], limit: float) -> float:
    """Seconds per byte that plans are worth between which a mixture promises least; 0 without any.

    That is the slope of the lower hull of their seconds, by their bytes, at the limit.
    """
    large = [(m.seconds, m.peak) for m in met if m.peak > limit]
    small = [(m.seconds, m.peak) for m in met if m.peak <= limit]
    found = (
        (s + (limit - m) * (t - s) / (n - m), (s - t) / (n - m))
        for (t, n), (s, m) in itertools.product(large, small)
        if s > t
    )
    return min(found, default=(0.0, 0.0))[1]
