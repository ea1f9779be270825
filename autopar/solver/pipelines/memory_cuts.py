"""Where a pipeline is cut so that its ranks fit: fewer blocks where more microbatches wait.

Of ranks that were planned it is known what they hold: parameters with their gradients and states,
and what else there is at their highest moment, nearly all of it saved for the backward. Rank r with
blocks i to j is taken to hold

    M_r(i, j) = states_q P(i, j) / P_q + others_q A(i, j) / A_q f_r / f_q,

where q is the known rank nearest to it, P bytes of parameters, A bytes that blocks save, and f the
microbatches in flight. What is above the limit has to be recomputed: of all that is saved at most
a share, at the price of the forward of as many blocks. Cuts are then chosen as those of time alone
are (`cuts.py`). It is an estimate, which planning with these cuts confirms or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autopar.core.flights import flights
from autopar.core.schedule import actions
from autopar.solver.discrete.problem import Array
from autopar.solver.pipelines.balanced_cuts import cuts_that_fit
from autopar.solver.pipelines.ideal import BlockWork
from autopar.solver.pipelines.pipeline_shape import PipelineShape
from autopar.solver.pipelines.turn import Turn

__all__ = ["RECOMPUTED", "RankBytes", "cuts_within"]

_STATES = ("parameters", "gradients", "optimizer")
RECOMPUTED = 0.9  # of what a rank holds beside its states, what recomputing all blocks may free


@dataclass(frozen=True, slots=True)
class RankBytes:
    """What one rank holds at its highest moment.

    Attributes:
        first, end: its blocks.
        states, others: bytes of parameters, gradients and optimizer states, and of all else.
    """

    first: int
    end: int
    states: float
    others: float

    @classmethod
    def of(cls, run: tuple[int, int], kinds: Mapping[str, int], peak_bytes: int) -> RankBytes:
        """From the bytes by kind of its stage, and all that it holds."""
        states = sum(kinds.get(kind, 0) for kind in _STATES)
        return cls(*run, states, peak_bytes - states)


def cuts_within(
    work: BlockWork,
    shape: PipelineShape,
    turn: Turn,
    known: Mapping[int, RankBytes],
    limit: int,
    *,
    recompute: float,
    refused: Mapping[int, tuple[int, int]] | None = None,
) -> tuple[float, tuple[str, ...]] | None:
    """About the seconds of a pipeline whose ranks fit a limit, and its cuts; None without such.

    Args:
        work: of the blocks.
        shape: of the pipeline, with one stage a rank.
        turn: least seconds of the blocks.
        known: what some ranks hold.
        limit: bytes per device.
        recompute: share of what ranks hold beside their states that recomputation can free.
        refused: of some ranks, a run of blocks (first, end) that they cannot hold all the same.
    """
    parameters, saved = _runs(work.parameter_bytes), _runs(work.saved_bytes)
    orders = actions(shape.schedule, shape.size, shape.microbatches)
    flying = [flight.microbatches for flight in flights(orders)]
    over: list[Array] = []
    for rank, waiting in enumerate(flying):
        near = min(known, key=lambda q: (abs(q - rank), q))
        q = known[near]
        states = q.states * _share(parameters, q)
        others = q.others * _share(saved, q) * waiting / flying[near]
        total = states + others
        again = np.where(total > limit, np.inf, 0.0)
        if recompute:
            again = np.maximum(0.0, total - limit) / np.maximum(recompute * others, 1.0)
            again[again > 1] = np.inf
        if refused is not None and rank in refused:
            again[total >= total[refused[rank]]] = np.inf
        over.append(again)
    found = cuts_that_fit(work, shape, turn, over)
    if found is None:
        return None
    seconds, starts = found
    return seconds, tuple(work.names[i] for i in starts)


def _runs(numbers: Array) -> Array:
    total = np.concatenate([[0.0], np.cumsum(numbers)])
    return np.maximum(0.0, total[None, :] - total[:, None])


def _share(runs: Array, known: RankBytes) -> Array:
    """Of all runs, how many times that of a known rank."""
    own = float(runs[known.first, known.end])
    return runs / own if own else np.ones_like(runs)
