"""One step of a rank's stages: values in and out of their parts, transfers, results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.codegen.stage_program import TURN
from autopar.core.graph import OutputSpec
from autopar.core.placement import Layout, local_shape
from autopar.core.schedule import Action
from autopar.core.transfers import Transfer
from autopar.runtime.lockstep import Strided
from autopar.runtime.shards import take_shard
from autopar.runtime.stage_values import StageValues, microbatch_inputs

if TYPE_CHECKING:
    from autopar.runtime.pipeline import PipelinedStep

__all__ = ["PARTS", "PipelineResult", "PipelineRun"]

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
        buffers: new values, by FQN; of the buffers that any stage writes.
    """

    outputs: dict[int, Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


class PipelineRun:
    """One execution.

    Args:
        step: what runs.
        whole: as for `PipelinedStep.run`.
    """

    def __init__(self, step: PipelinedStep, whole: Mapping[str, Any]) -> None:
        self.step = step
        self.mesh = step.mesh
        self.whole = whole
        self.plans = step.pipeline.stages
        self.shape = self.plans[0].mesh_shape
        self.values = {
            s: StageValues(program, self._runner(s)) for s, program in step.programs.items()
        }
        self.here: dict[tuple[Transfer, int], Tensor] = {}  # from a stage of this rank
        self.sending: dict[Action | None, list[tuple[Any, Tensor]]] = defaultdict(list)
        self.late: list[tuple[int, OutputSpec, Tensor]] = []  # sent when all stages are done
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
            self._share_buffers()
            for sender in list(self.sending):
                self._let_go(sender)
        return self.result

    def _act(self, action: Action, there: Sequence[Action]) -> None:
        """Run an action. `there`: what other ranks are known to have by then."""
        stage, turn = action.stage, action.microbatch
        values = self.values[stage]
        if action in self.step.closing:
            phase = "backward" if action.kind == "B" else ""
            written = values.last(turn, self._received(stage, phase, turn, there))
            self._leave(stage, written, turn, action)  # the stage before waits for that alone
            written.clear()
            written = values.wait()
        elif action.kind == "F":
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
        done = {action.stage for action in self.step.closing}
        for stage in sorted(self.values.keys() - done, reverse=True):
            self._leave(stage, self.values[stage].finish(), 0)
        self._send_all(self.late, 0, None)
        for stage in self.values:
            for name, value in self._arrived(stage, "finish", 0):
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
        sent: list[tuple[int, OutputSpec, Tensor]] = []
        for spec, _, name in self.step.programs[stage].outputs:
            if name not in written:
                continue
            value = written[name]
            if spec.kind == "sent":
                # sums are received behind all else: transfers of a group may run in order
                (self.late if spec.accumulated else sent).append((stage, spec, value))
            elif spec.kind == "gradient":
                result.gradients[spec.target] = value
            elif spec.kind == "buffer":
                result.buffers[spec.target] = value
            else:
                index = int(spec.target)
                known = result.outputs.get(index)
                result.outputs[index] = value if known is None else known + value
        self._send_all(sent, turn, action)

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

    def _send_all(
        self, values: Sequence[tuple[int, OutputSpec, Tensor]], turn: int, action: Action | None
    ) -> None:
        """Send values of stages in the order of their receivers, as NCCL looks at no tag."""
        found = [
            (t.target, index, t, value)
            for stage, spec, value in values
            for index, t in enumerate(self.step.transfers)
            if (t.source, t.value, t.phase == "finish") == (stage, spec.target, spec.accumulated)
        ]
        for _, _, transfer, value in sorted(found, key=lambda each: each[:2]):
            self._send(transfer, value, turn, action)

    def _send(self, t: Transfer, value: Tensor, turn: int, action: Action | None) -> None:
        """Send a value; it is held until its receiver is known to have it."""
        value = value.contiguous()  # as the graph of the receiver takes it to be
        if self._rank_of(t.target) == self.mesh.rank:
            self.here[t, turn] = value
            return
        work = dist.isend(
            value,
            group=self._group(t),
            group_dst=self.mesh.places[self._rank_of(t.target)],
            tag=self._tag(t, turn),
        )
        self.sending[action].append((work, value))

    def _arriving(self, stage: int, phase: str, turn: int) -> dict[str, Tensor]:
        """Values of a phase that other stages have sent to a stage."""
        return dict(self._arrived(stage, phase, turn))

    def _arrived(self, stage: int, phase: str, turn: int) -> list[tuple[str, Tensor]]:
        """The same by name: several stages may add to the gradient of one parameter."""
        found: list[tuple[str, Tensor]] = []
        waiting = []
        for t in self.step.transfers:
            if t.target != stage or t.phase != phase:
                continue
            if self._rank_of(t.source) == self.mesh.rank:
                found.append((t.value, self.here.pop((t, turn))))
                continue
            empty = self._empty(stage, t)
            found.append((t.value, empty))
            work = dist.irecv(
                empty,
                group=self._group(t),
                group_src=self.mesh.places[self._rank_of(t.source)],
                tag=self._tag(t, turn),
            )
            waiting.append(work)
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
        for index, (stage, like) in sorted(self.step.returned.items()):
            value = self.result.outputs.get(index)
            if value is None:
                value = torch.empty(like.shape, dtype=like.dtype, device=self.step.device)
            if self.step.pipeline.size > 1:
                value = value.contiguous()
                source = self.mesh.places[self._rank_of(stage)]
                dist.broadcast(value, group=self.mesh.line, group_src=source)
            self.result.outputs[index] = value

    def _share_buffers(self) -> None:
        """Every rank gets what any stage has updated, in one message from each rank that has.

        Other stages may read it in the next step, and whoever saves the state has any rank's.
        """
        if self.step.pipeline.size == 1:
            return
        found = self.result.buffers
        for rank, updated in sorted(self.step.updated.items()):
            sizes = [like.numel() * like.dtype.itemsize for _, like in updated]
            if rank == self.mesh.rank:
                parts = [found[name].to(like.dtype) for name, like in updated]
                message = torch.cat([p.reshape(-1).view(torch.uint8) for p in parts])
            else:
                message = torch.empty(sum(sizes), dtype=torch.uint8, device=self.step.device)
            dist.broadcast(message, group=self.mesh.line, group_src=self.mesh.places[rank])
            if rank == self.mesh.rank:
                continue
            for (name, like), part in zip(updated, message.split(sizes), strict=True):
                # a copy begins at an address that fits its dtype
                found[name] = part.clone().view(like.dtype).view(like.shape)
