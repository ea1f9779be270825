"""Lower bounds of runs of blocks that memory binds, however their blocks are recomputed.

A rank holds the states of its blocks, the sums of their gradients and what is made of them once,
while all microbatches run, and what each block saves for its backward, of as many microbatches as
wait for theirs. With a price λ on each of these bytes, and n_b microbatches that wait at block b, a
block takes no less than

    f_b(λ) = min over its plans and ways of recomputation of seconds + λ · (held + n_b · saved),

so that a rank with blocks i to j, within a limit, takes no less than Σ_b f_b(λ) - λ · limit, for
every λ ≥ 0 (Everett 1963).

What waits at block b is there while all blocks behind it run, forward and backward. So of any
schedule that takes T seconds, on the average over the step (Little 1961),

    n_b = Σ_(c behind b) (forward_c + backward_c) / T

microbatches wait, and a rank's peak is no less than its average. f_b is concave in n_b: between two
numbers, the line through what both yield is below it. In more turns a microbatch is smaller, and
as many bytes wait; bounds of other sums than those of a whole step are not known then.

An optimizer whose states are in host memory is another problem; each rank has the one or the
other. Activations in host memory leave no more on the device than blocks that are recomputed from
their inputs, which are not counted, and compute as much.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from autopar.solver.cuts import runs_of
from autopar.solver.floor import Alone, Floors, Weights
from autopar.solver.ilp import solve_problem
from autopar.solver.liveness import Liveness
from autopar.solver.problem import Array, Indices, Row

__all__ = ["SUMS", "HeldFloors", "runs_within", "waiting_turns"]

SUMS = ("step", "end", "first", "after")
"""What ranks are bounded by (`pipeline_shape`), that which prices are looked for with first."""

_HIGHEST = 1e3  # price of the limit's bytes, in steps without a limit
_PRICES = 5  # that are tried
_NEAR = 1e-2  # of the highest bound that a price can have: near enough
_HIGHER = 10.0  # times a price at which nothing is light enough
_LEVELS = 4  # numbers of microbatches that wait, of equal blocks


def waiting_turns(onward: Array, step_s: float) -> Array:
    """Microbatches that wait at each block on the average of a step.

    Args:
        onward: seconds of a step that a block takes forward and backward at least, (n,).
        step_s: seconds that the step takes less than.
    """
    return np.asarray(onward.sum() - np.cumsum(onward)) / step_s


class _Held(NamedTuple):
    """A block that is recomputed in some way: what it holds throughout, and saves of each turn."""

    block: Alone
    always: Row
    saved: Row

    @classmethod
    def of(cls, block: Alone, floors: Floors) -> _Held:
        granularity = floors.offers.cluster.device.allocation_granularity_bytes
        live = Liveness(block.part, block.built, floors.optimizer, granularity)
        saved = live.saved()
        saved.constant += block.handed_bytes
        return cls(block, live.throughout(), saved)

    def at(self, weights: Weights, price: float, turns: float) -> tuple[float, float]:
        """The least seconds with bytes at a price, and the bytes of the plan found."""
        problem = self.block.built.problem
        rows = [(self.always, 1.0)] + [(self.saved, turns)] * bool(turns)
        constant = sum(times * row.constant for row, times in rows)
        if not problem.costs:
            return price * constant, constant
        priced = self.block.weighed(weights)
        for row, _ in rows:
            for node in (*row.nodes, *(n for pair in row.edges for n in pair)):
                priced.costs.setdefault(node, 0.0 * problem.costs[node])
        for row, times in rows:
            row.price_into(priced, price * times)
        found = solve_problem(priced, exact=False)
        num_bytes = sum(times * row.value(found.chosen) for row, times in rows)
        return found.bound + price * constant, num_bytes


class HeldFloors:
    """Seconds and bytes of each block of a model, at prices, with the optimizer in one place.

    Args:
        kinds: bounds of blocks with each way of recomputation, that which computes least first.
        blocks: FQN of the blocks of the graph.
        like: of each block of the model, which of these it is like.
    """

    def __init__(self, kinds: Sequence[Floors], blocks: Sequence[str], like: Indices) -> None:
        self._kinds = kinds
        self._blocks = blocks
        self.like = like
        self.wanted = kinds[0].wanted
        self._free: dict[tuple[str, int, int], float] = {}  # with bytes for nothing

    @cached_property
    def _held(self) -> list[list[_Held]]:
        """Of each block of the graph, that with each way of recomputation."""
        found = [[_Held.of(b, each) for b in each.whole(self._blocks)] for each in self._kinds]
        return [list(kinds) for kinds in zip(*found, strict=True)]

    def at(self, name: str, price: float, waiting: Array) -> tuple[Array, Array]:
        """`f_b`, and the bytes of the plans found, of each block of the model."""
        seconds, num_bytes = np.zeros(len(self.like)), np.zeros(len(self.like))
        for i in range(len(self._held)):
            own = self.like == i
            turns = waiting[own]
            if not len(turns):
                continue
            few = len(np.unique(turns)) <= 1
            levels = turns[:1] if few else np.linspace(turns.min(), turns.max(), _LEVELS)
            found = [self._least(i, name, price, float(n)) for n in levels]
            for out, values in zip((seconds, num_bytes), zip(*found, strict=True), strict=True):
                out[own] = np.interp(turns, levels, values)
        return seconds, num_bytes

    def _least(self, block: int, name: str, price: float, turns: float) -> tuple[float, float]:
        """The least of a block of the graph, recomputed in any way."""
        weights, kinds = self.wanted[name], self._held[block]
        best = kinds[0].at(weights, price, turns)
        for k, each in enumerate(kinds[1:] if price and turns else ()):
            key = name, block, k
            if key not in self._free:
                self._free[key] = each.at(weights, 0.0, 0.0)[0]
            if self._free[key] < best[0]:
                best = min(best, each.at(weights, price, turns))
        return best


def runs_within(
    places: Iterable[HeldFloors],
    waiting: Array,
    ranks: int,
    limit: int,
    names: Sequence[str] = SUMS,
    price: float = 0.0,
) -> Mapping[str, Array]:
    """Lower bounds of each run of blocks within a limit, as `cuts.runs_of` lays them out.

    Args:
        places: with the optimizer in each place where it may be.
        waiting: microbatches that wait at each block of the model at least, (n,).
        ranks: of the pipeline: blocks are about evenly spread over them.
        limit: bytes per device.
        names: of `floor.functionals`, what is bounded; prices are looked for with the first.
        price: of a byte, to begin with.

    Returns:
        By the names, those that the limit may raise.
    """
    found: dict[str, Array] = {}
    for held in places:
        prices = _prices(held, waiting, ranks, limit, names[0], price)
        for name in names:
            runs = [runs_of(held.at(name, p, waiting)[0]) - p * limit for p in prices]
            least = np.max(runs, axis=0) if runs else np.full([len(waiting) + 1] * 2, -np.inf)
            found[name] = np.minimum(found[name], least) if name in found else least
    return found


def _prices(
    held: HeldFloors, waiting: Array, ranks: int, limit: int, name: str, first: float
) -> list[float]:
    """Prices of a byte at which a rank of average blocks is bounded well; none without need.

    The bound is concave in the price: that where the lines of a heavy plan and of a light one cross
    is tried next (Kelley 1960).
    """

    def of_rank(price: float) -> tuple[float, float, float]:
        seconds, num_bytes = held.at(name, price, waiting)
        total, size = float(seconds.sum()) / ranks, float(num_bytes.sum()) / ranks
        return total - price * limit, total - price * size, size

    free, heavy_s, heavy = of_rank(0.0)
    if heavy <= limit or not free:
        return []
    highest, found = _HIGHEST * free / limit, {0.0: free}
    light_s, light, price = 0.0, math.inf, min(first, highest) or highest
    while len(found) <= _PRICES and price > 0 and price not in found:
        found[price], seconds, size = of_rank(price)
        if size > limit:
            heavy, heavy_s = size, seconds
        else:
            light, light_s = size, seconds
        if light > limit:  # nothing light is known yet
            price = min(_HIGHER * price, highest)
            continue
        price = (light_s - heavy_s) / (heavy - light)
        hoped = heavy_s + price * (heavy - limit)  # no price has a higher bound
        if max(found.values()) >= hoped * (1 - _NEAR):
            break
    return sorted(sorted(found, key=found.__getitem__)[-2:])
