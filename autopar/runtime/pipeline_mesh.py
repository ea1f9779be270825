"""Where a process stands in a pipeline, and which parameters are there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.core.plan import Plan

__all__ = ["PipelineMesh", "own_plan"]


@dataclass(frozen=True, slots=True)
class PipelineMesh:
    """The mesh of this rank's stages, and its line through all pipeline ranks.

    Attributes:
        stage: the mesh that layouts refer to.
        rank: of this process in the pipeline.
        groups: of the line, by way: "up" and "down" for forward values, "up" and "down" for
            backward ones.
        line: for broadcasts.
    """

    stage: DeviceMesh
    rank: int
    groups: Mapping[tuple[str, bool], dist.ProcessGroup]
    line: dist.ProcessGroup

    @classmethod
    def over(cls, mesh: DeviceMesh, plan: Plan) -> PipelineMesh:
        """Cut the ranks of a mesh into those of the pipeline. Collective."""
        assert plan.pipeline is not None
        shape = (plan.pipeline.size, *plan.mesh_shape)
        ranks = mesh.mesh.reshape(shape)
        names = ("pipeline", *(f"stage_{name}" for name in plan.axis_names))
        lines = [DeviceMesh(mesh.device_type, ranks, mesh_dim_names=names) for _ in range(4)]
        ways = [("forward", True), ("forward", False), ("backward", True), ("backward", False)]
        coordinate = lines[0].get_coordinate()
        assert coordinate is not None
        return cls(
            stage=lines[0][names[1:]],
            rank=int(coordinate[0]),
            groups={way: line.get_group("pipeline") for way, line in zip(ways, lines, strict=True)},
            line=lines[0].get_group("pipeline"),
        )


def own_plan(plan: Plan, rank: int) -> Plan:
    """What a pipeline rank holds, as a plan: the parameters of its stages only."""
    assert plan.pipeline is not None
    held = {
        name: layout
        for stage in plan.pipeline.stages[rank :: plan.pipeline.size]
        for name, layout in stage.parameters.items()
    }
    return replace(plan, parameters=held)
