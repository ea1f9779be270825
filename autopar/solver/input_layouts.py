"""The layouts in which a step reads its inputs."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.core.placement import Layout, Placement, Replicate
from autopar.solver.candidates import Candidate
from autopar.solver.step import Step

__all__ = ["input_layouts"]


def input_layouts(
    step: Step, candidates: Mapping[str, Candidate], num_axes: int
) -> dict[str, Layout]:
    """Shard an input on an axis where every use of it wants that same shard."""
    wanted: dict[str, list[Layout]] = {}
    for value, op, index in step.consumers():
        if value[0] in step.inputs:
            layout = candidates[op.name].inputs[index]
            wanted.setdefault(value[0], []).append(layout)
    layouts: dict[str, Layout] = {}
    for name, spec in step.inputs.items():
        uses = wanted.get(name, [])
        layouts[name] = tuple(_common(uses, axis) for axis in range(num_axes))
        if spec.kind not in ("input", "tangent"):
            layouts[name] = tuple(Replicate() for _ in range(num_axes))
    return layouts


def _common(uses: list[Layout], axis: int) -> Placement:
    found = {layout[axis] for layout in uses}
    if len(found) == 1:
        (placement,) = found
        if placement.is_shard and placement.dim == 0 and placement.split == 1:
            return placement
    return Replicate()
