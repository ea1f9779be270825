"""Where a process stands in a pipeline, and which parameters it holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autopar.core.plan import Plan
from autopar.errors import AutoparError

__all__ = ["PipelineMesh", "check_ascending", "own_plan"]


def check_ascending(ranks: Tensor) -> None:
    """Stop where the ranks of some axis of a mesh do not ascend.

    A process group sorts its ranks, so an all-gather along such an axis would join the parts of a
    tensor in another order than the mesh's.

    Raises:
        AutoparError: with the ranks of such an axis.
    """
    for axis in range(ranks.ndim):
        for line in ranks.movedim(axis, -1).reshape(-1, ranks.shape[axis]).tolist():
            if line != sorted(line):
                raise AutoparError(
                    f"ranks {line} stand behind each other on axis {axis} of the mesh "
                    f"{tuple(ranks.shape)}, and process groups sort them, so that parts of tensors "
                    "would be joined in the wrong order: make the mesh with "
                    "init_device_mesh(device_type, shape), or with ranks that ascend on each axis"
                )


@dataclass(frozen=True, slots=True)
class PipelineMesh:
    """The mesh of this rank's stages, and its line through all pipeline ranks.

    Attributes:
        stage: the mesh that layouts refer to.
        rank: of this process in the pipeline.
        groups: of the line, by way: "up" and "down" for forward values, "up" and "down" for
            backward ones.
        line: for broadcasts.
        places: ranks in these groups of the pipeline's ranks; a group sorts its processes, a mesh
            may have them in any order.
    """

    stage: DeviceMesh
    rank: int
    groups: Mapping[tuple[str, bool], dist.ProcessGroup]
    line: dist.ProcessGroup
    places: tuple[int, ...]

    @classmethod
    def over(cls, mesh: DeviceMesh, plan: Plan) -> PipelineMesh:
        """Cut the ranks of a mesh into those of the pipeline. Collective."""
        assert plan.pipeline is not None
        shape = (plan.pipeline.size, *plan.mesh_shape)
        ranks = mesh.mesh.reshape(shape)
        for stage in ranks:
            check_ascending(stage)
        names = ("pipeline", *(f"stage_{name}" for name in plan.axis_names))
        lines = [DeviceMesh(mesh.device_type, ranks, mesh_dim_names=names) for _ in range(4)]
        ways = [("forward", True), ("forward", False), ("backward", True), ("backward", False)]
        coordinate = lines[0].get_coordinate()
        assert coordinate is not None
        line = lines[0].get_group("pipeline")
        columns = ranks.flatten(1).T.tolist()
        (members,) = [members for members in columns if dist.get_rank() in members]
        return cls(
            stage=lines[0][names[1:]],
            rank=int(coordinate[0]),
            groups={way: line.get_group("pipeline") for way, line in zip(ways, lines, strict=True)},
            line=line,
            places=tuple(dist.get_group_rank(line, member) for member in members),
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
