"""The layouts in which a step reads its inputs, and what they take in memory."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from autopar.core.placement import Layout, Placement, Replicate
from autopar.core.redistribute import path
from autopar.core.strategy import TensorSpec
from autopar.solver.candidates import Candidate
from autopar.solver.discrete.problem import Row
from autopar.solver.step import Step
from autopar.solver.step_problem import StepProblem

__all__ = ["input_bytes", "input_layouts"]

_FEW = 1e-2  # of the bytes of parameters: of the batch, less is counted whole


def input_layouts(
    step: Step, candidates: Mapping[str, Candidate], mesh_shape: tuple[int, ...]
) -> dict[str, Layout]:
    """Shard an input on an axis where every use of it wants that same shard.

    No use sends anything: the price counts none of it, each rank has the whole input. One that also
    leaves the step stays whole.
    """
    kept = _kept(step)
    wanted: dict[str, list[Layout]] = {}
    for value, op, index in step.consumers():
        if value[0] in step.inputs:
            layout = candidates[op.name].inputs[index]
            wanted.setdefault(value[0], []).append(layout)
    layouts: dict[str, Layout] = {}
    for name, spec in step.inputs.items():
        uses = wanted.get(name, [])
        layouts[name] = tuple(Replicate() for _ in mesh_shape)
        if spec.kind in ("input", "tangent") and name not in kept:
            layouts[name] = _shared(uses, mesh_shape)
    return layouts


def input_bytes(step: Step, built: StepProblem, mesh_shape: tuple[int, ...]) -> Row:
    """Bytes of the global batch, which the caller holds, and of the copy that is read.

    Of the copy of an input, the share that its first and last use agree on: that of all uses is no
    smaller. Copies are counted whole where they are small beside the parameters, and in steps in
    microbatches, which have one of the batch at most.
    """
    traced, kept, row = step.blocks.traced, _kept(step), Row()
    sizes = {
        name: TensorSpec(spec.shape, spec.dtype).num_bytes * step.blocks.copies(name)
        for name, spec in step.inputs.items()
    }
    row.constant = float(traced.batch_bytes + sum(sizes.values()))
    copied = {name: sizes[name] for name, spec in step.inputs.items() if spec.kind == "input"}
    if step.in_turns:
        row.constant += traced.flight.microbatches * sum(copied.values())
        return row
    parameters = sum(
        TensorSpec(spec.shape, spec.dtype).num_bytes * step.blocks.copies(name)
        for name, spec in step.parameters.items()
    )
    uses: dict[str, list[tuple[str, NDArray[np.bool_]]]] = {}
    for value, op, index in step.consumers() if sum(copied.values()) > _FEW * parameters else ():
        if value[0] in copied and value[0] not in kept:
            owner = built.classes[op.name]
            layouts = [candidate.inputs[index] for candidate in built.candidates[owner]]
            uses.setdefault(value[0], []).append((owner, np.array([_splits(x) for x in layouts])))
    for name, num_bytes in copied.items():
        if name not in uses:
            row.constant += num_bytes
            continue
        (first, here), (last, there) = uses[name][0], uses[name][-1]
        both = here[:, None, :] & there[None, :, :]
        factors = np.where(both, np.array(mesh_shape), 1).prod(axis=2)
        row.add_pair(first, last, num_bytes / factors)
    return row


def _splits(layout: Layout) -> list[bool]:
    """Axes on which an input may be held in shares."""
    return [p.is_shard and p.dim == 0 and p.split == 1 for p in layout]


def _kept(step: Step) -> set[str]:
    """Inputs that leave the step."""
    leaving = [*step.required, *step.gradients.values(), *(send.value for send in step.sends)]
    return {name for name, _ in leaving}


def _shared(uses: list[Layout], mesh_shape: tuple[int, ...]) -> Layout:
    """The common shards of all axes, without the last ones until each use is a slice of them.

    Where one use splits a dim on an outer axis too, its share is no part of an inner axis's.
    """
    layout = tuple(_common(uses, axis) for axis in range(len(mesh_shape)))
    for axis in reversed(range(len(mesh_shape))):
        if all(_is_slice(layout, use, mesh_shape) for use in uses):
            break
        layout = (*layout[:axis], Replicate(), *layout[axis + 1 :])
    return layout


def _is_slice(layout: Layout, use: Layout, mesh_shape: tuple[int, ...]) -> bool:
    moves = path(layout, use, mesh_shape)
    return moves is not None and all(move.kind == "slice" for move in moves)


def _common(uses: list[Layout], axis: int) -> Placement:
    found = {layout[axis] for layout in uses}
    if len(found) == 1:
        (placement,) = found
        if placement.is_shard and placement.dim == 0 and placement.split == 1:
            return placement
    return Replicate()
