"""Where a pipeline is cut.

That is where its bound (`pipeline_shape.py`) is least, or where the longest stage is as short as
can be: the schedule runs on the clock with both. Of several stages on a rank the longest is made
short.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from autopar.core.list_schedule import RankLoad, list_schedule, most_ahead
from autopar.core.schedule import AUTOMATIC, Kind, actions
from autopar.cost_model.pipeline import simulate_pipeline
from autopar.errors import ConstraintError
from autopar.solver.discrete.problem import Array
from autopar.solver.pipelines.cuts import least_cuts, runs_of
from autopar.solver.pipelines.ideal import BlockWork
from autopar.solver.pipelines.pipeline_shape import PipelineShape, ranks_done, round_trips
from autopar.solver.pipelines.turn import Turn

__all__ = ["balanced_cuts", "cuts_that_fit", "expected_seconds"]

_EXCHANGES = 48  # cuts that are tried
_CLOCKED = 0.5  # patience of automatic orders, where those of many cuts are compared


def balanced_cuts(work: BlockWork, shape: PipelineShape, turn: Turn | None) -> tuple[str, ...]:
    """Cuts that make a pipeline fast, by the blocks' own seconds.

    Args:
        work: of the blocks.
        shape: of the pipeline.
        turn: seconds of the blocks on one of its ranks, where they are known.

    Raises:
        ConstraintError: there are fewer blocks than stages.
    """
    if shape.num_stages == 1:
        return ()
    seconds, starts = _balanced(work, shape, turn)
    if turn is not None and shape.chunks == 1:
        starts = _exchanged(work, shape, turn, seconds, starts)
    return tuple(work.names[i] for i in starts)


def _exchanged(
    work: BlockWork, shape: PipelineShape, turn: Turn, seconds: float, starts: Sequence[int]
) -> list[int]:
    """Cuts where unequal runs beside each other change places while the clock says less.

    Bounds of ranks tell little of which one of many is best to have a block more.
    """
    any_of, nothing = _any_schedule(shape, turn), [0.0] * shape.size
    lengths = np.diff([0, *starts, len(turn.step)]).tolist()
    tried, before = {tuple(lengths)}, math.inf
    while seconds < before:
        before = seconds
        for r in range(shape.size - 1):
            other = [*lengths[:r], lengths[r + 1], lengths[r], *lengths[r + 2 :]]
            ends = np.cumsum(other)[:-1].tolist()
            if tuple(other) in tried or any(work.joint[i] for i in ends):
                continue
            if len(tried) == _EXCHANGES:
                break
            tried.add(tuple(other))
            takes = _on_the_clock(any_of, turn, ends, nothing)
            if takes < seconds:
                seconds, lengths = takes, other
    return np.cumsum(lengths)[:-1].tolist()


def expected_seconds(work: BlockWork, shape: PipelineShape, turn: Turn) -> float:
    """About what a pipeline takes whose cuts are not pinned, with one stage a rank.

    Raises:
        ConstraintError: there are fewer blocks than stages.
    """
    return _balanced(work, shape, turn)[0] if work.names else 0.0


def _balanced(
    work: BlockWork, shape: PipelineShape, turn: Turn | None
) -> tuple[float, Sequence[int]]:
    """About the seconds of a pipeline (0 if they are not known), and its cuts."""
    count, places = shape.num_stages, len(work.names) - sum(work.joint)
    if places < count:
        together = "" if places == len(work.names) else f" in {places} groups that repeat"
        raise ConstraintError(
            f"a pipeline of {shape.size} ranks × {shape.chunks} chunks needs {count} blocks, the "
            f"model has {len(work.names)}{together}{_which(work.names)}"
        )
    if turn is None or shape.chunks > 1:
        short = runs_of(work.whole() if turn is None else turn.step)
        return 0.0, least_cuts([short] * count, short, work.joint)[1]
    found = cuts_that_fit(work, shape, turn, [np.zeros([len(turn.step) + 1] * 2)] * count)
    assert found is not None
    return found


def _which(names: Sequence[str]) -> str:
    """The few blocks that a model has, for a message."""
    if not names:
        return (
            ": no modules follow each other such that few values cross between them; call the "
            "parts that are to be stages one after the other, as submodules"
        )
    return f" ({', '.join(names[:8])}{', …' if len(names) > 8 else ''})"


def cuts_that_fit(
    work: BlockWork, shape: PipelineShape, turn: Turn, again: Sequence[Array]
) -> tuple[float, list[int]] | None:
    """About the seconds of a pipeline, and the first blocks of all its stages but the first.

    Args:
        work: of the blocks.
        shape: of the pipeline, with one stage a rank.
        turn: seconds of the blocks.
        again: of each rank, what share of each run's forwards is recomputed; infinite for a run
            that it cannot hold.

    Returns:
        None where no cuts suit all ranks.
    """
    any_of = _any_schedule(shape, turn)
    short = runs_of(turn.step)
    total = np.concatenate([[0.0], np.cumsum(turn.of_turn("forward"))])
    forward = np.maximum(0.0, total[None, :] - total[:, None])
    more = [
        np.multiply(a, shape.microbatches * forward, out=a.copy(), where=np.isfinite(a))
        for a in again
    ]
    found: list[tuple[float, list[int]]] = []
    trips, _ = round_trips(any_of, turn, 0.0)
    waiting = [
        [np.maximum(*x) for x in zip(ranks_done(any_of, turn, 0.0, own), trips, strict=True)]
        for own in (False, True)
    ]
    for ranks in ([short] * shape.size, *waiting):
        least, starts = least_cuts(
            [done + m for done, m in zip(ranks, more, strict=True)], short, work.joint
        )
        if math.isfinite(least):
            runs = zip([0, *starts], [*starts, len(turn.step)], strict=True)
            shares = [float(a[run]) for a, run in zip(again, runs, strict=True)]
            found.append((_on_the_clock(any_of, turn, starts, shares), starts))
    return min(found, default=None)


def _any_schedule(shape: PipelineShape, turn: Turn) -> PipelineShape:
    """The shape with the schedule that waits least, for which it may be exchanged: same stages."""
    schedule = "zero-bubble" if shape.microbatches >= shape.size else "1f1b"
    return replace(shape, schedule=AUTOMATIC if turn.ahead > shape.size else schedule)


def _on_the_clock(
    shape: PipelineShape, turn: Turn, starts: Sequence[int], again: Sequence[float]
) -> float:
    """About what a schedule takes with some cuts and shares of forwards that are recomputed."""
    parts = [*map(turn.of_turn, ("forward", "inputs", "backward")), turn.step]
    forward, inputs, backward, step = (
        np.array([x.sum() for x in np.split(part, starts)]) for part in parts
    )
    weights, recomputed = backward - inputs, np.array(again) * forward
    inputs, step = inputs + recomputed, step + recomputed * shape.microbatches
    stages = np.stack([forward, inputs, weights, step]).T.tolist()
    seconds: list[Mapping[Kind, float]] = [
        {"F": forward, "I": inputs, "W": weights, "B": inputs + weights}
        for forward, inputs, weights, _ in stages
    ]
    once = [max(0.0, s[3] - shape.microbatches * sum(s[:3])) / 2 for s in stages]
    ends: Sequence[float]
    if shape.schedule == AUTOMATIC:
        loads = [
            RankLoad(forward_s=f, input_s=i, weight_s=w, begin_s=begin_s)
            for (f, i, w, _), begin_s in zip(stages, once, strict=True)
        ]
        ahead, none = most_ahead(shape.size, shape.microbatches), [0.0] * (shape.size - 1)
        ends = list_schedule(
            loads, shape.microbatches, none, warmup=ahead, patience=_CLOCKED
        ).ends_s
    else:
        orders = actions(shape.schedule, shape.size, shape.microbatches)
        ends = simulate_pipeline(orders, seconds, begin_s=once).finish_s()
    return max(end + more for end, more in zip(ends, once, strict=True))
