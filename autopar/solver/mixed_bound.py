"""What no plan of a step under a memory limit is below, whichever blocks it recomputes.

A search bounds each way of recomputation of all blocks. A mixture of them (`mixture.py`) may take
less than any that fits. Bounds of blocks with bytes at a price (`held_floors.py`) range over all
mixtures: as the backward begins, what the blocks hold and have saved is there at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from autopar.core.recompute import recomputed
from autopar.solver.discrete.ilp import Infeasible
from autopar.solver.known import Variants, places_of
from autopar.solver.mixture import uniform_checkpoints
from autopar.solver.overlap import Weights
from autopar.solver.pipelines.floor import Floors
from autopar.solver.pipelines.held_floors import HeldFloors, runs_within
from autopar.solver.pipelines.ideal import BlockWork

__all__ = ["least_mixed"]


def least_mixed(
    given: Variants, optimizer: object, weights: Weights, price: float, enough_s: float
) -> float:
    """Seconds that no plan of a sum is below, with blocks recomputed in any ways.

    Args:
        given: of the step, without pins on single blocks.
        optimizer: whose states count in memory.
        weights: of the sum.
        price: seconds per byte that tell about what the limit costs; 0 where nothing is known.
        enough_s: beyond which a bound is of no use.
    """
    traced, cluster = given.traced, given.offers.cluster
    work = BlockWork(traced, cluster, given.offers.fused)
    if not work.names:
        return 0.0  # blocks that run in no order of their own
    wanted = replace(given.wanted, params={})  # pins make no plan faster
    kinds = uniform_checkpoints(traced, given.wanted.checkpoint)
    graphs = (recomputed(traced, kind) for kind in kinds)
    floors = [Floors(g, wanted, optimizer, given.offers, 1, False, weights) for g in graphs]

    def places() -> Iterator[HeldFloors]:
        for held in places_of(cluster, given.wanted, optimizer):
            kept = [each.held_as(held) for each in floors]
            yield HeldFloors(kept, work.held, work.like, saving=True)

    try:
        runs = runs_within(places(), 1, given.limit, ["step"], price, enough_s)
    except Infeasible:
        return math.inf  # pins that no block can keep to
    return max(0.0, float(runs["step"].alone[0, -1])) if runs else 0.0
