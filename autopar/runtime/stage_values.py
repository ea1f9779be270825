"""Values of a pipeline stage that runs microbatch by microbatch, and the inputs of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from autopar.codegen.accumulate import PREFIX
from autopar.codegen.microbatch import Microbatch
from autopar.codegen.stage_program import TURN, StageProgram
from autopar.codegen.stages import Staged, staged_as_planned
from autopar.core.graph import TracedModel
from autopar.core.plan import PipelinePlan

__all__ = ["Run", "StageValues", "microbatch_inputs", "stages_at_turns"]

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

    def __init__(self, program: StageProgram, run: Run) -> None:
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
