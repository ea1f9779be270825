"""Seconds and bytes of a training step from the costs of its parts.

A model is blocks between a front (embedding) and a back (head and loss). With d data ranks, p
pipeline ranks of v chunks and m microbatches a step is

    schedule of the stages' passes, gradients reduced over the data ranks, update

ZeRO-3 (FSDP) gathers each block before each pass and scatters its gradients behind its backward,
on a communication stream beside the compute of the neighbouring block::

    forward   gather_1 + sum max(F_i, gather_{i+1})
    backward  sum max(R_i + B_i, gather_{i-1} + scatter_{i+1}) + scatter_1

(Zhao et al. 2023, arXiv 2304.11277.) Stages 1 and 2 scatter gradients and gather parameters once.

Without ZeRO-3 each microbatch's gradients are added to those before: a kernel for each parameter,
which the host issues too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.core.schedule import Action, Kind, actions
from autopar.cost_model.cluster import Cluster
from autopar.cost_model.collectives import CollectiveKind
from autopar.cost_model.compute import OpCost, compute_seconds
from autopar.cost_model.pipeline import PipelineSimulation, simulate_pipeline
from benchmarks.contention import beside_s
from benchmarks.segments import PassCost, SegmentCost

__all__ = ["Layers", "Recipe", "StepCost", "step_cost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a step is organised.

    Attributes:
        data: ranks that share a batch; pipeline: pipeline ranks.
        chunks: stages of a pipeline rank.
        microbatches: of each data rank.
        schedule: of `core.schedule`; for one pipeline rank "1f1b".
        zero: ZeRO stage over the data ranks.
        parameter_bytes: of one parameter where it is gathered; gradient_bytes: where it is reduced.
        state_bytes: of one parameter with its gradient, masters and optimizer states.
        added: share of the microbatches whose gradients are added to earlier ones by ops of their
            own, one for each parameter; added_bytes: of a parameter that such an op reads and
            writes; added_s: host seconds of one.
        overlap: data-parallel communication runs beside compute.
        blocking: a rank waits for what it sends to the next stage.
    """

    data: int = 1
    pipeline: int = 1
    chunks: int = 1
    microbatches: int = 1
    schedule: str = "1f1b"
    zero: int = 0
    parameter_bytes: int = 2
    gradient_bytes: int = 4
    state_bytes: int = 16
    added: float = 0.0
    added_bytes: int = 6
    added_s: float = 0.0
    overlap: bool = True
    blocking: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """A model on one tensor-parallel group.

    Attributes:
        count: blocks.
        block: the costs of a block; several that take turns in equal shares.
        front, back: what stands around them.
        block_parameters, front_parameters, back_parameters: on one device, before ZeRO.
        block_tensors, front_tensors, back_tensors: that these parameters are in.
        boundary_bytes: of what a block hands to the next on one device.
        tied: front and back share a weight of `front_parameters`.
    """

    count: int
    block: tuple[SegmentCost, ...]
    front: SegmentCost
    back: SegmentCost
    block_parameters: int
    front_parameters: int
    back_parameters: int
    block_tensors: int = 0
    front_tensors: int = 0
    back_tensors: int = 0
    boundary_bytes: float
    tied: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """A step.

    Attributes:
        step_s: all of it.
        pipeline: the simulated schedule.
        data_s: exposed data-parallel communication.
        optimizer_s: the update.
        peak_bytes: of the fullest device.
        state_bytes, activation_bytes: its parts; the rest is working memory.
    """

    step_s: float
    pipeline: PipelineSimulation
    data_s: float
    optimizer_s: float
    peak_bytes: float
    state_bytes: float
    activation_bytes: float


def step_cost(layers: Layers, recipe: Recipe, cluster: Cluster) -> StepCost:
    """Price a step.

    Args:
        layers: costs of the parts.
        recipe: how they are put together.
        cluster: with a mesh (pipeline, data, inner): `inner` ranks share a stage's tensors.
    """
    stages = _Stages(layers, recipe, cluster)
    orders = actions(recipe.schedule, recipe.pipeline, recipe.microbatches, recipe.chunks)
    simulated = simulate_pipeline(
        orders, stages.seconds(), stages.transfer_s(), blocking=recipe.blocking
    )
    data = [stages.data_s(rank) for rank in range(recipe.pipeline)]
    update = [stages.update_s(rank) for rank in range(recipe.pipeline)]
    tied = stages.tied_s() if layers.tied and recipe.pipeline > 1 else 0.0
    ends = [end + more for end, more in zip(simulated.finish_s(), data, strict=True)]
    last = max(range(recipe.pipeline), key=lambda r: ends[r] + update[r])
    memory = [stages.memory(rank, orders[rank]) for rank in range(recipe.pipeline)]
    fullest = max(memory, key=sum)
    return StepCost(
        step_s=ends[last] + update[last] + tied,
        pipeline=simulated,
        data_s=data[last],
        optimizer_s=update[last],
        peak_bytes=sum(fullest),
        state_bytes=fullest[0],
        activation_bytes=fullest[1],
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """What a stage runs `times` times, with its parameters on one device and their tensors."""

    cost: SegmentCost
    parameters: int
    tensors: int
    times: float


class _Stages:
    def __init__(self, layers: Layers, recipe: Recipe, cluster: Cluster) -> None:
        self.layers, self.recipe, self.cluster = layers, recipe, cluster
        self.num_stages = recipe.pipeline * recipe.chunks
        share, rest = divmod(layers.count, self.num_stages)
        self.counts = [share + (s < rest) for s in range(self.num_stages)]
        self.gathers = recipe.zero == 3 and recipe.data > 1

    def _data(self, kind: CollectiveKind, num_bytes: float) -> float:
        return self.cluster.collective_seconds(kind, num_bytes, 1)

    def seconds(self) -> list[dict[Kind, float]]:
        """Of each stage, by kind of action, for one microbatch."""
        found: list[dict[Kind, float]] = []
        for stage in range(self.num_stages):
            backward_s = self._pass(stage, True)
            weight_s = sum(part.cost.weight_s * part.times for part in self._parts(stage))
            found.append(
                {
                    "F": self._pass(stage, False),
                    "B": backward_s,
                    "I": backward_s - weight_s,
                    "W": weight_s,
                }
            )
        return found

    def _parts(self, stage: int) -> list[_Part]:
        layers = self.layers
        found = []
        if stage == 0:
            found.append(_Part(layers.front, layers.front_parameters, layers.front_tensors, 1.0))
        each = self.counts[stage] / len(layers.block)
        found += [
            _Part(block, layers.block_parameters, layers.block_tensors, each)
            for block in layers.block
        ]
        if stage == self.num_stages - 1:
            found.append(_Part(layers.back, layers.back_parameters, layers.back_tensors, 1.0))
        return found

    def _added(self, part: _Part) -> PassCost:
        """Adding a microbatch's gradients to those before."""
        recipe = self.recipe
        if self.gathers or not part.tensors:
            return PassCost()
        moved = recipe.added_bytes * part.parameters / part.tensors
        once = PassCost(device_s=self._memory_s(moved), host_s=recipe.added_s)
        return once.scaled(part.tensors * recipe.added)

    def _pass(self, stage: int, backward: bool) -> float:
        total = 0.0
        first_s = 0.0
        for part in self._parts(stage):
            cost, parameters = part.cost, part.parameters
            run = cost.forward
            if backward:
                run = cost.recompute + cost.backward + self._added(part)
            each = run.seconds
            if self.gathers and self.recipe.pipeline == 1:
                hidden = self._data(
                    CollectiveKind.ALL_GATHER, parameters * self.recipe.parameter_bytes
                )
                if backward:
                    hidden += self._scatter(parameters)
                first_s = first_s or hidden
                each += self._copies(parameters, backward)
                both_s = beside_s(self.cluster.device, each, hidden)
                each = both_s if self.recipe.overlap else each + hidden
            total += each * part.times
        return total + (first_s if self.recipe.overlap else 0.0)

    def _copies(self, parameters: float, backward: bool) -> float:
        """Gathered shards are copied into parameters, and gradients into what is scattered."""
        recipe = self.recipe
        moved = 2.0 * recipe.parameter_bytes
        if backward:
            moved += recipe.parameter_bytes + recipe.gradient_bytes
        return self._memory_s(moved * parameters)

    def _memory_s(self, num_bytes: float) -> float:
        cost = OpCost(op_class="memory", flops=0, bytes=round(num_bytes), dtype="float32")
        return compute_seconds(self.cluster, cost)

    def _scatter(self, parameters: float) -> float:
        return self._data(CollectiveKind.REDUCE_SCATTER, parameters * self.recipe.gradient_bytes)

    def transfer_s(self) -> float:
        """Between neighbouring pipeline ranks."""
        if self.recipe.pipeline == 1:
            return 0.0
        return self.cluster.collective_seconds(
            CollectiveKind.SEND_RECV, self.layers.boundary_bytes, 0
        )

    def _stages_of(self, rank: int) -> range:
        return range(rank, self.num_stages, self.recipe.pipeline)

    def parameters(self, rank: int) -> float:
        """On one device of a pipeline rank, before ZeRO."""
        layers = self.layers
        total = float(sum(self.counts[s] for s in self._stages_of(rank)) * layers.block_parameters)
        if rank == 0:
            total += layers.front_parameters
        if rank == self.recipe.pipeline - 1 and not (layers.tied and rank == 0):
            total += layers.back_parameters
        return total

    def data_s(self, rank: int) -> float:
        """Data-parallel communication that no compute hides, behind the schedule."""
        recipe = self.recipe
        if recipe.data == 1 or (self.gathers and recipe.pipeline == 1):
            return 0.0
        count = self.parameters(rank)
        if recipe.zero == 0:
            seconds = self._data(CollectiveKind.ALL_REDUCE, count * recipe.gradient_bytes)
        else:
            seconds = self._scatter(count)
            seconds += self._data(CollectiveKind.ALL_GATHER, count * recipe.parameter_bytes)
        if not recipe.overlap:
            return seconds
        # the gradients of all but one block are on their way while the last microbatch runs back
        stage = self._stages_of(rank)[0]
        blocks = max(1, self.counts[stage])
        beside = self._pass(stage, True) * (1 - 1 / blocks)
        return max(seconds / blocks, seconds - beside)

    def tied_s(self) -> float:
        """The sum of a shared weight's two gradients, between first and last pipeline rank."""
        num_bytes = self.layers.front_parameters * self.recipe.gradient_bytes
        ends = replace(self.cluster, mesh_shape=(2, *self.cluster.mesh_shape[1:]))
        return ends.collective_seconds(CollectiveKind.ALL_REDUCE, num_bytes, 0)

    def update_s(self, rank: int) -> float:
        """The optimizer: every byte of state is read and most are written."""
        count = self.parameters(rank) / (self.recipe.data if self.recipe.zero else 1)
        return self._memory_s(1.8 * count * self.recipe.state_bytes)

    def memory(self, rank: int, order: Sequence[Action]) -> tuple[float, float, float]:
        """Bytes of states, of kept activations, and of what the fullest moment works on."""
        recipe, layers = self.recipe, self.layers
        count = self.parameters(rank)
        states = count * recipe.state_bytes
        working = 0.0
        if recipe.zero and recipe.data > 1:
            whole = {1: recipe.parameter_bytes + recipe.gradient_bytes, 2: recipe.parameter_bytes}
            kept = whole.get(recipe.zero, 0)
            states = count * (kept + (recipe.state_bytes - kept) / recipe.data)
            if recipe.zero == 3:  # two blocks gathered, one whole gradient
                largest = max(layers.block_parameters, layers.back_parameters)
                working += largest * (2 * recipe.parameter_bytes + recipe.gradient_bytes)
        saved = {
            stage: sum(p.cost.saved_bytes * p.times for p in self._parts(stage))
            for stage in self._stages_of(rank)
        }
        activations = live = 0.0
        for action in order:
            if action.kind != "I":
                live += saved[action.stage] * (1 if action.kind == "F" else -1)
                activations = max(activations, live)
        most = max(block.working_bytes + block.again_bytes for block in layers.block)
        if rank == recipe.pipeline - 1:
            most = max(most, layers.back.working_bytes)
        return states, activations, working + most
