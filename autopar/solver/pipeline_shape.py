"""What is settled of a pipeline before its stages are planned: its mesh and its cuts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.errors import ConstraintError
from autopar.solver.ideal import BlockWork

__all__ = ["PipelineShape", "balanced_cuts", "stage_mesh"]


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


def balanced_cuts(work: BlockWork, shape: PipelineShape) -> tuple[str, ...]:
    """Cuts that make the costliest stage as cheap as can be, by the blocks' own seconds.

    Raises:
        ConstraintError: there are fewer blocks than stages.
    """
    count, places = shape.num_stages, len(work.names) - sum(work.joint)
    if count == 1:
        return ()
    if places < count:
        together = "" if places == len(work.names) else f" in {places} groups that repeat"
        raise ConstraintError(
            f"a pipeline of {shape.size} ranks × {shape.chunks} chunks needs {count} blocks, the "
            f"model has {len(work.names)}{together}"
        )
    starts = _partition(work.whole(), count, work.joint)
    return tuple(work.names[i] for i in starts)


def _partition(costs: np.ndarray, count: int, joint: Sequence[bool]) -> list[int]:
    """Starts of all parts but the first, so that the costliest of `count` runs costs least.

    No part starts at an element that is `joint` with the one before.
    """
    total = np.concatenate([[0.0], np.cumsum(costs)])
    size = len(costs)
    allowed = np.array([*(not j for j in joint), True])
    run = np.where(
        (np.arange(size + 1)[:, None] < np.arange(size + 1)) & allowed[:, None],
        total[None, :] - total[:, None],
        np.inf,
    )
    best = np.where(np.arange(size + 1) == 0, 0.0, np.inf)
    choices: list[np.ndarray] = []
    for _ in range(count):
        worst = np.maximum(best[:, None], run)  # the last part from `begin` to `end`
        choices.append(worst.argmin(axis=0))
        best = worst.min(axis=0)
    starts: list[int] = []
    end = size
    for begin in reversed(choices[1:]):
        end = int(begin[end])
        starts.append(end)
    return starts[::-1]
