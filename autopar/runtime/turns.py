"""Values of a stage that runs microbatch by microbatch, and the stages of a plan in one process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autopar.codegen.accumulate import PREFIX
from autopar.codegen.microbatch import Microbatch
from autopar.codegen.stages import Staged, staged_as_planned
from autopar.codegen.turns import TURN, TurnProgram, emit_turns
from autopar.core.graph import TracedModel
from autopar.core.placement import Layout
from autopar.core.plan import PipelinePlan
from autopar.core.schedule import split_stages
from autopar.runtime.lockstep import mesh_coords, run_lockstep
from autopar.runtime.shards import assemble, take_shard

__all__ = ["StageValues", "Strided", "microbatch_inputs", "run_stages", "stages_at_turns"]

Run = Callable[[str, list[Any]], Sequence[Any]]

_TURNS = ("forward", "backward", "input", "weight", "finish")
_DEPENDENT_TURNS = 3  # the third checks that arguments grow by equal steps


class StageValues:
    """The values of one stage by name: of the whole step, and of each microbatch in flight.

    A value is held until its last reader has run; what a part only sends is not held here.

    Args:
        program: of the stage.
        run: executes a part on the values that it reads.
    """

    def __init__(self, program: TurnProgram, run: Run) -> None:
        self.program = program
        self.run = run
        self.lasting: dict[str, Any] = {}
        self.turns: dict[int, dict[str, Any]] = {}
        self.sums: dict[str, Any] = {}
        self.waiting: dict[str, Any] = {}

    def prepare(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Take the step's values, run what is hoisted; returns what it writes."""
        self.lasting.update(given)
        piece = self.program.parts["prepare"]
        return self._run("prepare", [self.lasting[n] for n in piece.reads], self.lasting, _TURNS)

    def forward(self, turn: int, given: dict[str, Any]) -> dict[str, Any]:
        """Run a microbatch's forward on what it alone reads; returns what it writes."""
        self.turns[turn] = given
        return self._turn("forward", given, ("backward",))

    def backward(self, turn: int, given: dict[str, Any], part: str = "backward") -> dict[str, Any]:
        """Run a microbatch's backward, or one of its two parts; gradients go to the sums."""
        values = self.turns[turn]
        values.update(given)
        del given  # what arrived goes with its last use
        written = self._turn(part, values, ("weight",) if part == "input" else ())
        for name in self.program.sums:
            if name in written:
                self.sums[name] = written.pop(name)
                values.pop(name, None)
        if part != "input":
            del self.turns[turn]
        return written

    def last(self, turn: int, given: dict[str, Any]) -> dict[str, Any]:
        """Run the last backward of all, or the second part of it, and begin what `finish` does."""
        values = {**self.lasting, **self.sums, **self.turns.pop(turn), **given}
        values.update((PREFIX + name, total) for name, total in self.sums.items())
        self.lasting, self.sums = {}, {}
        given.clear()
        operands = [
            values.get(n) if n.startswith(PREFIX) else values[n]
            for n in self.program.parts["close"].reads
        ]
        needed = self.program.parts["wait"].reads
        self.waiting = {name: values[name] for name in needed if name in values}
        values.clear()
        return self._run("close", operands, self.waiting, ("wait",))

    def wait(self) -> dict[str, Any]:
        """Wait for what `last` has begun; returns what that writes."""
        operands = [self.waiting[n] for n in self.program.parts["wait"].reads]
        self.waiting = {}
        return self._run("wait", operands, {}, ())

    def finish(self) -> dict[str, Any]:
        """Reduce the sums, each of which goes with its last use; returns what that writes."""
        values = {**self.lasting, **self.sums}
        self.lasting, self.sums = {}, {}
        operands = [values[n] for n in self.program.parts["finish"].reads]
        values.clear()
        return self._run("finish", operands, {}, ())

    def _turn(self, part: str, values: dict[str, Any], later: Sequence[str]) -> dict[str, Any]:
        operands = [self._read(n, values) for n in self.program.parts[part].reads]
        # what no later part of this microbatch reads goes with its last use
        needed = {name for p in later for name in self.program.parts[p].reads}
        for name in [n for n in values if n not in needed and n != TURN]:
            del values[name]
        return self._run(part, operands, values, later)

    def _read(self, name: str, values: Mapping[str, Any]) -> Any:
        if name.startswith(PREFIX):
            return self.sums.get(name.removeprefix(PREFIX))
        return values[name] if name in values else self.lasting[name]

    def _run(
        self, part: str, operands: list[Any], target: dict[str, Any], later: Sequence[str]
    ) -> dict[str, Any]:
        """Run a part; what later ones read is kept in `target`."""
        results = self.run(part, operands)
        written = dict(zip(self.program.parts[part].writes, results, strict=True))
        needed = {name for p in later for name in self.program.parts[p].reads}
        target.update((name, value) for name, value in written.items() if name in needed)
        return written


def microbatch_inputs(
    micro: Microbatch,
    whole: Mapping[str, Tensor],
    prologue: Sequence[Tensor],
    turn: int,
    microbatches: int,
) -> dict[str, Any]:
    """Whole values of a microbatch's inputs, by placeholder."""
    found: dict[str, Any] = {TURN: turn}
    for name, feed in micro.feeds.items():
        value = whole[feed.source] if feed.prologue is None else prologue[feed.prologue]
        if feed.dim is not None:
            parts = value.unflatten(feed.dim, (feed.runs, microbatches, -1))
            value = parts.select(feed.dim + 1, turn).flatten(feed.dim, feed.dim + 1)
        found[name] = value
    return found


def stages_at_turns(traced: TracedModel, pipeline: PipelinePlan) -> list[Staged]:
    """The stages at the first turns: as many as tell how arguments depend on the turn."""
    turns = range(min(_DEPENDENT_TURNS, pipeline.microbatches))
    return [staged_as_planned(traced, pipeline, turn) for turn in turns]


class Strided(fx.Interpreter):
    """Runs a graph whose views were traced on other strides than the kernels here return."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
            target = torch.ops.aten.reshape.default
        return super().call_function(target, args, kwargs)


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
        passes, fusion: of the stages' programs, as for `emit_turns`.

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
                emit_turns(
                    [t.stages.models[s] for t in turns], plan, coords, passes=passes, fusion=fusion
                )
                for coords in self.coords
            ]
            for s, plan in enumerate(pipeline.stages)
        ]
        self.values = [StageValues(p[0], self._runner(p)) for p in self.programs]
        self.results: dict[tuple[str, str], Tensor] = {}
        self.splits = bool(split_stages(pipeline.actions()))

    def _runner(self, programs: Sequence[TurnProgram]) -> Run:
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
                self.sent[stage, spec.target] = written[name]
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
