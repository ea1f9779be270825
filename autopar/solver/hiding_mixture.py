"""Mixtures of a plan that has more to hide than compute hides, and of one that has less.

With C the seconds of ops, H those of what may hide beside them, and N all others, a step takes
N + C + max(e · H, H - C) (`overlap.py`). Of two plans on either side of (1 - e) H = C, a mixture
that has so many blocks of each that both sides are equal takes less than either: a step takes less
than the line between the two, where it has a corner. Equal blocks share their choices, so no other
search looks at such plans.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from autopar.core.block_kinds import Checkpoint
from autopar.core.blocks import Block
from autopar.solver.mixer import Mixer, Point
from autopar.solver.overlap import EXPOSED, Found, counted_seconds
from autopar.solver.price import Price
from autopar.solver.variant import Variant

__all__ = ["between"]

_WORTH = 5e-3  # of the seconds of the best plan: what a mixture must promise to save


def between(
    waiting: Variant,
    hidden: Variant,
    free: Sequence[Block],
    make: Callable[[Checkpoint], Variant],
    exposed: float = EXPOSED,
) -> Found | None:
    """The mixture of two plans that takes least; None if it is not worth it, or does not fit.

    Args:
        waiting: searched; compute does not hide all that its plan has to hide.
        hidden: the same step at other weights; compute hides all that may hide.
        free: blocks that may be placed apart, in the order in which they run.
        make: the variant of a checkpoint.
        exposed: share e of the seconds that may hide, which does not.
    """
    plans = [v.search.memory.best for v in (waiting, hidden)]
    if any(plan is None for plan in plans) or len(free) < 2:
        return None
    first, second = (plan.price for plan in plans if plan is not None)
    share = _share(first, second, exposed)
    best_s = min(counted_seconds(price, exposed) for price in (first, second))
    if share is None or _between(first, second, share, exposed) > best_s * (1 - _WORTH):
        return None
    cheap, strong = (Point.of(variant, free[-1]) for variant in (waiting, hidden))
    mixer = Mixer(cheap, strong, free, make)
    placed, limit = mixer.both(), waiting.search.memory.limit
    found: Found | None = None
    for number in sorted({math.floor(share * len(free)), math.ceil(share * len(free))}):
        if not 0 < number < len(free):
            continue
        mixture = mixer.priced(number, placed)
        if mixture is None or mixture.fit.peak > limit:
            continue
        seconds = counted_seconds(mixture.fit.price, exposed)
        if seconds < best_s * (1 - _WORTH):
            best_s = seconds
            mixture.variant.search.memory.best = mixture.fit
            found = Found(mixture.variant, 0.0)
    return found


def _share(waiting: Price, hidden: Price, exposed: float) -> float | None:
    """Of the blocks, how many are as in `hidden` where as much hides as can; None if none are."""

    def left(price: Price) -> float:
        return (1 - exposed) * price.hideable_s - price.compute_s

    above, below = left(waiting), left(hidden)
    return above / (above - below) if above > 0 > below else None


def _between(waiting: Price, hidden: Price, share: float, exposed: float) -> float:
    """Seconds on the line between the parts of two plans."""

    def mixed(of: Callable[[Price], float]) -> float:
        return of(waiting) + share * (of(hidden) - of(waiting))

    others_s = mixed(lambda p: p.total_s - p.hideable_s)
    beside_s, compute_s = mixed(lambda p: p.hideable_s), mixed(lambda p: p.compute_s)
    return others_s + max(exposed * beside_s, beside_s - compute_s)
