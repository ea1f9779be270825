"""The layouts in which a step reads its inputs."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.core.placement import Layout, Placement, Replicate
from autopar.core.redistribute import path
from autopar.solver.candidates import Candidate
from autopar.solver.step import Step

__all__ = ["input_layouts"]


def input_layouts(
    step: Step, candidates: Mapping[str, Candidate], mesh_shape: tuple[int, ...]
) -> dict[str, Layout]:
    """Shard an input on an axis where every use of it wants that same shard.

    No use sends anything: the price counts none of it, each rank has the whole input. One that also
    leaves the step stays whole.
    """
    leaving = [*step.required, *step.gradients.values(), *(send.value for send in step.sends)]
    kept = {name for name, _ in leaving}
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
