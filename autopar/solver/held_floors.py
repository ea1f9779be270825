"""Lower bounds of runs of blocks on pipeline ranks that memory binds.

Whatever the schedule, a rank holds the states of its blocks, the sums of their gradients and what
is made of them once, while all microbatches run. With a price λ on each of these bytes, a block
takes no less than

    f_b(λ) = min over its plans of seconds + λ · bytes,

so that a rank with blocks i to j, within a limit, takes no less than Σ_b f_b(λ) - λ · limit, for
every λ ≥ 0 (Everett 1963). Activations are left out, as recomputation may do without them, and
recomputation never makes a block faster. An optimizer whose states are in host memory is another
problem; each rank has the one or the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from autopar.solver.cuts import runs_of
from autopar.solver.floor import Floors
from autopar.solver.ilp import solve_problem
from autopar.solver.liveness import Liveness
from autopar.solver.problem import Array, Indices

__all__ = ["runs_within"]

_NAMES = ("step", "end", "first", "after")
"""What ranks are bounded by (`pipeline_shape`), the first of which prices are looked for with."""
_HIGHEST = 1e3  # price of the limit's bytes, in steps without a limit
_PRICES = 5  # that are tried
_NEAR = 1e-2  # of the highest bound that a price can have: near enough


class _HeldFloors:
    """Seconds and bytes of each block of a graph, at prices."""

    def __init__(self, floors: Floors, blocks: Sequence[str], like: Indices) -> None:
        granularity = floors.offers.cluster.device.allocation_granularity_bytes
        self.wanted = floors.wanted
        self.like = like
        self.blocks = floors.whole(blocks)
        self.rows = [
            Liveness(b.part, b.built, floors.optimizer, granularity).throughout()
            for b in self.blocks
        ]

    def at(self, name: str, price: float) -> tuple[Array, Array]:
        """`f_b`, and the bytes of the plans found, of each block of the model."""
        seconds, num_bytes = np.zeros(len(self.blocks)), np.zeros(len(self.blocks))
        for i, (block, row) in enumerate(zip(self.blocks, self.rows, strict=True)):
            problem = block.built.problem
            if problem.costs:
                priced = block.weighed(self.wanted[name])
                for node in row.nodes:
                    priced.costs.setdefault(node, 0.0 * problem.costs[node])
                row.price_into(priced, price)
                found = solve_problem(priced, exact=False)
                seconds[i] = found.bound
                num_bytes[i] = sum(row.nodes[n][found.chosen[n]] for n in row.nodes)
        return seconds[self.like], num_bytes[self.like]


def runs_within(
    places: Sequence[Floors], blocks: Sequence[str], like: Indices, ranks: int, limit: int
) -> Mapping[str, Array]:
    """Lower bounds of each run of blocks within a limit, as `cuts.runs_of` lays them out.

    Args:
        places: bounds of blocks with the optimizer in each place where it may be.
        blocks: FQN of the blocks of the graph.
        like: of each block of the model, which of these it is like.
        ranks: of the pipeline: blocks are about evenly spread over them.
        limit: bytes per device.

    Returns:
        By the names of `floor.functionals`, those that the limit may raise.
    """
    found: dict[str, Array] = {}
    for floors in places:
        held = _HeldFloors(floors, blocks, like)
        prices = _prices(held, ranks, limit)
        for name in _NAMES:
            runs = [runs_of(held.at(name, p)[0]) - p * limit for p in prices]
            least = np.max(runs, axis=0) if runs else np.full([len(like) + 1] * 2, -np.inf)
            found[name] = np.minimum(found[name], least) if name in found else least
    return found


def _prices(held: _HeldFloors, ranks: int, limit: int) -> list[float]:
    """Prices of a byte at which a rank of average blocks is bounded well; none without need.

    The bound is concave in the price: that where the lines of a heavy plan and of a light one cross
    is tried next (Kelley 1960).
    """

    def of_rank(price: float) -> tuple[float, float, float]:
        seconds, num_bytes = held.at(_NAMES[0], price)
        total, size = float(seconds.sum()) / ranks, float(num_bytes.sum()) / ranks
        return total - price * limit, total - price * size, size

    free, heavy_s, heavy = of_rank(0.0)
    if heavy <= limit or not free:
        return []
    highest = _HIGHEST * free / limit
    found = {0.0: free}
    found[highest], light_s, light = of_rank(highest)
    while len(found) <= _PRICES and light < limit < heavy:
        price = (light_s - heavy_s) / (heavy - light)
        if price <= 0 or price in found:
            break
        hoped = heavy_s + price * (heavy - limit)  # no price has a higher bound
        found[price], seconds, size = of_rank(price)
        if found[price] >= hoped * (1 - _NEAR):
            break
        if size > limit:
            heavy, heavy_s = size, seconds
        else:
            light, light_s = size, seconds
    return sorted(sorted(found, key=found.__getitem__)[-2:])
