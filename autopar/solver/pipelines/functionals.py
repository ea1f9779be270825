"""Sums of the parts of a step of which bounds are found (`floor.py`)."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Weights", "functionals", "left_out"]

_LITTLE = 0.125  # of what runs once, what turns count that may take longer for it


class Weights(NamedTuple):
    """What a second of each part of a step counts.

    Attributes:
        prepare: of what runs once, in front of the turns.
        forward: of turns.
        inputs: of their backwards, up to what goes to the block before.
        weights: of the rest of them.
        finish: of what runs once, behind the turns: gradients.
        update: of the optimizer, once all ranks are done.
    """

    prepare: float
    forward: float
    inputs: float
    weights: float
    finish: float
    update: float


def left_out(microbatches: int, ahead: int) -> int:
    """Forwards that "after" and "first" leave out.

    Args:
        microbatches: of a step.
        ahead: forwards that a rank may begin ahead of its first gradient; the first one counts.
    """
    return max(1, min(ahead, microbatches) - 1)


def functionals(microbatches: int, ahead: int) -> dict[str, Weights]:
    """What is bounded of each block, by name; arguments as for `left_out`."""
    late, once = 1 - left_out(microbatches, ahead) / microbatches, 1 / microbatches
    return {
        "step": Weights(1, 1, 1, 1, 1, 1),
        "end": Weights(0, 1, 1, 1, 1, 1),
        "after": Weights(0, late, 1, 1, 1, 1),
        "first": Weights(1, late, 1, 1, 1, 1),
        "forward": Weights(0, 1, 0, 0, 0, 0),
        "inputs": Weights(0, 0, 1, 0, 0, 0),
        "weights": Weights(0, 0, 0, 1, 0, 0),
        "onward": Weights(0, 1, 1, 0, 0, 0),
        "turns": Weights(0, 1, 1, 1, 0, 0),
        "one turn": Weights(1, once, once, once, 1, 1),
        "reduced": Weights(0, 1, 1, 1, 1, 0),
        "soon": Weights(1, _LITTLE, _LITTLE, _LITTLE, _LITTLE, 1),
    }
