"""`run_stages`: a step of all stages of a pipeline and all their ranks, in one process."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from autopar.codegen.stage_program import TURN, StageProgram, emit_stage
from autopar.core.graph import TracedModel
from autopar.core.placement import Layout
from autopar.core.plan import PipelinePlan
from autopar.core.schedule import split_stages
from autopar.runtime.lockstep import Strided, mesh_coords, run_lockstep
from autopar.runtime.shards import assemble, take_shard
from autopar.runtime.stage_values import Run, StageValues, microbatch_inputs, stages_at_turns

__all__ = ["run_stages"]


def run_stages(
    traced: TracedModel,
    pipeline: PipelinePlan,
    whole: Mapping[str, Tensor],
    *,
    passes: Collection[str] | None = None,
    fusion: Any = None,
) -> dict[tuple[str, str], Tensor]:
    """Run a step of all stages and their ranks in this process, one microbatch after the other.

    Args:
        traced: the step on the whole batch.
        pipeline: of the plan.
        whole: value of every placeholder.
        passes, fusion: of the stages' programs, as for `emit_stage`.

    Returns:
        The loss, gradients and updated buffers, by kind and target.
    """
    return _AllStages(traced, pipeline, whole, passes, fusion).run()


class _AllStages:
    def __init__(
        self,
        traced: TracedModel,
        pipeline: PipelinePlan,
        whole: Mapping[str, Tensor],
        passes: Collection[str] | None,
        fusion: Any,
    ) -> None:
        self.pipeline = pipeline
        self.whole = whole
        turns = stages_at_turns(traced, pipeline)
        self.micro = turns[0].microbatch
        self.transfers = turns[0].stages.transfers
        self.mesh = pipeline.stages[0].mesh_shape
        self.coords = mesh_coords(self.mesh)
        self.programs = [
            [
                emit_stage(
                    [t.stages.models[s] for t in turns], plan, coords, passes=passes, fusion=fusion
                )
                for coords in self.coords
            ]
            for s, plan in enumerate(pipeline.stages)
        ]
        self.values = [StageValues(p[0], self._runner(p)) for p in self.programs]
        self.results: dict[tuple[str, str], Tensor] = {}
        self.splits = bool(split_stages(pipeline.actions()))

    def _runner(self, programs: Sequence[StageProgram]) -> Run:
        def run(part: str, operands: list[Any]) -> Sequence[Any]:
            results = run_lockstep(
                [p.parts[part].module.graph for p in programs],
                [
                    [None if value is None else value[rank] for value in operands]
                    for rank in range(len(programs))
                ],
                self.mesh,
            )
            return list(zip(*results, strict=True))

        return run

    def run(self) -> dict[tuple[str, str], Tensor]:
        reads = [self.whole[name] for name in self.micro.prologue_inputs]
        prologue = Strided(self.micro.prologue).run(*reads)
        self.sent: dict[tuple[int, str], Any] = {}
        for stage in range(len(self.values)):
            given = {
                spec.node: self._shares(self.whole[spec.node], layout)
                for spec, layout in self.programs[stage][0].inputs
                if spec.node in self.whole and spec.node not in self.micro.feeds
            }
            given.update(self._arriving(stage, "hoist"))
            self._leave(stage, self.values[stage].prepare(given))
        for turn in range(self.pipeline.microbatches):
            inputs = microbatch_inputs(
                self.micro, self.whole, prologue, turn, self.pipeline.microbatches
            )
            for stage in range(len(self.values)):
                given = self._inputs(stage, inputs) | self._arriving(stage, "forward")
                self._leave(stage, self.values[stage].forward(turn, given))
            for stage in reversed(range(len(self.values))):
                self._backward(stage, turn)
        for stage in reversed(range(len(self.values))):
            if "last" not in self.values[stage].program.parts:
                self._leave(stage, self.values[stage].finish())
        self._contributions()
        return self.results

    def _backward(self, stage: int, turn: int) -> None:
        given = self._arriving(stage, "backward")
        values = self.values[stage]
        part = "weight" if self.splits else "backward"
        if self.splits:
            self._leave(stage, values.backward(turn, given, "input"))
            given = {}
        if turn == self.pipeline.microbatches - 1 and "last" in values.program.parts:
            self._leave(stage, values.last(turn, given))
            self._leave(stage, values.wait())
        else:
            self._leave(stage, values.backward(turn, given, part))

    def _inputs(self, stage: int, inputs: Mapping[str, Any]) -> dict[str, Any]:
        found = {TURN: [inputs[TURN]] * len(self.coords)}
        for spec, layout in self.programs[stage][0].inputs:
            if spec.node in self.micro.feeds:
                found[spec.node] = self._shares(inputs[spec.node], layout)
        return found

    def _shares(self, value: Tensor, layout: Layout) -> list[Tensor]:
        return [take_shard(value, layout, self.mesh, coords) for coords in self.coords]

    def _arriving(self, stage: int, phase: str) -> dict[str, Any]:
        return {
            t.value: self.sent[t.source, t.value]
            for t in self.transfers
            if t.target == stage and t.phase == phase
        }

    def _leave(self, stage: int, written: Mapping[str, Any]) -> None:
        for spec, layout, name in self.programs[stage][0].outputs:
            if name not in written:
                continue
            if spec.kind == "sent":
                self.sent[stage, spec.target] = [x.contiguous() for x in written[name]]
                continue
            value = assemble(written[name], layout, self.mesh)
            key = (spec.kind, spec.target)
            known = self.results.get(key) if spec.kind == "output" else None
            self.results[key] = value if known is None else known + value

    def _contributions(self) -> None:
        for t in self.transfers:
            if t.phase == "finish":
                layout = self.pipeline.stages[t.target].parameters[t.value]
                value = assemble(self.sent[t.source, t.value], layout, self.mesh)
                known = self.results.get(("gradient", t.value))
                self.results["gradient", t.value] = value if known is None else known + value
