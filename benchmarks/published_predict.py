"""From a job to its predicted step: trace and plan two blocks, price them, put them together."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from autopar.core.constraints import Constraints
from autopar.core.placement import shard_factor
from autopar.core.plan import Plan
from autopar.cost_model import Cluster
from autopar.solver.solve import solve
from benchmarks.local_ops import LocalOp, LocalProgram
from benchmarks.local_program import local_program
from benchmarks.published_models import Shape
from benchmarks.published_rows import Job
from benchmarks.published_trace import Traces
from benchmarks.segments import Execution, SegmentCost, segment_cost
from benchmarks.step_cost import Layers

__all__ = ["Predictor", "constraints_of"]

_BLOCKS = 2  # the second is between a block and the head; a third would change nothing
_NO_LIMIT = 1 << 62
_CORE = ".core"


def constraints_of(
    tensor: int, context: int, sequence_parallel: bool, gpt: bool = False
) -> dict[str, Any]:
    """A row's tensor and context parallelism as constraints.

    Ranks that share a sequence hold whole weights: what shards them shards them over these ranks
    and data's together, and is priced with the step.
    """
    wanted: dict[str, Any] = {"checkpoint": "none"}
    if tensor > 1:
        wanted["tensor"] = {"mode": "1d", "size": tensor}
        wanted["sequence"] = "megatron" if sequence_parallel else "none"
        columns, rows = ("*.qkv.weight", "*.up.weight"), ("*.proj.weight", "*.down.weight")
        wanted["params"] = {**dict.fromkeys(columns, "S0"), **dict.fromkeys(rows, "S1")}
    if context > 1:
        wanted["sequence"] = {"mode": "ring", "size": context}
        wanted["params"] = {"*": "R"}
    if tensor > 1 and context > 1:
        split = ("*.qkv.*", "*.up.*", "tokens.weight", *(() if gpt else ("head.weight",)))
        whole = ("*norm*", *(("*.proj.bias", "*.down.bias", "positions.weight") if gpt else ()))
        wanted["params"] = {
            **dict.fromkeys(split, ("S0", "R")),
            **dict.fromkeys(rows, ("S1", "R")),
            **dict.fromkeys(whole, ("R", "R")),
        }
    return wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Some blocks and what stands around them, for one microbatch on one tensor-parallel group.

    Attributes:
        cluster: the ranks that share a stage's tensors, as one axis.
    """

    shape: Shape
    length: int
    micro_batch: int
    dtype: str
    tensor: int
    context: int
    sequence_parallel: bool
    cluster: Cluster


class Predictor:
    """Predicts jobs; what they have in common is traced, planned and priced once."""

    def __init__(self) -> None:
        self._traced = lru_cache(maxsize=None)(Traces().of)
        self._planned = lru_cache(maxsize=None)(self._plan)
        self._priced = lru_cache(maxsize=None)(self._price)

    def layers(self, job: Job) -> Layers:
        """The priced parts of a job."""
        part = Slice(
            shape=replace(job.shape, layers=_BLOCKS),
            length=job.length,
            micro_batch=job.micro_batch,
            dtype=job.dtype,
            tensor=job.tensor,
            context=job.context,
            sequence_parallel=job.sequence_parallel,
            cluster=_inner(job),
        )
        boundary = job.micro_batch * job.length * job.shape.hidden * 2 / job.context
        if job.sequence_parallel or job.scatter_boundary:
            boundary /= job.tensor
        priced = self._priced(part, job.policy, job.execution)
        return replace(priced, count=job.shape.layers, boundary_bytes=boundary)

    def _plan(self, part: Slice) -> tuple[LocalProgram, Plan]:
        traced = self._traced(part.shape, part.length, part.micro_batch, part.dtype)
        gpt = part.shape.kind == "gpt"
        wanted = constraints_of(part.tensor, part.context, part.sequence_parallel, gpt)
        # as if all were on one node: the plan's mesh has tensor ranks far apart, which they are not
        near = replace(part.cluster, devices_per_node=part.tensor * part.context)
        plan = solve(
            traced,
            near if part.context > 1 else part.cluster,
            constraints=Constraints.parse(wanted),
            memory_limit=_NO_LIMIT,
        )
        return local_program(traced, plan), plan

    def _price(self, part: Slice, policy: str, execution: Execution) -> Layers:
        program, plan = self._planned(part)
        # tensor ranks are next to each other, where the plan has those that share a sequence
        cluster = part.cluster.with_mesh_shape(plan.mesh_shape[::-1], plan.axis_names[::-1])
        block = program.block("layers", _BLOCKS // 2)
        front, back = program.around("layers")

        def cost(ops: tuple[LocalOp, ...], again: str) -> SegmentCost:
            names = _again(ops, again)
            inside = ops is block
            return segment_cost(
                program,
                ops,
                names,
                cluster,
                execution,
                float8=inside,
                calls=inside,
                axes=range(len(plan.mesh_shape))[::-1],
            )

        kinds = ("full", "none") if policy == "layer" else (policy,)
        parameters = _parameters(plan)
        tied = part.shape.kind == "gpt"
        return Layers(
            count=_BLOCKS,
            block=tuple(cost(block, kind) for kind in kinds),
            front=cost(front, "none"),
            back=cost(back, "none"),
            block_parameters=parameters["block"][0],
            front_parameters=parameters["front"][0],
            back_parameters=parameters["front" if tied else "back"][0],
            block_tensors=parameters["block"][1],
            front_tensors=parameters["front"][1],
            back_tensors=parameters["back"][1],
            boundary_bytes=0.0,
            tied=tied,
        )


def _again(ops: tuple[LocalOp, ...], policy: str) -> tuple[str, ...]:
    """Names of the forward ops that the backward computes again.

    "core" is attention alone (Korthikanti et al. 2022, arXiv 2205.05198); "op" keeps attention and
    every second linear, as torchtitan does.
    """
    forward = [op for op in ops if op.phase == "forward"]
    if policy == "full":
        return tuple(op.name for op in forward)
    if policy == "core":
        return tuple(op.name for op in forward if op.module.endswith(_CORE))
    if policy != "op":
        return ()
    linears = [op.name for op in forward if op.linear]
    kept = set(linears[::2])
    return tuple(
        op.name for op in forward if op.name not in kept and not op.op_class.startswith("attention")
    )


def _inner(job: Job) -> Cluster:
    """The ranks that share a stage's tensors."""
    inner = job.tensor * job.context
    per_node = min(job.cluster.devices_per_node, inner)
    return replace(
        job.cluster,
        devices_per_node=per_node,
        mesh_shape=(inner,),
        axis_names=("inner",),
    )


def _parameters(plan: Plan) -> dict[str, tuple[int, int]]:
    """Parameters on one device, and their tensors: of one block, in front and behind."""
    found = {"block": (0, 0), "front": (0, 0), "back": (0, 0)}
    for name, layout in plan.parameters.items():
        count = math.prod(plan.shapes[name]) // shard_factor(layout, plan.mesh_shape)
        part = "front" if name.startswith(("tokens", "positions")) else "back"
        if name.startswith("layers."):
            part = "block"
            if not name.startswith(f"layers.{_BLOCKS // 2}."):
                continue
        found[part] = found[part][0] + count, found[part][1] + 1
    return found
