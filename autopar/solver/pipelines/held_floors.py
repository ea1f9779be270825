"""Lower bounds of runs of blocks that memory binds.

Whatever the schedule, a rank holds the states of its blocks, the sums of their gradients and what
is made of them once, while all microbatches run. With a price λ on each of these bytes, a block
takes no less than

    f_b(λ) = min over its plans of seconds + λ · bytes,

so that a rank with blocks i to j, within a limit, takes no less than Σ_b f_b(λ) - λ · limit, for
every λ ≥ 0 (Everett 1963). Of a pipeline's ranks, activations are left out, as they may hold few by
waiting or recomputing, and recomputation never makes a block faster. Of a step in one piece, what
blocks save for their backward is there at once as it begins; f_b then is the least of all ways to
recompute the block.

An optimizer whose states are in host memory is another problem; each stage has the one or the
other. Activations in host memory leave no more on the device than blocks that are recomputed from
their inputs, and compute as much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from autopar.solver.discrete.ilp import solve_problem
from autopar.solver.discrete.problem import Array, Indices, Row
from autopar.solver.liveness import Liveness
from autopar.solver.pipelines.floor import Alone, Floors
from autopar.solver.pipelines.functionals import Weights
from autopar.solver.pipelines.held_runs import HeldRuns, Priced

__all__ = ["HeldFloors", "runs_within"]

_NAMES = ("step", "end", "first", "after")
"""What ranks are bounded by (`pipeline_shape`), the first of which prices are looked for with."""

_HIGHEST = 1e3  # price of the limit's bytes, in steps without a limit
_PRICES = 5  # that are tried
_NEAR = 1e-2  # of the highest bound that a price can have: near enough
_STEP = 3.0  # times the first price, where a higher one is needed, to look once more near it


class _Held(NamedTuple):
    """A block that is recomputed in some way, and what it holds."""

    block: Alone
    row: Row

    @classmethod
    def of(cls, block: Alone, floors: Floors, saving: bool) -> _Held:
        granularity = floors.offers.cluster.device.allocation_granularity_bytes
        live = Liveness(block.part, block.built, floors.optimizer, granularity)
        row = live.throughout()
        if saving:
            row.add_row(live.saved())
            row.constant += block.handed_bytes
        return cls(block, row)

    def at(self, weights: Weights, price: float) -> tuple[float, float]:
        """The least seconds with bytes at a price, and the bytes of the plan found."""
        problem, row = self.block.built.problem, self.row
        if not problem.costs:
            return price * row.constant, row.constant
        priced = self.block.weighed(weights)
        for node in (*row.nodes, *(n for pair in row.edges for n in pair)):
            priced.costs.setdefault(node, 0.0 * problem.costs[node])
        row.price_into(priced, price)
        found = solve_problem(priced, exact=False)
        return found.bound + price * row.constant, row.value(found.chosen)


class HeldFloors:
    """Seconds and bytes of each block of a model, at prices, with the optimizer in one place.

    Args:
        kinds: bounds of blocks with each way of recomputation, that which computes least first.
        blocks: FQN of the blocks of the graph.
        like: of each block of the model, which of these it is like.
        saving: count what blocks save for their backward.
    """

    def __init__(
        self,
        kinds: Sequence[Floors],
        blocks: Sequence[str],
        like: Indices,
        saving: bool = False,
    ) -> None:
        alone = list(zip(*(each.whole(blocks) for each in kinds), strict=True))
        unlike = {block: i for i, block in enumerate(dict.fromkeys(alone))}
        self.like = np.array([unlike[block] for block in alone], dtype=int)[like]
        self.wanted = kinds[0].wanted
        self._held = [
            [_Held.of(b, each, saving) for b, each in zip(block, kinds, strict=True)]
            for block in unlike
        ]
        self._free: dict[tuple[str, int, int], float] = {}  # with bytes for nothing
        self._known: dict[tuple[str, float], tuple[Array, Array]] = {}

    def at(self, name: str, price: float) -> tuple[Array, Array]:
        """`f_b`, and the bytes of the plans found, of each block of the model."""
        if (name, price) not in self._known:
            found = [self._least(i, name, price) for i in range(len(self._held))]
            seconds, num_bytes = np.array(found).reshape(-1, 2)[self.like].T
            self._known[name, price] = seconds, num_bytes
        return self._known[name, price]

    def _least(self, block: int, name: str, price: float) -> tuple[float, float]:
        """The least of a block that is unlike others, recomputed in any way."""
        weights, kinds = self.wanted[name], self._held[block]
        best = kinds[0].at(weights, price)
        for k, each in enumerate(kinds[1:] if price else ()):
            key = name, block, k
            if key not in self._free:
                self._free[key] = each.at(weights, 0.0)[0]
            if self._free[key] < best[0]:
                best = min(best, each.at(weights, price))
        return best


def runs_within(
    places: Iterable[HeldFloors],
    ranks: int,
    limit: int,
    names: Sequence[str] = _NAMES,
    price: float = 0.0,
    enough_s: float = math.inf,
) -> Mapping[str, HeldRuns]:
    """Lower bounds of runs of blocks within a limit.

    Args:
        places: with the optimizer in each place where it may be, on the device first.
        ranks: of the pipeline: blocks are about evenly spread over them.
        limit: bytes per device.
        names: of `functionals`, what is bounded; prices are looked for with the first.
        price: of a byte, to begin with; 0: none is known.
        enough_s: of a rank, beyond which a bound is of no use.

    Returns:
        By the names; none where the first place needs no price, as the limit tells nothing then.
    """
    given, own = list(places), list[set[float]]()
    for held in given:
        search = _Prices(held.at, ranks, limit, names[0])
        prices = search.best(price, enough_s)
        if not (prices or own):
            return {}  # where states are anyway
        own.append(set(prices or [0.0]))  # what an optimizer elsewhere takes bounds without a price
        enough_s = min(enough_s, max(search.bounds.values()))  # the least of all places counts
    every = set[float]().union(*own)
    if len(given) > 1 and ranks > 1:  # several stages of a rank may have unlike places
        every.update(_Prices(_either(given), ranks, limit, names[0]).best(price, enough_s))
        own = [every] * len(given)
    tried_at = list(zip(given, own, strict=True))

    def at(name: str, price: float) -> Priced:
        found = (h.at(name, price)[0] if price in tried else None for h, tried in tried_at)
        return Priced(tuple(found), price * limit)

    return {name: HeldRuns(tuple(at(name, price) for price in sorted(every))) for name in names}


_At = Callable[[str, float], tuple[Array, Array]]


def _either(places: Sequence[HeldFloors]) -> _At:
    """As `HeldFloors.at`, each block with the optimizer where it takes least."""

    def at(name: str, price: float) -> tuple[Array, Array]:
        seconds, sizes = map(np.array, zip(*(h.at(name, price) for h in places), strict=True))
        best = seconds.argmin(axis=0), np.arange(seconds.shape[1])
        return seconds[best], sizes[best]

    return at


class _Line(NamedTuple):
    """A plan's seconds, and its bytes: a line in the price."""

    seconds: float
    num_bytes: float


class _Prices:
    """Looks for prices of a byte at which a rank of average blocks is bounded well.

    The bound is concave in the price: that where the lines of a heavy plan and of a light one cross
    is tried next (Kelley 1960).
    """

    def __init__(self, at: _At, ranks: int, limit: int, name: str) -> None:
        self.at = at
        self.ranks = ranks
        self.limit = limit
        self.name = name
        self.bounds: dict[float, float] = {}
        self.heavy: _Line | None = None
        self.light: _Line | None = None

    def best(self, first: float, enough_s: float) -> list[float]:
        """The two with the highest bounds; none without need. Arguments as of `runs_within`."""
        price = first
        while len(self.bounds) <= _PRICES and price not in self.bounds:
            self._try(price)
            if price == 0 and self.heavy is None:
                return []
            if self.bounds[price] >= enough_s:
                break
            if self.heavy is not None and self.light is not None:
                price = self._crossing(self.heavy, self.light)
                hoped = self.heavy.seconds + price * (self.heavy.num_bytes - self.limit)
                if max(self.bounds.values()) >= hoped * (1 - _NEAR):
                    break  # no price has a higher bound
            elif self.heavy is not None:
                near = price and len(self.bounds) == 1
                price = _STEP * price if near else _HIGHEST * self.heavy.seconds / self.limit
            else:
                price = 0.0  # its line and that of the light plan cross at a price between
        return sorted(sorted(self.bounds, key=self.bounds.__getitem__)[-2:])

    def _try(self, price: float) -> None:
        seconds, num_bytes = self.at(self.name, price)
        total, size = float(seconds.sum()) / self.ranks, float(num_bytes.sum()) / self.ranks
        self.bounds[price] = total - price * self.limit
        line = _Line(total - price * size, size)
        if size > self.limit:
            self.heavy = line
        else:
            self.light = line

    @staticmethod
    def _crossing(heavy: _Line, light: _Line) -> float:
        return (light.seconds - heavy.seconds) / (heavy.num_bytes - light.num_bytes)
