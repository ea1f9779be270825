"""Branch and bound over the states of nodes, with bounds from priced rows.

The bound that prices give stands for a mixture of plans (`multipliers`). A node whose states the
mixture mixes is split in two, light states and heavy ones, so that neither half contains the
mixture; each half gets bounds of its own (branch and price, Barnhart et al. 1998). The part with
the least bound goes first, which is then a bound for everything that is open.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.solver.discrete.problem import Array
from autopar.solver.relaxed import Allowed, Column, Relaxation
from autopar.solver.row_at import RowAt

__all__ = ["Part", "Split", "branch", "split_states"]

_CHECKED = 6  # parts

Split = tuple[Hashable, NDArray[np.bool_]]


@dataclass(frozen=True, slots=True)
class Part:
    """Some of the plans: those of the allowed states.

    Attributes:
        allowed: the states.
        prices: on the rows, that gave the best bound.
        bound: no plan of this part costs less.
        latest: the plan that these prices gave.
    """

    allowed: Allowed
    prices: Mapping[RowAt, float]
    bound: float
    latest: Column


def branch(
    root: Part,
    bounded: Callable[[Part, Allowed], Part | None],
    split: Callable[[Part], Split | None],
    done: Callable[[float], bool],
    worth: Callable[[float, float], bool],
    budget: int,
) -> float:
    """A bound for all of `root`.

    Args:
        root: where to start.
        bounded: the part of some states of a part; None if nothing is in it.
        split: the node and its states to split a part by; None if there is none.
        done: true of a bound that is good enough.
        worth: true if it pays to go on where `_CHECKED` parts took one bound to another.
        budget: parts to bound at most.
    """
    heap = [(root.bound, 0, root)]
    closed = np.inf  # the least bound of the parts that cannot be split
    count, checked, before = 0, 0, root.bound
    while heap and not done(min(heap[0][0], closed)) and count < budget:
        if count - checked >= _CHECKED:
            now = min(heap[0][0], closed)
            if not worth(before, now):
                break
            checked, before = count, now
        bound, _, part = heapq.heappop(heap)
        found = split(part)
        if found is None:
            closed = min(closed, bound)
            continue
        node, light = found
        for mask in (light, ~light):
            known = part.allowed.get(node)
            left = mask if known is None else mask & known
            if not left.any():
                continue
            allowed = {**part.allowed, node: left}
            count += 1
            half = bounded(part, allowed)
            if half is not None:
                heapq.heappush(heap, (half.bound, count, half))
    return float(min(heap[0][0] if heap else np.inf, closed))


def split_states(
    relaxed: Relaxation, part: Part, columns: Sequence[Column], shares: Sequence[float]
) -> Split | None:
    """The node whose priced bytes the mixture of plans mixes most, and its light states."""
    mixed = [(c, s) for c, s in zip(columns, shares, strict=True) if s > 1e-9]
    total = sum(share for _, share in mixed)
    best: Split | None = None
    most = 0.0
    weights = _priced_bytes(relaxed, part.prices)
    for node, weight in weights.items():
        if total > 0:
            parts = np.array([share / total for _, share in mixed])
            held = np.array([weight[c.chosen[node]] for c, _ in mixed])
            mean = float(parts @ held)
            spread = float(parts @ np.abs(held - mean))
            if spread > most:
                most, best = spread, (node, weight <= mean)
    return best or _split_one(part, weights)


def _split_one(part: Part, weights: Mapping[Hashable, Array]) -> Split | None:
    """Where one plan alone holds the bound: the node that could save most bytes, by half."""
    best: Split | None = None
    most = 0.0
    for node, weight in weights.items():
        mask = part.allowed.get(node, np.ones(len(weight), dtype=bool))
        state = part.latest.chosen[node]
        held = float(weight[state] if mask[state] else weight[mask].max())
        least = float(weight[mask].min())
        if held - least > most:
            most, best = held - least, (node, weight <= (held + least) / 2)
    return best


def _priced_bytes(relaxed: Relaxation, prices: Mapping[RowAt, float]) -> dict[Hashable, Array]:
    """Seconds that the prices put on each state of each node with bytes."""
    found: dict[Hashable, Array] = {}
    for position, price in prices.items():
        if price:
            for node, num_bytes in relaxed.rows[position].nodes.items():
                known = found.get(node)
                found[node] = num_bytes * price + (0.0 if known is None else known)
    return found
