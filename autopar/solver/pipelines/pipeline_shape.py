"""What is settled of a pipeline before its stages are planned: its mesh, its cuts, its least time.

With F_b, B_b and I_b the seconds of block b at each of m turns, of its forward, its backward, and
the part of that which the block before waits for; P_r and E_r what rank r does once in front of the
turns and behind them, and O_r all that it does in a step; and no more than one stage on a rank,

    step >= O_r
    step >= sum_(b before r) F_b + r * hop + O_r - P_r
    step >= P_0 + sum_(b before r) (F_b + B_b) + 2 r * hop + m * sum_(b on r) (F_b + B_b) + E_0
    step >= sum_b F_b + sum_(b behind r) I_b + (2p - 2 - r) * hop + O_r - P_r - k_r F_r
    step >= sum_(b on r or behind) F_b + sum_(b behind r) I_b + 2 (p - 1 - r) * hop + O_r - k_r F_r

as rank r waits for the first microbatch to come through the stages before it, as these have to work
on the last one behind it, and as it waits for the first one to come back from those behind it, when
it has run k_r forwards: min(m, p - r), of automatic orders min(m, 2 (p - r) - 1) at most. Where a
backward is split, I_b stands for B_b in the third, the weight gradients are added that rank r has
run by its last I (of automatic orders none), and the last one of the first rank. The third holds
only for the schedules of `core/schedule.py`, the last two only for 1F1B, zero-bubble and automatic
orders; with several stages on a rank there are the first three, of given cuts. A hop is the latency
of a transfer. What holds of automatic orders holds of 1F1B and zero-bubble.

Where a sum has several parts of what a rank does, one plan has to serve for all of them: they are
bounded together (`functionals`).

The bound is minimised over all cuts (`cuts.py`); for equal blocks it is the time of the schedule
itself (`core/schedule.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.core.list_schedule import most_ahead
from autopar.core.schedule import AUTOMATIC, SCHEDULES, actions
from autopar.errors import ConstraintError
from autopar.solver.discrete.problem import Array
from autopar.solver.pipelines.cuts import least_done
from autopar.solver.pipelines.step_lp import Line
from autopar.solver.pipelines.turn import Turn
from autopar.solver.pipelines.windows import between

__all__ = [
    "PipelineShape",
    "least_seconds",
    "line_of",
    "open_runs",
    "ranks_done",
    "round_trips",
    "stage_mesh",
]

_WHOLE_BACKWARD = ("gpipe", "1f1b", "interleaved")
_ONE_BY_ONE = ("1f1b", "zero-bubble")  # each rank begins with one forward less than the one before
_OPEN = 250  # runs of all ranks among which cuts are soon found
_ACTIONS = 6000  # of all ranks, among which the longest way is soon found
_NEAR = 1e-3  # of a limit, to which it is lowered for fewer


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineShape:
    """What is settled of a pipeline before its stages are planned; `cuts` None: balanced."""

    size: int
    microbatches: int
    schedule: str
    chunks: int = 1
    cuts: tuple[str, ...] | None = None

    @property
    def num_stages(self) -> int:
        return self.size * self.chunks

    def __str__(self) -> str:
        ranks = f"{self.size}×{self.chunks}" if self.chunks > 1 else f"{self.size}"
        turns = f"{self.microbatches} microbatch{'es' * (self.microbatches > 1)}"
        return f"{ranks} rank{'s' * (self.size > 1)}, {turns}"


def stage_mesh(mesh_shape: Sequence[int], size: int) -> tuple[int, ...]:
    """The mesh of one pipeline rank: the outer axes give their devices first.

    Raises:
        ConstraintError: the pipeline does not divide the devices.
    """
    left, shape = size, []
    for axis in mesh_shape:
        shared = math.gcd(axis, left)
        left //= shared
        shape.append(axis // shared)
    if left != 1:
        raise ConstraintError(
            f"a pipeline of {size} ranks does not divide the {math.prod(mesh_shape)} devices of "
            f"mesh {tuple(mesh_shape)}"
        )
    return tuple(n for n in shape if n > 1) or (1,)


def least_seconds(
    shape: PipelineShape,
    turn: Turn,
    hop_s: float,
    joint: Sequence[bool],
    starts: Sequence[int] | None = None,
) -> float:
    """Seconds that no pipeline of a shape can beat.

    Args:
        shape: of the pipeline.
        turn: lower bounds of the blocks.
        hop_s: latency of a transfer.
        joint: True for a block that must stay with the one before.
        starts: first blocks of all stages but the first; None: any, with one stage a rank.
    """
    if not len(turn.step):
        return 0.0  # a model without blocks
    if shape.chunks == 1:
        ranks, (back, tail) = ranks_done(shape, turn, hop_s), round_trips(shape, turn, hop_s)
        if starts is None:
            return least_done(ranks, back, tail, joint)
        runs = list(zip([0, *starts], [*starts, len(turn.step)], strict=True))
        found = [
            max(done[run], returned[run] + tail[runs[0][1]])
            for done, returned, run in zip(ranks, back, runs, strict=True)
        ]
        return float(max(found))
    assert starts is not None
    return _of_stages(shape, turn, hop_s, [0, *starts], [*starts, len(turn.step)])


def line_of(shape: PipelineShape, hop_s: float) -> Line:
    """What is known of the order in which the ranks of a shape work."""
    early = shape.schedule in (*_ONE_BY_ONE, AUTOMATIC) and shape.chunks == 1
    whole = shape.schedule in _WHOLE_BACKWARD
    few = 2 * shape.num_stages * shape.microbatches <= _ACTIONS
    given = (shape.schedule, shape.size, shape.microbatches, shape.chunks)
    return Line(
        ranks=shape.size,
        microbatches=shape.microbatches,
        transfer_s=[hop_s] * (shape.size - 1),
        chunks=shape.chunks,
        ahead=_early(shape) if early else None,
        whole=whole,
        orders=actions(*given) if whole and few and shape.chunks > 1 else (),
    )


def open_runs(
    shape: PipelineShape,
    turn: Turn,
    hop_s: float,
    joint: Sequence[bool],
    limit_s: float,
    starts: Sequence[int] | None = None,
) -> tuple[float, list[list[tuple[int, int]]]]:
    """Of each stage, the runs of blocks that it may hold in a step that takes less than a limit.

    Args:
        shape, turn, hop_s, joint, starts: as for `least_seconds`.
        limit_s: that each rank must be done before.

    Returns:
        The limit, or one below it with which not too many are open (0 if there is none), and the
        runs by their first blocks and those behind their last; none where there are no such cuts.
    """
    total = len(turn.step)
    if starts is not None:
        return limit_s, [[run] for run in zip([0, *starts], [*starts, total], strict=True)]
    ranks, (back, _) = ranks_done(shape, turn, hop_s), round_trips(shape, turn, hop_s)
    done = [np.maximum(*each) for each in zip(ranks, back, strict=True)]
    free = np.array([*(not j for j in joint), True])
    lower_s, found = 0.0, _open_below(done, free, limit_s)
    upper_s = limit_s
    while sum(int(each.sum()) for each in found) > _OPEN and upper_s - lower_s > _NEAR * limit_s:
        middle_s = (lower_s + upper_s) / 2
        fewer = _open_below(done, free, middle_s)
        if all(each.any() for each in fewer):
            upper_s, found = middle_s, fewer
        else:
            lower_s = middle_s  # no cuts take less
    if sum(int(each.sum()) for each in found) > _OPEN:
        return 0.0, [[] for _ in found]  # that takes too long
    runs = [[(int(i), int(j)) for i, j in zip(*each.nonzero(), strict=True)] for each in found]
    return upper_s, runs


def _open_below(
    done: Sequence[Array], free: NDArray[np.bool_], limit_s: float
) -> list[NDArray[np.bool_]]:
    """Of each rank, which runs it may hold for all ranks to be done before a limit."""
    total = len(free) - 1
    before, found = np.arange(total + 1) == 0, list[NDArray[np.bool_]]()
    for each in done:
        found.append((each < limit_s) & free & before[:, None])
        before = found[-1].any(axis=0)
    left = np.arange(total + 1) == total
    for r in reversed(range(len(found))):
        found[r] &= left
        left = found[r].any(axis=1)
    return found


def round_trips(shape: PipelineShape, turn: Turn, hop_s: float) -> tuple[list[Array], Array]:
    """When the first rank has the last gradient back from each other one, by the run of this.

    And what that adds to it which the first rank does, by the block behind its own run: of one
    turn, and of what runs once. Nothing is known of schedules of others.
    """
    total, m = len(turn.step) + 1, shape.microbatches
    nothing = np.full((total, total), -np.inf)
    if shape.schedule not in SCHEDULES:
        return [nothing] * shape.size, np.zeros(total)
    whole = shape.schedule in _WHOLE_BACKWARD
    turns, onward = turn.runs("turns"), turn.runs("onward")
    through = _before((turn.found["turns"] if whole else turn.found["onward"]) / m)
    found = [nothing]
    for r in range(1, shape.size):
        # weight gradients come as many turns late as there are ranks before (`core/schedule.py`)
        split = 0 if shape.schedule == AUTOMATIC else max(0, m - 1 - r)
        late = 1.0 if whole else split / m
        own = between(onward, turns, late)
        found.append(own + through[:, None] + 2 * r * hop_s)
    return found, _before(turn.found["one turn"]) - through


def ranks_done(shape: PipelineShape, turn: Turn, hop_s: float, own: bool = True) -> list[Array]:
    """When each rank is done at the soonest, by the run that it holds.

    Args:
        shape, turn, hop_s: as for `least_seconds`.
        own: also with what each does in front of the turns, instead of waiting.
    """
    size, ahead = shape.size, _before(turn.of_turn("forward"))
    runs = {name: turn.runs(name) for name in ("step", "end", "first", "after")}
    found = [runs["step"]]
    found += [
        np.maximum(found[0], runs["end"] + ahead[:, None] + r * hop_s) for r in range(1, size)
    ]
    if shape.schedule in (*_ONE_BY_ONE, AUTOMATIC):
        onward = _before(turn.found["onward"] / shape.microbatches)
        around = ahead[:, None] + onward[-1] - onward[None, :]
        for r, early in enumerate(_early(shape)):
            hops = (2 * size - 2 - r) * hop_s
            # of its own first forward both are bounded together
            prepared = around + hops + turn.without(runs, early - 1, prepared=True)
            found[r] = np.maximum(found[r], prepared)
            if own or not r:
                begun = around - ahead[:, None] + hops - r * hop_s
                left = begun + turn.without(runs, early - 1, prepared=False)
                found[r] = np.maximum(found[r], left)
    return found


def _early(shape: PipelineShape) -> Sequence[int]:
    """Forwards that each rank begins with at most, ahead of its first gradient."""
    if shape.schedule == AUTOMATIC:
        return most_ahead(shape.size, shape.microbatches)
    return [min(shape.microbatches, shape.size - r) for r in range(shape.size)]


def _before(seconds: Array) -> Array:
    return np.concatenate([[0.0], np.cumsum(seconds)])


def _of_stages(
    shape: PipelineShape, turn: Turn, hop_s: float, firsts: Sequence[int], ends: Sequence[int]
) -> float:
    """The first three bounds of given stages, several on a rank."""
    known, size, m = shape.schedule in SCHEDULES, shape.size, shape.microbatches

    def by_rank(name: str) -> Array:
        return turn.on_ranks(name, firsts, ends, size)

    found = by_rank("step")
    if known:  # another's schedule may begin with any stage
        ranks = np.arange(size)
        ahead = _before(turn.runs("forward")[firsts, ends] / m)[ranks] + ranks * hop_s
        found = np.maximum(found, ahead + by_rank("end"))
    if shape.schedule in _WHOLE_BACKWARD:
        both = turn.runs("turns")[firsts, ends] / m
        between = _before(both)[1:size] - both[0] + 2 * np.arange(1, size) * hop_s
        one_turn = turn.runs("one turn")[firsts, ends]
        around = one_turn[0] + between + by_rank("turns")[1:]
        found = np.append(found, around)
    return float(found.max())
