"""What a step costs where gradients and parameters travel beside compute, and how to search for it.

With C the seconds of ops, H those of the collectives that gather parameters, reduce gradients or
make what only the caller reads, and N all others, which ops wait for, a step takes about::

    N + C + max(e · H, H - C)

The program hides H behind C (`codegen/passes/overlap.py`), but for a share e: the first gather, the
last bucket. No placement of ops has a price in a maximum, but each sum of its two sides has::

    N + (1 - t) · C + (e + t · (1 - e)) · H        0 ≤ t ≤ 1

The least of such a sum is below the least of the maximum, for every t; the greatest of these bounds
is looked for with the lines that the plans found are in t (Kelley 1960, the cutting-plane method).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from autopar.solver.price import Price
    from autopar.solver.variant import Variant

__all__ = ["ALL", "EXPOSED", "Found", "Weights", "counted_seconds", "least"]

EXPOSED = 0.1
"""Of the seconds that may hide, what does not: about what simulated programs show on one axis."""

_NEAR = 1e-2  # gap at which no other sum is looked at
_MOST = 8  # sums
_LIMITED = 3  # where each takes a search under the memory limit
_SAME = 1e-4  # of t, and of the value of a sum
_LAST = 0.99  # of t, beyond which compute would be for nothing


class Weights(NamedTuple):
    """What a second of ops, and one of a collective that may hide, counts in a search."""

    compute: float = 1.0
    hideable: float = 1.0


ALL = Weights()
"""Nothing is hidden, as in a step in microbatches."""


class Found(NamedTuple):
    """The best plan of one sum, and the seconds that no plan is below in it."""

    variant: Variant
    bound: float


def least(
    search: Callable[[Weights, float], Found],
    exposed: float,
    stop: Callable[[Found], bool] = lambda found: False,
) -> tuple[Found, float]:
    """The plan of the least seconds, and a bound of them.

    Args:
        search: solves the problem of some weights; once a plan is below the given seconds, its
            bound is of no use, and it need not be close.
        exposed: share of the seconds that may hide, which does not.
        stop: asked of the first plan before more sums are searched under a memory limit; True if
            they are not worth it.
    """
    best = search(_at(0.0, exposed), 0.0)
    bound, low, high = best.bound, _line(best, exposed), None
    memory = best.variant.search.memory
    limited = memory.best is not memory.free
    last = 0.0
    for turn in range((_LIMITED if limited else _MOST) - 1):
        now_s = _seconds(best, exposed)
        if low[1] <= 0 or bound >= now_s * (1 - _NEAR):
            break
        if limited and turn == 0 and stop(best):
            break
        t = _LAST if high is None else _crossing(low, high)
        if abs(t - last) < _SAME:
            break
        last = t
        found = search(_at(t, exposed), bound)
        bound = max(bound, found.bound)
        line = _line(found, exposed)
        nothing_less = _value(line, t) >= _value(low, t) * (1 - _SAME)
        if line[1] > 0:
            low = line
        else:
            high = line
        if _seconds(found, exposed) < now_s:
            best = found
        if nothing_less:
            break  # the plans known are the best of this sum, which is the greatest
    return best, bound


def counted_seconds(price: Price, exposed: float) -> float:
    """Seconds of a plan's step with what may hide taken off."""
    beside_s = price.hideable_s
    waited_s = max(exposed * beside_s, beside_s - price.compute_s)
    return price.total_s - beside_s + waited_s


def _at(t: float, exposed: float) -> Weights:
    return Weights(compute=1.0 - t, hideable=exposed + t * (1.0 - exposed))


def _price(found: Found) -> Price:
    fit = found.variant.search.memory.best
    assert fit is not None
    return fit.price


def _seconds(found: Found, exposed: float) -> float:
    return counted_seconds(_price(found), exposed)


def _line(found: Found, exposed: float) -> tuple[float, float]:
    """Value at 0 and slope of a plan's sum."""
    price = _price(found)
    at_0 = price.total_s - (1.0 - exposed) * price.hideable_s
    return at_0, (1.0 - exposed) * price.hideable_s - price.compute_s


def _value(line: tuple[float, float], t: float) -> float:
    return line[0] + line[1] * t


def _crossing(rising: tuple[float, float], falling: tuple[float, float]) -> float:
    t = (falling[0] - rising[0]) / (rising[1] - falling[1])
    return min(_LAST, max(0.0, t))
