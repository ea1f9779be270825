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

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from autopar.solver.price import Price
    from autopar.solver.variant import Variant

__all__ = [
    "ALL",
    "EXPOSED",
    "Found",
    "Least",
    "NotBelow",
    "Weights",
    "counted_seconds",
    "least",
    "least_share",
    "promising",
    "weights_at",
]

EXPOSED = 0.1
"""Of the seconds that may hide, what does not: about what simulated programs show on one axis."""

_NEAR = 1e-2  # gap at which no other sum is looked at
_MOST = 8  # sums
_LIMITED = 4  # where each takes a search under the memory limit
_GLANCES = 4  # at plans that are soon found, before the first sum is searched
_SAME = 1e-4  # of t, and of the value of a sum
_LAST = 0.99  # of t, beyond which compute would be for nothing
_NEXT = 0.25  # of t, under a limit, where nothing tells where the greatest bound is
_LAST_LIMITED = 0.75  # of t, under a limit, where nothing tells that

_Line = tuple[float, float]  # value at 0, and slope


class Weights(NamedTuple):
    """What a second of ops, and one of a collective that may hide, counts in a search."""

    compute: float = 1.0
    hideable: float = 1.0

    @property
    def t(self) -> float:
        """Of the sum."""
        return 1.0 - self.compute


ALL = Weights()
"""Nothing is hidden, as in a step in microbatches."""


class Found(NamedTuple):
    """The best plan of one sum, and the seconds that no plan is below in it.

    `alike` has the best of those that recompute and place equal blocks alike, as all do that the
    bound is of, where that is another.
    """

    variant: Variant
    bound: float
    alike: Variant | None = None


class NotBelow(Exception):
    """No plan of use was found.

    Attributes:
        bound: seconds that none is below.
        t: of the sum that says so.
    """

    def __init__(self, bound: float, t: float = 0.0) -> None:
        super().__init__(f"no plan is below {bound} s")
        self.bound, self.t = bound, t


class Least(NamedTuple):
    """The plan of the least seconds, seconds that none is below, and t of the sum that says so."""

    variant: Variant
    bound: float
    t: float


def least(
    search: Callable[[Weights, float, float], Found],
    exposed: float,
    stop: Callable[[Found], bool] = lambda found: False,
    first: float = 0.0,
    below_s: float = math.inf,
    mixed: Callable[[Found, Found, float], Found | None] | None = None,
) -> Least:
    """The plan of the least seconds, and a bound of them.

    Args:
        search: solves the problem of some weights; once a plan is below the given seconds, its
            bound is of no use, and it need not be close; plans that are not below the seconds given
            last are of no use.
        exposed: share of the seconds that may hide, which does not.
        stop: asked of the first plan before more sums are searched under a memory limit; True if
            they are not worth it.
        first: t of the sum to begin with: where the greatest bound is looked for.
        below_s: seconds that the plan must stay below.
        mixed: asked for a plan between two: one that has more to hide than compute hides, and one
            that has less; with t of the sum that bounds plans best.

    Raises:
        NotBelow: none is.
    """
    best = search(weights_at(first, exposed), 0.0, below_s)
    bound, greatest, last = best.bound, first, first
    if bound >= below_s:
        raise NotBelow(bound, first)
    plans = {_line(best, exposed): best}
    low, high = _sides(_line(best, exposed), first, None, None)
    limited, in_steps = _is_limited(best), best.variant.search.memory.has_limit
    for turn in range((_LIMITED if limited else _MOST) - 1):
        now_s = _seconds(best, exposed)
        if (low is not None and low[1] <= 0) or bound >= now_s * (1 - _NEAR):
            break
        t = _next(low, high, last, in_steps)
        if abs(t - last) < _SAME or (limited and turn == 0 and stop(best)):
            break
        last = t
        try:
            # a step takes no less than any of its sums
            found = search(weights_at(t, exposed), bound, min(below_s, now_s))
        except NotBelow as error:
            if error.bound > bound:
                bound, greatest = error.bound, t
            break
        if found.bound > bound:
            bound, greatest = found.bound, t
        line = _line(found, exposed)
        plans[line] = found
        # no sum is greater than one between both lines, or the last, where no new plan costs less
        ends = (
            low is not None
            and (high is not None or t == _LAST)
            and _value(line, t) >= _value(low, t) * (1 - _SAME)
        )
        low, high = _sides(line, t, low, high)
        if _seconds(found, exposed) < now_s:
            best = found
        if ends:
            break
    if mixed and low and high and bound < _seconds(best, exposed) * (1 - _NEAR):
        between = mixed(plans[low], plans[high], greatest)
        if between is not None and _seconds(between, exposed) < _seconds(best, exposed):
            best = between
    return Least(best.variant, bound, greatest)


def promising(
    soon: Callable[[Weights, float], Variant | None], exposed: float, first: float, below_s: float
) -> tuple[float, Variant | None]:
    """With which sum a search under a memory limit is to begin: the greatest, as far as is seen.

    Args:
        soon: a plan of a sum that is soon found, if there is one.
        exposed, first, below_s: as for `least`.

    Returns:
        t of the sum, and the search with the fastest plan that was seen.

    Raises:
        NotBelow: no plan is below `below_s`.
    """
    low: _Line | None = None
    high: _Line | None = None
    t, greatest = first, (-math.inf, first)
    seen: list[Found] = []
    for _ in range(_GLANCES):
        variant = soon(weights_at(t, exposed), below_s)
        if variant is None:
            break
        found = Found(variant, 0.0)
        line = _line(found, exposed)
        seen.append(found)
        greatest = max(greatest, (_value(line, t), t))
        if not _is_limited(found):
            break
        low, high = _sides(line, t, low, high)
        then = _next(low, high, t, in_steps=True)
        if _value(line, then) <= greatest[0] * (1 + _NEAR):
            break
        t = then
    best = min(seen, key=lambda found: _seconds(found, exposed), default=None)
    return greatest[1], None if best is None else best.variant


def _sides(
    line: _Line, t: float, low: _Line | None, high: _Line | None
) -> tuple[_Line | None, _Line | None]:
    """The lines that the greatest bound is between, where another one is known."""
    return (line, high) if t == 0 or line[1] > 0 else (low, line)


def _next(low: _Line | None, high: _Line | None, last: float, in_steps: bool) -> float:
    """t of the sum to look at: where the lines on both sides of the greatest bound cross.

    Where only the lower one is known, that is looked for at the end, or upwards from the last t, as
    under a limit: sums that count next to no compute take long searches of all recomputation. A
    lower one that does not rise is greatest at 0.
    """
    if low is None or low[1] <= 0:
        return 0.0
    if high is None:
        return min(max(_LAST_LIMITED, last), 2 * last or _NEXT) if in_steps else _LAST
    return _crossing(low, high)


def counted_seconds(price: Price, exposed: float) -> float:
    """Seconds of a plan's step with what may hide taken off."""
    beside_s = price.hideable_s
    waited_s = max(exposed * beside_s, beside_s - price.compute_s)
    return price.total_s - beside_s + waited_s


def least_share(exposed: float) -> float:
    """The share of the seconds of all ops and collectives that a step takes, hide what may.

    That of the sum in which both of what overlaps count the same.
    """
    return 1.0 / (2.0 - exposed)


def weights_at(t: float, exposed: float) -> Weights:
    """What seconds count in the sum of a t."""
    return Weights(compute=1.0 - t, hideable=exposed + t * (1.0 - exposed))


def _is_limited(found: Found) -> bool:
    """True if the fastest plan of all does not keep to the memory limit."""
    memory = found.variant.search.memory
    return memory.best is not memory.free


def _price(found: Found) -> Price:
    fit = found.variant.search.memory.best
    assert fit is not None
    return fit.price


def _seconds(found: Found, exposed: float) -> float:
    return counted_seconds(_price(found), exposed)


def _line(found: Found, exposed: float) -> _Line:
    """Value at 0 and slope of a sum of the plan that places equal blocks alike."""
    price = _price(found if found.alike is None else Found(found.alike, found.bound))
    at_0 = price.total_s - (1.0 - exposed) * price.hideable_s
    return at_0, (1.0 - exposed) * price.hideable_s - price.compute_s


def _value(line: _Line, t: float) -> float:
    return line[0] + line[1] * t


def _crossing(rising: _Line, falling: _Line) -> float:
    t = (falling[0] - rising[0]) / (rising[1] - falling[1])
    return min(_LAST, max(0.0, t))
