"""Plans a step in microbatches over pipeline stages: cuts, each stage's own plan, the clock.

The step is split over the microbatches where the sharding rules allow it without communication
(`solver/microbatch.py`), cut into stages between blocks (`core/stages.py`), and each stage is
solved as any other step, on the mesh of one pipeline rank. A stage takes what it receives in the
layout that the stage before has settled. The schedule then runs on the clock
(`cost_model/pipeline.py`).
"""

from __future__ import annotations

import fnmatch
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from autopar.codegen.stages import Staged, staged
from autopar.core.constraints import Constraints, PipelinePin
from autopar.core.graph import TracedModel, node_info
from autopar.core.placement import Layout
from autopar.core.plan import NodePlan, PipelinePlan, Plan, SolverReport
from autopar.core.schedule import actions
from autopar.core.stages import block_order
from autopar.core.strategy import op_call
from autopar.cost_model import Cluster
from autopar.cost_model.stages import PipelinedTime, pipelined_time, transfer_seconds
from autopar.errors import AutoparError, ConstraintError, InfeasiblePlanError
from autopar.solver.candidates import Pricer, expand
from autopar.solver.microbatch import split_in_time
from autopar.solver.solve import solve

__all__ = ["PipelineShape", "plan_pipeline", "plan_step", "stage_mesh"]


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


def plan_step(
    traced: TracedModel,
    cluster: Cluster,
    *,
    constraints: Constraints,
    memory_limit: int | None = None,
    optimizer: object = "adamw",
) -> Plan:
    """The plan of a step: with a pipeline where one is pinned, the fastest that the pin allows.

    Args, Raises: as for `plan_pipeline`.
    """
    pin = constraints.pipeline
    if pin is None:
        return solve(
            traced,
            cluster,
            constraints=constraints,
            memory_limit=memory_limit,
            optimizer=optimizer,
        )
    best: Plan | None = None
    refused: AutoparError | None = None
    for shape in _shapes(pin, traced, cluster):
        try:
            found = plan_pipeline(
                traced,
                cluster,
                shape,
                constraints=constraints,
                memory_limit=memory_limit,
                optimizer=optimizer,
            )
        except (ConstraintError, InfeasiblePlanError) as error:
            refused = refused or error
            continue
        if best is None or found.predicted.step_time_s < best.predicted.step_time_s:
            best = found
    if best is None:
        assert refused is not None
        raise refused
    return best


_TURNS_PER_RANK = (1, 2, 4)  # microbatches for each pipeline rank, where they are not pinned


def _shapes(pin: PipelinePin, traced: TracedModel, cluster: Cluster) -> list[PipelineShape]:
    """The shapes that a pin leaves open, to be planned one by one."""
    devices = cluster.num_devices
    blocks = len(block_order(traced))
    sizes = [pin.size] if pin.size else [
        n for n in range(1, devices + 1) if devices % n == 0 and n <= max(blocks, 1)
    ]  # fmt: skip
    found: list[PipelineShape] = []
    for size in sizes:
        chunks = pin.chunks or (2 if pin.schedule == "interleaved" else 1)
        if pin.cuts is not None and pin.chunks is None:
            chunks = max(1, (len(pin.cuts) + 1) // size)
        schedule = pin.schedule or ("interleaved" if chunks > 1 else "1f1b")
        turns = [pin.microbatches] if pin.microbatches else [size * n for n in _TURNS_PER_RANK]
        found += [
            PipelineShape(
                size=size, microbatches=m, schedule=schedule, chunks=chunks, cuts=pin.cuts
            )
            for m in turns
        ]
    return found


def plan_pipeline(
    traced: TracedModel,
    cluster: Cluster,
    shape: PipelineShape,
    *,
    constraints: Constraints,
    memory_limit: int | None = None,
    optimizer: object = "adamw",
) -> Plan:
    """The plan of a step with a pipeline of a given shape.

    Args:
        traced: the step on the whole batch.
        cluster: all devices.
        shape: of the pipeline.
        constraints: what is pinned inside the stages.
        memory_limit: bytes per device; default: the device's memory.
        optimizer: whose states count in memory.

    Raises:
        ConstraintError: the model cannot be split or cut so.
        InfeasiblePlanError: a stage does not fit.
    """
    return _Pipeliner(traced, cluster, shape, constraints, memory_limit, optimizer).run()


class _Pipeliner:
    def __init__(
        self,
        traced: TracedModel,
        cluster: Cluster,
        shape: PipelineShape,
        constraints: Constraints,
        memory_limit: int | None,
        optimizer: object,
    ) -> None:
        self.traced = traced
        self.whole = cluster
        self.shape = shape
        self.constraints = constraints
        self.limit = cluster.memory_bytes if memory_limit is None else int(memory_limit)
        self.optimizer = optimizer
        mesh = stage_mesh(cluster.mesh_shape, shape.size)
        names = cluster.axis_names[-len(mesh) :]
        self.cluster = replace(cluster, mesh_shape=mesh, axis_names=names)

    def run(self) -> Plan:
        shape = self.shape
        orders = actions(shape.schedule, shape.size, shape.microbatches, shape.chunks)
        time = split_in_time(self.traced, self.cluster, shape.microbatches)
        cuts = shape.cuts if shape.cuts is not None else self._balanced()
        if len(cuts) + 1 != shape.num_stages:
            raise ConstraintError(
                f"pipeline cuts make {len(cuts) + 1} stages, size {shape.size} × chunks "
                f"{shape.chunks} are {shape.num_stages}"
            )
        parts = staged(
            self.traced,
            time,
            cuts,
            size=shape.size,
            microbatches=shape.microbatches,
            schedule=shape.schedule,
            chunks=shape.chunks,
        )
        plans = self._solve(parts)
        transfer_s = transfer_seconds(parts.stages.transfers, plans, self.cluster, shape.size)
        clock = pipelined_time(plans, orders, transfer_s, shape.microbatches)
        return self._assembled(time, cuts, plans, clock)

    # --- cuts ----------------------------------------------------------------------------------
    def _balanced(self) -> tuple[str, ...]:
        """Cuts that make the costliest stage as cheap as can be, by the blocks' own seconds."""
        count = self.shape.num_stages
        if count == 1:
            return ()
        order = block_order(self.traced)
        if len(order) < count:
            raise ConstraintError(
                f"a pipeline of {self.shape.size} ranks × {self.shape.chunks} chunks needs "
                f"{count} blocks, the model has {len(order)}"
            )
        single = replace(self.cluster, mesh_shape=(1,), axis_names=("device",))
        pricer = Pricer(single)
        blocks = {f"{b.container}.{b.number}": 0.0 for b in order}
        names, current = list(blocks), next(iter(blocks))
        for node in self.traced.graph.nodes:
            if not _is_op(node):
                continue
            module = node_info(self.traced, node).module
            inside = next((n for n in _prefixes(module) if n in blocks), None)
            forward = node_info(self.traced, node).phase == "forward"
            if inside is not None and forward:
                current = inside
            call = op_call(node, 1)
            # behind the blocks: what the head does in the backward follows it
            owner = inside or (current if forward else names[-1])
            blocks[owner] += float(pricer.compute(call, expand(call, (1,)))[0])
        return tuple(names[i] for i in _partition(list(blocks.values()), count))

    # --- stages --------------------------------------------------------------------------------
    def _solve(self, parts: Staged) -> list[Plan]:
        settled: dict[str, Layout] = {}
        plans: list[Plan] = []
        limit = self.limit // self.shape.chunks
        for number, model in enumerate(parts.stages.models):
            try:
                plan = solve(
                    model,
                    self.cluster,
                    constraints=self._inside(model),
                    memory_limit=limit,
                    optimizer=self.optimizer,
                    ports=settled,
                )
            except InfeasiblePlanError as error:
                raise InfeasiblePlanError(
                    f"pipeline stage {number} of {self.shape.num_stages}: {error}",
                    memory_limit_bytes=self.limit,
                    required_bytes=(error.required_bytes or 0) * self.shape.chunks,
                ) from error
            plans.append(plan)
            settled.update(_settled(model, plan))
        return plans

    def _inside(self, model: TracedModel) -> Constraints:
        """The constraints of a stage: those that speak of its parameters."""
        names = [s.target for s in model.parameters()]
        params = {
            glob: wanted
            for glob, wanted in self.constraints.params.items()
            if fnmatch.filter(names, glob)
        }
        return replace(self.constraints, pipeline=None, params=params)

    # --- the plan ------------------------------------------------------------------------------
    def _assembled(
        self,
        time: Mapping[str, NodePlan],
        cuts: tuple[str, ...],
        plans: Sequence[Plan],
        clock: PipelinedTime,
    ) -> Plan:
        shape, size = self.shape, self.shape.size
        step_s = clock.predicted.step_time_s
        slowest = max(plans, key=lambda p: p.predicted.step_time_s)
        bound = max(sum(p.solver.bound for p in plans[rank::size]) for rank in range(size))
        merged: dict[str, Layout] = {}
        for p in plans:
            merged.update(p.parameters)
        order = [s.target for s in self.traced.parameters()]
        return replace(
            slowest,
            fingerprint=self.traced.fingerprint(),
            nodes={},
            inputs={},
            parameters={name: merged[name] for name in order},
            shapes={k: v for p in plans for k, v in p.shapes.items()},
            dtypes={k: v for p in plans for k, v in p.dtypes.items()},
            modes={k: v for p in plans for k, v in p.modes.items()},
            constraints=self.constraints.to_dict(),
            memory_limit_bytes=self.limit,
            predicted=clock.predicted,
            solver=SolverReport(
                status="bounded" if size > 1 else slowest.solver.status,
                objective=step_s,
                bound=min(bound, step_s),
                gap=max(0.0, 1 - bound / step_s),
                seconds=sum(p.solver.seconds for p in plans),
                variables=sum(p.solver.variables for p in plans),
                constraints=sum(p.solver.constraints for p in plans),
            ),
            pipeline=PipelinePlan(
                size=size,
                chunks=shape.chunks,
                microbatches=shape.microbatches,
                schedule=shape.schedule,
                cuts=cuts,
                time=time,
                stages=tuple(plans),
                bubble=clock.bubble,
                slots=clock.slots,
            ),
        )


def _settled(model: TracedModel, plan: Plan) -> dict[str, Layout]:
    """Layouts of what goes over the cuts, by the port names of the stages that come later."""
    found: dict[str, Layout] = {}
    for spec in model.outputs:
        if spec.kind == "sent" and not spec.accumulated:
            found[spec.target] = plan.inputs[spec.port]
    for given in model.inputs:
        if given.kind == "received":
            found[f"port.{given.node}"] = plan.inputs[given.node]
    for name, layout in plan.parameters.items():
        found[f"port.gradient of {name}"] = layout
    return found


def _prefixes(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts) + 1)]


def _is_op(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is not operator.getitem


def _partition(costs: Sequence[float], count: int) -> list[int]:
    """Starts of all parts but the first, so that the costliest of `count` runs costs least."""
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    size = len(costs)
    best = [[math.inf] * (size + 1) for _ in range(count + 1)]
    start = [[0] * (size + 1) for _ in range(count + 1)]
    best[0][0] = 0.0
    for parts in range(1, count + 1):
        for end in range(parts, size + 1):
            for begin in range(parts - 1, end):
                worst = max(best[parts - 1][begin], total[end] - total[begin])
                if worst < best[parts][end]:
                    best[parts][end], start[parts][end] = worst, begin
    cuts: list[int] = []
    end = size
    for parts in range(count, 1, -1):
        end = start[parts][end]
        cuts.append(end)
    return cuts[::-1]
