"""`emit_stage`: the program of one rank of a pipeline stage, which runs microbatch by microbatch.

What a stage does for one microbatch is a *turn*; turns are numbered as microbatches are.

The program is one graph of four parts: *prepare* runs once a step (hoisted ops), *forward* and
*backward* run at each turn, and *finish* runs once (gradients are reduced). A part reads and writes
values by name, so the runtime keeps one table of values for the step and one for each microbatch in
flight. The backward may be split into what the stage before waits for and the rest, the weight
gradients (Qi et al. 2023, arXiv 2401.10241).

Some arguments depend on the turn (counters of random numbers, row numbers). They are integers that
grow by the same step from turn to turn, so `emit_stage` writes the program for the first turns and
derives them as functions of the turn's number. Passes and patterns of fused kernels still see plain
numbers; kernels are generated after the turn's number is in the graph, and leave out what depends
on it. No op is moved from one part to another.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from autopar.codegen.emit import Emitter
from autopar.codegen.fusion import GENERATED, Fusion, fuse
from autopar.codegen.parts import Cutter, Part, Parts, behind, inputs_first
from autopar.codegen.passes import check_passes, phase_of, run_last_passes
from autopar.codegen.passes.bucket import Sizes
from autopar.codegen.passes.sites import Key
from autopar.codegen.redistribute import emit_redistribution
from autopar.codegen.traffic import check_traffic, count_collectives
from autopar.core.graph import InputSpec, OutputSpec, TracedModel, node_info, op_nodes, resolve
from autopar.core.late_module import late_module
from autopar.core.made_for import check_made_for
from autopar.core.placement import Layout
from autopar.core.plan import CommBytes, Plan
from autopar.core.recompute import recomputed
from autopar.errors import AutoparError

__all__ = ["TURN", "StageProgram", "StageProgramWriter", "emit_stage"]

TURN = "turn"
"""Name of the placeholder with the number of the turn, an int that parts may read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProgram:
    """What one rank of a stage runs.

    Attributes:
        joint: all parts as one graph, for inspection.
        parts: "prepare", "forward", "backward" and "finish"; the backward in two, "input" (what
            goes to the stage before, and what it needs) and "weight" (the rest); and, where
            gradients are reduced and the pass "early" is on, "last": the last "backward", of a
            schedule that cuts it in two the last "weight", with what "finish" does beside it. It
            is there in two, too: "close", up to the last op of the backward, and "wait".
        inputs: descriptor and local layout of every placeholder of `joint`.
        outputs: descriptor and layout of every output, and the name of its value.
        sums: names of values of the backward that are added up over the turns.
        passes: names of the passes that it went through.
    """

    joint: fx.GraphModule
    parts: Mapping[str, Part]
    inputs: tuple[tuple[InputSpec, Layout], ...]
    outputs: tuple[tuple[OutputSpec, Layout, str], ...]
    sums: tuple[str, ...]
    passes: tuple[str, ...] = ()

    def comm_bytes(self) -> tuple[CommBytes, ...]:
        """Bytes of the collectives in one step, per axis and kind; a bucket counts once."""
        return count_collectives(self.joint.graph)


def emit_stage(
    stages: Sequence[TracedModel],
    plan: Plan,
    coords: Sequence[int],
    *,
    group_names: Sequence[str] | None = None,
    device: torch.device | str = "cpu",
    passes: Collection[str] | None = None,
    fusion: Any = None,
) -> StageProgram:
    """Write the program of the rank at `coords` of one stage.

    Args:
        stages: the stage's graph at turn 0, 1 and 2 (as many of these as there are).
        plan: of the stage.
        coords: coordinate on each axis of the stage's mesh.
        group_names: process group of each axis; symbolic names where no process runs it.
        device: of factory results.
        passes: names out of those of `autopar.codegen.passes`; None for `PASSES`.
        fusion: what to fuse; see `Fusion.parse`.

    Raises:
        PlanMismatchError: the plan is of another graph.
        AutoparError: the program moves other bytes than the plan says.
    """
    return StageProgramWriter(
        stages, plan, coords, group_names=group_names, device=device, fusion=fusion
    ).program(passes)


class StageProgramWriter:
    """Writes the graphs of a stage once, and makes programs of them with any passes.

    Arguments and errors are those of `emit_stage`. `traced` is the stage's graph at the first turn,
    with its recomputation.
    """

    def __init__(
        self,
        stages: Sequence[TracedModel],
        plan: Plan,
        coords: Sequence[int],
        *,
        group_names: Sequence[str] | None = None,
        device: torch.device | str = "cpu",
        fusion: Any = None,
    ) -> None:
        first = stages[0]
        check_made_for(plan, first)
        chosen = Fusion.parse(fusion, torch.device(device))
        turns = stages if _may_depend(stages) else stages[:1]
        self._emitters = [
            _StageEmitter(
                recomputed(traced, plan.checkpoint),
                plan,
                coords,
                group_names,
                torch.device(device),
                chosen,
            )
            for traced in turns
        ]
        self.traced = self._emitters[0].traced
        for emitter in self._emitters:
            emitter.write()

    @property
    def graph(self) -> fx.Graph:
        """Of one turn, as it is written."""
        return self._emitters[0].graph

    def program(
        self,
        passes: Collection[str] | None,
        pieces: Mapping[Key, int] | None = None,
        calls: Collection[Key] | None = None,
        sizes: Sizes | None = None,
    ) -> StageProgram:
        """The program after passes; the written graphs themselves are left as they are.

        Args:
            passes: names out of those of `autopar.codegen.passes`; None for `PASSES`.
            pieces: of collectives that are cut; default: the plan's.
            calls: collectives that may be one call with their matmuls; default: the plan's.
            sizes: bytes that close a bucket, by axis and kind; default: the plan's.
        """
        graphs = [emitter.passed(passes, pieces, calls, sizes) for emitter in self._emitters]
        if len(graphs) > 1:
            _depend_on_turn(graphs)
        return self._emitters[0].of_all_microbatches(graphs[0], passes)


def _may_depend(stages: Sequence[TracedModel]) -> bool:
    """True where the graphs of two turns differ in some argument."""
    if len(stages) < 2:
        return False
    pairs = zip(stages[0].graph.nodes, stages[1].graph.nodes, strict=True)
    return any(repr((a.args, a.kwargs)) != repr((b.args, b.kwargs)) for a, b in pairs)


class _StageEmitter(Emitter):
    """Emits into one graph whose nodes know their part."""

    def write(self) -> None:
        """Write the graph of one turn and check it against the plan."""
        self.completed = {}
        self.leaving: list[tuple[fx.Node, OutputSpec, Layout]] = []
        self.placed = self._inputs()
        nodes = op_nodes(self.traced.graph.nodes)
        for part in ("prepare", "forward", "backward"):
            self.builder.phase = part
            for node in nodes:
                if self._part(node) == part:
                    self._op(node)
            self._leave(part)
        self.builder.phase = "finish"
        self._finish()
        self.graph.output(tuple(node for node, _, _ in self.leaving))
        if self.traced.flight.splits:
            inputs_first(self.graph, [node for node, spec, _ in self.leaving if _is_sent(spec)])
        check_traffic(count_collectives(self.graph), self.plan)

    def passed(
        self,
        passes: Collection[str] | None,
        pieces: Mapping[Key, int] | None,
        calls: Collection[Key] | None,
        sizes: Sizes | None,
    ) -> fx.Graph:
        """The graph of one turn, with its passes and with the written kernels of its fusion."""
        graph = self._through(passes, pieces, calls, sizes, self._resident())
        self._fuse(graph, self.fusion.kernels - {GENERATED})
        return graph

    def _resident(self) -> dict[str, int]:
        """From the second microbatch on, the sums live beside what a microbatch makes."""
        sums = {n for end in self.graph.nodes if end.meta.get("phase") == "finish"
                for n in end.all_input_nodes if n.meta.get("phase") == "backward"}  # fmt: skip
        values = [self.builder.value(n) for n in sums] if self.traced.microbatches > 1 else []
        num_bytes = sum(v.numel() * v.element_size() for v in values)
        return {"forward": num_bytes, "backward": num_bytes}

    def of_all_microbatches(self, graph: fx.Graph, passes: Collection[str] | None) -> StageProgram:
        """The program of all turns, from a graph whose arguments depend on the turn."""
        self._fuse(graph, self.fusion.kernels & {GENERATED})
        self._added_passes(graph, ())
        results = graph.output_node().args[0]
        assert isinstance(results, (list, tuple))
        pairs = zip(results, self.leaving, strict=True)
        sent = [node for node, (_, spec, _) in pairs if _is_sent(spec)]
        later = behind(graph, sent) if self.traced.flight.splits else ()
        run_last_passes(graph, passes, lambda node: (phase_of(node), node in later))
        outputs = tuple(
            (spec, layout, node.name)
            for node, (_, spec, layout) in zip(results, self.leaving, strict=True)
        )
        ends = (n for n in graph.nodes if n.meta.get("phase") == "finish")
        read = dict.fromkeys(a for n in ends for a in n.all_input_nodes)
        sums = tuple(n.name for n in read if n.meta.get("phase") == "backward")
        cutter = Cutter(
            outputs=[name for _, _, name in outputs],
            sums=sums,
            sent=[node.name for node in sent if phase_of(node) == "backward"],
            splits=self.traced.flight.splits,
        )
        chosen = check_passes(passes)
        return StageProgram(
            joint=late_module(graph),
            parts=Parts(cutter, graph, chosen),
            inputs=tuple(self.placed),
            outputs=outputs,
            sums=sums,
            passes=chosen,
        )

    def _fuse(self, graph: fx.Graph, kernels: frozenset[str]) -> None:
        if kernels:
            fuse(graph, replace(self.fusion, kernels=kernels), self.builder.fake_mode)

    def _part(self, node: fx.Node) -> str:
        if node.name in self.traced.hoisted:
            return "prepare"
        return node_info(self.traced, node).phase

    def _ends(self) -> list[tuple[OutputSpec, str]]:
        """Outputs and the part that completes them."""
        found = []
        for spec in self.traced.outputs:
            if spec.node is None:
                continue
            once = spec.kind == "gradient" or spec.accumulated
            found.append((spec, "finish" if once else self._part(self.nodes[str(spec.node)])))
        return found

    def _target(self, spec: OutputSpec) -> Layout:
        if spec.kind == "gradient":
            return self.plan.parameters[spec.target]
        return self.plan.inputs[spec.port] if spec.kind == "sent" else self.whole

    def _leave(self, part: str) -> None:
        """Bring what a part sends or returns to its layout."""
        for spec, where in self._ends():
            if where == part:
                value = resolve(self.nodes[str(spec.node)])
                self.builder.origin = spec.target
                self.builder.times = self.blocks.runs(value[0])
                self._result(spec, self.values[value], self.layouts[value])

    def _result(self, spec: OutputSpec, value: fx.Node, layout: Layout) -> None:
        target = self._target(spec)
        made = emit_redistribution(self.builder, value, layout, target)
        if made.op == "placeholder":  # a value that leaves has a name of its own
            made = self.builder.call(torch.ops.aten.alias.default, made)
        if spec.kind == "sent" and not spec.accumulated:
            made.meta["sent"] = True  # another stage waits for it
        self.leaving.append((made, spec, target))

    def _finish(self) -> None:
        """Reduce each sum of contributions to a gradient."""
        for spec, where in self._ends():
            if where != "finish":
                continue
            value = resolve(self.nodes[str(spec.node)])
            self.builder.origin = f"gradient of {spec.target}"
            self.builder.times = self.blocks.copies(value[0])
            # its own node, so that the sum and what it is reduced to have two names
            start = self.builder.call(torch.ops.aten.alias.default, self.values[value])
            self._result(spec, start, self.layouts[value])


def _depend_on_turn(graphs: Sequence[fx.Graph]) -> None:
    """Write the first graph's arguments as functions of the turn, from those of the others."""
    first = graphs[0]
    turn: fx.Node | None = None
    rows = zip(*(list(g.nodes) for g in graphs), strict=True)
    for row in list(rows):
        node = row[0]
        if any(n.target != node.target for n in row):
            raise AutoparError(
                f"the programs of two microbatches differ at {node.name}: this is a defect of "
                "autopar"
            )
        flat = [_numbers((n.args, n.kwargs)) for n in row]
        if all(numbers == flat[0] for numbers in flat):
            continue
        if turn is None:
            with first.inserting_before(next(iter(first.nodes))):
                turn = first.placeholder(TURN)
            turn.meta["val"] = 0
        _rewrite(first, node, turn, flat)


def _numbers(args: Any) -> list[Any]:
    """Arguments that are neither tensors nor containers, in order."""
    found: list[Any] = []
    map_aggregate(args, lambda a: found.append(a) if not isinstance(a, fx.Node) else None)
    return found


def _rewrite(graph: fx.Graph, node: fx.Node, turn: fx.Node, flat: Sequence[list[Any]]) -> None:
    columns = iter(list(zip(*flat, strict=True)))

    def write(arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            return arg
        values = next(columns)
        if all(v == values[0] for v in values):
            return arg
        step = values[1] - values[0]
        if any(v != values[0] + step * i for i, v in enumerate(values)):
            raise AutoparError(
                f"an argument of {node.target} is {list(values)} in the first microbatches, which "
                "is no multiple of their number: this is a defect of autopar"
            )
        with graph.inserting_before(node):
            product = graph.call_function(operator.mul, (turn, step))
            total = graph.call_function(operator.add, (product, values[0]))
        for made, at_first in ((product, 0), (total, values[0])):
            kept = {key: node.meta.get(key, "") for key in ("phase", "origin")}
            made.meta = {**kept, "val": at_first}
        return total

    node.args, node.kwargs = map_aggregate((node.args, node.kwargs), write)


def _is_sent(spec: OutputSpec) -> bool:
    return spec.kind == "sent" and not spec.accumulated
