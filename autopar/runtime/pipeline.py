"""Runs a rank's stages in the order of a schedule, and sends what other stages need.

Every rank of a stage talks to the rank of the same coordinates in the stages beside it. Shapes come
from the plan, so nothing is negotiated. Sends are started at once, and waited for where the
schedule says that their receiver has them (`core/flights.py`); a receive is posted when its action
is next. Forward and backward values go over process groups of their own, and so do the two ways
along the line: on a device that runs the transfers of a group in order, no transfer then waits for
one that comes later in the schedule.
"""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.codegen.fusion import Fusion
from autopar.codegen.stages import Staged
from autopar.codegen.turns import TURN, TurnProgram, emit_turns
from autopar.core.flights import arrived
from autopar.core.graph import OutputSpec, TracedModel
from autopar.core.placement import Layout, local_shape
from autopar.core.plan import PipelinePlan, Plan
from autopar.core.schedule import Action, actions
from autopar.core.transfers import Transfer
from autopar.runtime.inductor import compile_parts
from autopar.runtime.pipeline_mesh import PipelineMesh, own_plan
from autopar.runtime.shards import take_shard
from autopar.runtime.stage_gradients import Line
from autopar.runtime.turns import StageValues, Strided, microbatch_inputs, stages_at_turns

__all__ = ["PARTS", "PipelineResult", "PipelinedStep"]

PARTS: dict[str, str] = {
    "P": "prepare",
    "F": "forward",
    "B": "backward",
    "I": "input",
    "W": "weight",
    "R": "finish",
}
"""Name of the part that each kind of action runs; P and R stand for what runs once."""


@dataclass(frozen=True, slots=True)
class PipelineResult:
    """What a step yields on one rank.

    Attributes:
        outputs: whole values, by index of the user output.
        gradients: local, in the storage layout, by FQN; of this rank's parameters.
        buffers: new values, by FQN; of the buffers that this rank's stages write.
    """

    outputs: dict[int, Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


class PipelinedStep:
    """A step in microbatches, with the programs of this rank's stages.

    Args:
        traced: the step on the whole batch.
        plan: with a pipeline.
        mesh: of this process.
        passes, fusion: of the programs, as for `emit_turns`.
        backend: "inductor" compiles each part of each program.

    Attributes:
        programs: by stage.
        compiled: what runs in place of parts as they were emitted, by stage and name.
    """

    def __init__(
        self,
        traced: TracedModel,
        plan: Plan,
        mesh: PipelineMesh,
        *,
        passes: Collection[str] | None = None,
        fusion: Fusion | None = None,
        backend: str = "eager",
    ) -> None:
        assert plan.pipeline is not None
        self.passes = passes
        self.fusion = fusion
        self.traced = traced
        self.plan = plan
        self.mesh = mesh
        self.pipeline: PipelinePlan = plan.pipeline
        turns = stages_at_turns(traced, self.pipeline)
        self.micro = turns[0].microbatch
        self.transfers = turns[0].stages.transfers
        p = self.pipeline
        orders = actions(p.schedule, p.size, p.microbatches, p.chunks)
        if not traced.training:
            orders = tuple(tuple(a for a in order if a.kind == "F") for order in orders)
        self.order = orders[mesh.rank]
        self.arrived = arrived(orders)[mesh.rank]
        self.device = torch.device(mesh.stage.device_type)
        coords = mesh.stage.get_coordinate()
        assert coords is not None
        self.coords = tuple(coords)
        self.programs = {s: self._emit(turns, s) for s in range(mesh.rank, len(p.stages), p.size)}
        self.results_at = {
            int(spec.target): (s, spec.node)
            for s, model in enumerate(turns[0].stages.models)
            for spec in model.outputs
            if spec.kind == "output" and spec.node is not None
        }
        self.shapes = {
            index: turns[0].stages.models[s].nodes()[name].meta["val"]
            for index, (s, name) in self.results_at.items()
        }
        self.compiled: Mapping[tuple[int, str], Callable[[list[Any]], Any]] = {}
        if backend == "inductor":
            self.compiled = compile_parts(self.programs, self._executed())

    def _executed(self) -> tuple[str, ...]:
        """Names of the parts that a step runs, in the order in which values flow."""
        kinds = {"P", *(action.kind for action in self.order)}
        kinds |= {"R"} if self.traced.training else set()
        return tuple(part for kind, part in PARTS.items() if kind in kinds)

    def warn_of_dropped_outputs(self) -> None:
        """Say what a training step does not return, where no one asked for microbatches."""
        kept = {None, str(self.traced.loss_index)}
        spec = [s for s in self.traced.outputs if s.kind == "output"]
        dropped = [s for s in spec if s.node is not None and s.target not in kept]
        if not dropped or not self.traced.training or self.plan.constraints.get("pipeline"):
            return
        tree = pytree.tree_unflatten(list(range(len(spec))), self.traced.out_spec)
        paths = {index: pytree.keystr(path) for path, index in pytree.tree_leaves_with_path(tree)}
        names = ", ".join(paths[int(s.target)] or "its output" for s in dropped)
        warnings.warn(
            f"the plan runs in {self.pipeline.microbatches} microbatches: a training step returns "
            f"the loss, and None in place of {names}. Pass constraints={{'pipeline': 'none'}} to "
            "autopar.parallelize to have them.",
            stacklevel=2,
        )

    def line(self) -> Line:
        """The ranks that hold the stages, for what counts the gradients of all."""
        reached = {spec.target for spec in self.traced.outputs if spec.kind == "gradient"}
        size = self.pipeline.size
        held = [own_plan(self.plan, rank).parameters.keys() for rank in range(size)]
        without = tuple(rank for rank in range(size) if not reached & held[rank])
        return Line(self.mesh.line, without)

    def part(self, stage: int, name: str) -> Callable[[list[Any]], Sequence[Any]]:
        """What runs a part: on a list of what it reads, which is emptied; yields what it writes."""
        found = self.compiled.get((stage, name))
        return self.programs[stage].parts[name].module if found is None else found

    def running(self, parts: Mapping[tuple[int, str], Callable[[list[Any]], Any]]) -> PipelinedStep:
        """The same step with other callables for its parts, by stage and name."""
        twin = copy.copy(self)
        twin.compiled = parts
        return twin

    def _emit(self, turns: Sequence[Staged], stage: int) -> TurnProgram:
        mesh = self.mesh.stage
        return emit_turns(
            [t.stages.models[stage] for t in turns],
            self.pipeline.stages[stage],
            self.coords,
            group_names=[mesh.get_group(i).group_name for i in range(mesh.ndim)],
            device=self.device,
            passes=self.passes,
            fusion=_of_stage(self.fusion, stage),
        )

    def run(self, whole: Mapping[str, Any]) -> PipelineResult:
        """One step.

        Args:
            whole: by placeholder of the step: local parameters of this rank's stages, and whole
                values of all else.
        """
        return _Run(self, whole).run()


class _Run:
    """One execution."""

    def __init__(self, step: PipelinedStep, whole: Mapping[str, Any]) -> None:
        self.step = step
        self.mesh = step.mesh
        self.whole = whole
        self.plans = step.pipeline.stages
        self.shape = self.plans[0].mesh_shape
        self.values = {
            s: StageValues(program, self._runner(s)) for s, program in step.programs.items()
        }
        self.here: dict[tuple[int, str, int], Tensor] = {}  # from a stage of this rank
        self.sending: dict[Action | None, list[tuple[Any, Tensor]]] = defaultdict(list)
        self.result = PipelineResult({}, {}, {})

    def _runner(self, stage: int) -> Any:
        def run(part: str, operands: list[Any]) -> Sequence[Any]:
            return self.step.part(stage, part)(operands)

        return run

    def run(self) -> PipelineResult:
        step = self.step
        with torch.no_grad():
            reads = [self.whole[name] for name in step.micro.prologue_inputs]
            self.prologue = Strided(step.micro.prologue).run(*reads)
            for stage, values in self.values.items():
                given = self._lasting(stage) | self._arriving(stage, "hoist", 0)
                self._leave(stage, values.prepare(given), 0)
            for action, there in zip(step.order, step.arrived, strict=True):
                self._act(action, there)
            if step.traced.training:
                self._finish()
            self._share_outputs()
            for sender in list(self.sending):
                self._let_go(sender)
        return self.result

    def _act(self, action: Action, there: Sequence[Action]) -> None:
        """Run an action. `there`: what other ranks are known to have by then."""
        stage, turn = action.stage, action.microbatch
        values = self.values[stage]
        if action.kind == "F":
            written = values.forward(turn, self._forward_inputs(stage, turn, there))
            if not self.step.traced.training:
                del values.turns[turn]
        elif action.kind == "W":
            written = values.backward(turn, self._received(stage, "", turn, there), "weight")
        else:
            part = PARTS[action.kind]
            written = values.backward(turn, self._received(stage, "backward", turn, there), part)
        self._leave(stage, written, turn, action)

    def _forward_inputs(self, stage: int, turn: int, there: Sequence[Action]) -> dict[str, Any]:
        return self._inputs(stage, turn) | self._received(stage, "forward", turn, there)

    def _received(
        self, stage: int, phase: str, turn: int, there: Sequence[Action]
    ) -> dict[str, Any]:
        """What arrives for an action; then what was sent and is known to have arrived goes."""
        found = self._arriving(stage, phase, turn)
        for action in there:
            self._let_go(action)
        return found

    def _let_go(self, action: Action | None) -> None:
        for work, _ in self.sending.pop(action, ()):
            work.wait()

    def _finish(self) -> None:
        """Reduce gradients; contributions to those of other stages' parameters go there."""
        for stage in sorted(self.values, reverse=True):
            self._leave(stage, self.values[stage].finish(), 0)
        for stage in self.values:
            for name, value in self._arriving(stage, "finish", 0).items():
                known = self.result.gradients.get(name)
                self.result.gradients[name] = value if known is None else known.add_(value)

    # --- values --------------------------------------------------------------------------------
    def _lasting(self, stage: int) -> dict[str, Any]:
        """This rank's share of what all microbatches read."""
        found: dict[str, Any] = {}
        for spec, layout in self.step.programs[stage].inputs:
            if spec.kind == "parameter":
                found[spec.node] = self.whole[spec.node]
            elif spec.kind not in ("input", "received"):
                found[spec.node] = self._local(self.whole[spec.node], layout)
        return found

    def _inputs(self, stage: int, turn: int) -> dict[str, Any]:
        step = self.step
        inputs = microbatch_inputs(
            step.micro, self.whole, self.prologue, turn, step.pipeline.microbatches
        )
        found: dict[str, Any] = {TURN: turn}
        for spec, layout in step.programs[stage].inputs:
            if spec.node in step.micro.feeds:
                found[spec.node] = self._local(inputs[spec.node], layout)
        return found

    def _local(self, value: Any, layout: Layout) -> Any:
        if all(p.is_replicate for p in layout):
            return value
        return take_shard(value, layout, self.shape, self.step.coords)

    def _leave(
        self, stage: int, written: Mapping[str, Any], turn: int, action: Action | None = None
    ) -> None:
        """Send, keep or return what a part wrote."""
        result = self.result
        for spec, _, name in self.step.programs[stage].outputs:
            if name not in written:
                continue
            value = written[name]
            if spec.kind == "sent":
                self._send(stage, spec, value, turn, action)
            elif spec.kind == "gradient":
                result.gradients[spec.target] = value
            elif spec.kind == "buffer":
                result.buffers[spec.target] = value
            else:
                index = int(spec.target)
                known = result.outputs.get(index)
                result.outputs[index] = value if known is None else known + value

    # --- transfers -----------------------------------------------------------------------------
    def _rank_of(self, stage: int) -> int:
        return stage % self.step.pipeline.size

    def _group(self, transfer: Transfer) -> dist.ProcessGroup:
        forward = transfer.phase in ("hoist", "forward")
        up = self._rank_of(transfer.target) > self._rank_of(transfer.source)
        return self.mesh.groups["forward" if forward else "backward", up]

    def _tag(self, transfer: Transfer, turn: int) -> int:
        index = self.step.transfers.index(transfer)
        return index * self.step.pipeline.microbatches + turn

    def _send(
        self, stage: int, spec: OutputSpec, value: Tensor, turn: int, action: Action | None
    ) -> None:
        """Send a value; it is held until its receiver is known to have it."""
        for t in self.step.transfers:
            if t.source != stage or t.value != spec.target:
                continue
            if (t.phase == "finish") != spec.accumulated:
                continue
            if self._rank_of(t.target) == self.mesh.rank:
                self.here[t.target, t.value, turn] = value
                continue
            value = value.contiguous()
            work = dist.isend(
                value,
                group=self._group(t),
                group_dst=self._rank_of(t.target),
                tag=self._tag(t, turn),
            )
            self.sending[action].append((work, value))

    def _arriving(self, stage: int, phase: str, turn: int) -> dict[str, Tensor]:
        """Values of a phase that other stages have sent to a stage."""
        found: dict[str, Tensor] = {}
        waiting = []
        for t in self.step.transfers:
            if t.target != stage or t.phase != phase:
                continue
            if self._rank_of(t.source) == self.mesh.rank:
                found[t.value] = self.here.pop((stage, t.value, turn))
                continue
            found[t.value] = self._empty(stage, t)
            waiting.append(
                dist.irecv(
                    found[t.value],
                    group=self._group(t),
                    group_src=self._rank_of(t.source),
                    tag=self._tag(t, turn),
                )
            )
        for work in waiting:
            assert work is not None
            work.wait()
        return found

    def _empty(self, stage: int, transfer: Transfer) -> Tensor:
        plan = self.plans[stage]
        layouts = plan.parameters if transfer.phase == "finish" else plan.inputs
        shape = local_shape(transfer.shape, layouts[transfer.value], self.shape)
        return torch.empty(shape, dtype=transfer.dtype, device=self.step.device)

    def _share_outputs(self) -> None:
        """Every rank gets the outputs from the rank that has them."""
        for index, (stage, _) in sorted(self.step.results_at.items()):
            like = self.step.shapes[index]
            value = self.result.outputs.get(index)
            if value is None:
                value = torch.empty(like.shape, dtype=like.dtype, device=self.step.device)
            if self.step.pipeline.size > 1:
                value = value.contiguous()
                dist.broadcast(value, group=self.mesh.line, group_src=self._rank_of(stage))
            self.result.outputs[index] = value


def _of_stage(fusion: Fusion | None, stage: int) -> Fusion | None:
    """The same fusion, with a folder for the sources of this stage's kernels."""
    if fusion is None or fusion.dump is None:
        return fusion
    return replace(fusion, dump=f"{fusion.dump}/stage{stage}")
