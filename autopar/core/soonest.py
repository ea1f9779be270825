"""When the ranks of a pipeline can finish at the earliest, in any order of their work.

That is, in any which begins with no more forwards than ZB-H2 does (`most_ahead`).

With F, I and W the seconds of a rank's forward, input and weight gradient, one stage a rank and m
microbatches, a rank

- begins when it is ready and the first microbatch has come through the ranks before it, and does
  all of its work from then on;
- has run a few forwards at most when the first gradient comes back through the ranks behind it;
- has its last gradient when the rank behind it has done all of its forwards and input gradients,
  and the weight gradient of that is still to come;
- holds no more microbatches than its memory does, each until it has been through all ranks behind
  and come back.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.core.list_schedule import RankLoad, most_ahead

__all__ = ["forwards_ahead", "most_held", "rounds_of", "soonest"]


def most_held(load: RankLoad, microbatches: int) -> int:
    """Microbatches that a rank can hold at once; one is always let in."""
    if not load.waiting or microbatches * load.waiting <= load.budget:
        return microbatches
    return max(1, int(load.budget / load.waiting))


def forwards_ahead(loads: Sequence[RankLoad], microbatches: int) -> list[int]:
    """Forwards that each rank can begin ahead of its first gradient."""
    most = most_ahead(len(loads), microbatches)
    return [min(n, most_held(load, microbatches)) for n, load in zip(most, loads, strict=True)]


def rounds_of(load: RankLoad, microbatches: int) -> int:
    """How often microbatches must have come back to a rank before it can begin the last ones."""
    return 1 + (microbatches - 1) // most_held(load, microbatches)


def soonest(
    loads: Sequence[RankLoad], microbatches: int, transfer_s: Sequence[float]
) -> list[float]:
    """When each rank has done its last action at the soonest.

    Args:
        loads: of each rank.
        microbatches: of the step.
        transfer_s: over the boundary behind each rank but the last.
    """
    m, last, there_s = microbatches, len(loads) - 1, 0.0
    begun: list[float] = []
    for r, load in enumerate(loads):
        begun.append(max(there_s, load.begin_s))
        there_s = begun[r] + load.forward_s + (transfer_s[r] if r < last else 0.0)
    returns_s = there_s  # of the first gradient
    done_s = around_s = 0.0  # of the last gradient; a microbatch's way through the ranks behind
    ends: list[float] = []
    ahead = forwards_ahead(loads, m)
    for r in range(last, -1, -1):
        load, rounds = loads[r], rounds_of(loads[r], m)
        left_s = (m - ahead[r]) * load.forward_s
        inputs_s = max(
            begun[r] + m * (load.forward_s + load.input_s),
            returns_s + left_s + m * load.input_s,
            done_s + load.input_s,
            begun[r] + rounds * (load.forward_s + around_s + load.input_s),
        )
        turns_s = m * (load.input_s + load.weight_s)
        whole_s = begun[r] + m * load.forward_s + turns_s
        ends.append(max(whole_s, returns_s + left_s + turns_s, inputs_s + load.weight_s))
        if r:
            hop_s = transfer_s[r - 1]
            returns_s += load.input_s + hop_s
            done_s = inputs_s + hop_s
            around_s += load.forward_s + load.input_s + 2 * hop_s
    return ends[::-1]
