"""The measured step of a real run, in the lanes of the predicted one.

The program's graphs are run node by node. A collective lasts from its start to the end of the wait
for it; it may overlap with compute, as it does in a step that is not measured. On an accelerator,
times come from events on its stream, on the CPU from the clock. Running node by node costs a few
microseconds a node, which a fast device waits for: small ops look slower than they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, fx

from autopar.core.plan import Plan
from autopar.core.trace_events import (
    MAX_EVENTS,
    Event,
    event,
    lane_names,
    lanes,
    predicted_count,
    predicted_events,
    ranks_shown,
    slot_name,
    spread,
    stage_lane,
    write_trace,
)
from autopar.runtime.inductor import CompiledProgram
from autopar.runtime.pipeline import PipelinedStep
from autopar.runtime.pipeline_run import PARTS

if TYPE_CHECKING:
    from autopar.runtime.compiled_step import CompiledStep
    from autopar.runtime.module import ParallelModule

__all__ = ["Interval", "Stopwatch", "TimedGraph", "TimedPart", "profile_step"]


class Interval(NamedTuple):
    """One op or collective: lane, name, seconds since the start of the step, and details."""

    lane: int
    name: str
    start_s: float
    seconds: float
    details: dict[str, Any]


@dataclass(slots=True)
class Stopwatch:
    """Marks of time on one device; they are read when the step has ended.

    Args:
        device_type: of the tensors.
    """

    device_type: str
    marks: list[Any] = field(default_factory=list)

    def mark(self) -> int:
        """Note the present moment of the device; returns the mark's number."""
        if self.device_type == "cpu":
            self.marks.append(time.perf_counter())
        else:
            event = torch.Event(self.device_type, enable_timing=True)
            event.record()
            self.marks.append(event)
        return len(self.marks) - 1

    def seconds(self) -> list[float]:
        """Seconds of every mark since the first one; waits for the device."""
        if self.device_type == "cpu":
            return [mark - self.marks[0] for mark in self.marks]
        torch.accelerator.synchronize()
        return [self.marks[0].elapsed_time(mark) / 1e3 for mark in self.marks]


@dataclass(slots=True)
class _Timed:
    """A node with the marks between which it ran."""

    node: fx.Node
    start: int
    end: int


class TimedGraph:
    """A graph that runs node by node and notes when.

    Args:
        module: a forward, or a backward whose arguments come in one list.
        boxed: whether they do.
        watch: shared by all graphs of the step.
    """

    def __init__(self, module: fx.GraphModule, boxed: bool, watch: Stopwatch) -> None:
        self.module = module
        self.boxed = boxed
        self.watch = watch
        self.timed: list[_Timed] = []

    def __call__(self, *args: Any) -> Any:
        values = args[0] if self.boxed else list(args)
        return _Runner(self.module, self._note).boxed_run(values)

    def _note(self, node: fx.Node, run: Callable[[], Any]) -> Any:
        start = self.watch.mark()
        result = run()
        self.timed.append(_Timed(node, start, self.watch.mark()))
        return result

    def intervals(self, seconds: list[float]) -> list[Interval]:
        """What ran, given the seconds of every mark."""
        started: dict[fx.Node, _Timed] = {}
        found: list[Interval] = []
        for timed in self.timed:
            node = timed.node
            start, end = seconds[timed.start], seconds[timed.end]
            if "collective" in node.meta:
                started[node] = timed
                continue
            details: dict[str, Any] = {
                "op": str(node.target),
                "of": str(node.meta.get("origin", "")),
            }
            if "overlapped" in node.meta:
                details["bytes"] = node.meta["overlapped"][2]
            if node.target is torch.ops._c10d_functional.wait_tensor.default:
                source = node.args[0]
                assert isinstance(source, fx.Node)
                begun = started.pop(source)
                kind, axis, num_bytes, _ = source.meta["collective"]
                first = seconds[begun.start]
                details |= {"bytes": num_bytes, "waited_s": end - start}
                found.append(Interval(1 + axis, kind, first, end - first, details))
            else:
                found.append(Interval(0, node.name, start, end - start, details))
        return found


class _Runner(fx.Interpreter):
    """An interpreter that hands each call to a function."""

    def __init__(
        self, module: fx.GraphModule, note: Callable[[fx.Node, Callable[[], Any]], Any]
    ) -> None:
        super().__init__(module)
        self.note = note

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        return self.note(n, lambda: super(_Runner, self).run_node(n))


class TimedPart:
    """A part of a stage's program that notes each of its calls, and its ops.

    Args:
        module: of the part.
        watch: shared by all parts of the step.
        kind: of the action that runs it, F, B, I or W; P and R for what runs once.
        first: microbatch of its first call.
    """

    def __init__(self, module: fx.GraphModule, watch: Stopwatch, kind: str, first: int = 0) -> None:
        self.graph = TimedGraph(module, True, watch)
        self.kind = kind
        self.first = first
        self.calls: list[tuple[int, int]] = []

    def __call__(self, values: list[Any]) -> Any:
        start = self.graph.watch.mark()
        found = self.graph(values)
        self.calls.append((start, self.graph.watch.mark()))
        return found

    def intervals(self, seconds: list[float], lane: int) -> list[Interval]:
        """The calls in a lane, one for each microbatch in order, and what ran in the next lanes."""
        found = [
            Interval(
                lane, slot_name(self.kind, turn), seconds[start], seconds[end] - seconds[start], {}
            )
            for turn, (start, end) in enumerate(self.calls, self.first)
        ]
        ops = self.graph.intervals(seconds)
        return found + [i._replace(lane=lane + 1 + i.lane) for i in ops]


def profile_step(
    module: ParallelModule, path: str | Path, args: Any, kwargs: Any, ranks: int | None
) -> Tensor:
    """`ParallelModule.profile_step`."""
    step = module._step_for(args, kwargs)
    signature = module.signature(args, kwargs, step.traced.training)
    watch = Stopwatch(module.mesh.device_type)
    measured, intervals = _measured(step, watch)
    module._steps[signature] = measured
    try:
        if dist.is_initialized():
            dist.barrier()  # all ranks count from the same moment
        watch.mark()
        loss = module.train_step(*args, **kwargs)
    finally:
        module._steps[signature] = step
    found = intervals(watch.seconds())
    if isinstance(step, PipelinedStep):
        everyone = list(range(dist.get_world_size() if dist.is_initialized() else 1))
        _write(step.plan, everyone, step.mesh.rank, path, found, ranks)
    else:
        everyone = [int(rank) for rank in module.mesh.mesh.flatten()]
        _write(step.plan, everyone, 0, path, found, ranks)
    return loss


def _measured(
    step: CompiledStep | PipelinedStep, watch: Stopwatch
) -> tuple[CompiledStep | PipelinedStep, Callable[[list[float]], list[Interval]]]:
    """The step with graphs that note when they run, and what they say of it afterwards."""
    if isinstance(step, PipelinedStep):
        timed = {
            (stage, name): TimedPart(program.parts[name].module, watch, kind)
            for stage, program in step.programs.items()
            for kind, name in PARTS.items()
        }
        for action in step.closing:  # of the last microbatch, in place of its backward
            parts = step.programs[action.stage].parts
            timed[action.stage, "close"] = TimedPart(
                parts["close"].module, watch, action.kind, action.microbatch
            )
            timed[action.stage, "wait"] = TimedPart(parts["wait"].module, watch, "R")
        plan = step.plan
        return step.running(timed), lambda seconds: [
            interval
            for (stage, _), part in timed.items()
            for interval in part.intervals(seconds, stage_lane(plan, stage))
        ]
    forward = TimedGraph(step.program.forward, False, watch)
    graphs = [forward]
    if step.program.backward is not None:
        graphs.append(TimedGraph(step.program.backward, True, watch))
    backward = graphs[1] if len(graphs) > 1 else None
    whole = None if step.at_once is None else TimedGraph(step.at_once, False, watch)
    graphs += [whole] if whole is not None else []
    program = CompiledProgram(forward=forward, backward=backward)  # type: ignore[arg-type]
    timed_step = replace(step, compiled=program, at_once=whole)  # type: ignore[arg-type]
    return timed_step, lambda seconds: [
        interval for graph in graphs for interval in graph.intervals(seconds)
    ]


def _write(
    plan: Plan,
    everyone: list[int],
    line: int,
    path: str | Path,
    found: list[Interval],
    ranks: int | None,
) -> None:
    """The first rank writes what the ranks measured, and the prediction beside it.

    Args:
        plan: of the step.
        everyone: ranks in the order of the mesh.
        line: this rank's place in the pipeline.
        path: of the file.
        found: on this rank.
        ranks: how many to write.
    """
    lines = plan.pipeline.size if plan.pipeline is not None else 1
    gathered: list[Any] = [(line, found)]
    most = len(found)
    if len(everyone) > 1:
        counts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(counts, most)
        most = max(counts)
    fit = MAX_EVENTS // max(1, most + max(predicted_count(plan, each) for each in range(lines)))
    shown = [everyone[place] for place in ranks_shown(len(everyone), lines, fit, ranks)]
    if len(everyone) > 1:
        me = dist.get_rank()
        gathered = [None] * dist.get_world_size()
        mine = (line, found if me in shown else [])
        dist.gather_object(mine, gathered if me == everyone[0] else None, dst=everyone[0])
        if me != everyone[0]:
            return
    about = {"ranks": len(everyone), "ranks_written": len(shown)}
    write_trace(path, _events(plan, [(rank, *gathered[rank]) for rank in shown]), about)


def _events(plan: Plan, shown: list[tuple[int, int, list[Interval]]]) -> list[Event]:
    """Both steps of ranks, each given with its place in the pipeline and what it measured."""
    events: list[Event] = []
    for line in dict.fromkeys(line for _, line, _ in shown):
        predicted = list(predicted_events(plan, 0, line))
        measured = {
            rank: [event(0, i.lane, i.name, i.start_s, i.seconds, i.details) for i in found]
            for rank, its_line, found in shown
            if its_line == line
        }
        names = spread(lane_names(plan, line), [predicted, *measured.values()])
        for place, (rank, _, _) in enumerate(shown):
            if rank not in measured:
                continue
            for pid, name, step in (
                (2 * place, "predicted", predicted),
                (2 * place + 1, "measured", measured[rank]),
            ):
                events += lanes(pid, f"rank {rank}, {name}", names, pid)
                events += ({**each, "pid": pid} for each in step)
    return events
