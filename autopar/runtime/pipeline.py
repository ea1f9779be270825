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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from autopar.codegen.fusion import Fusion
from autopar.codegen.stage_program import StageProgram, emit_stage
from autopar.codegen.stages import Staged
from autopar.core.flights import arrived
from autopar.core.graph import TracedModel, output_paths, tensor_meta
from autopar.core.plan import PipelinePlan, Plan
from autopar.core.schedule import Action, closing_action
from autopar.runtime.agree import alike_on_all
from autopar.runtime.index_ranges import shared_lookups
from autopar.runtime.inductor import compile_parts
from autopar.runtime.pipeline_mesh import PipelineMesh, own_plan
from autopar.runtime.pipeline_run import PARTS, PipelineResult, PipelineRun
from autopar.runtime.stage_gradients import Line
from autopar.runtime.stage_values import stages_at_turns

__all__ = ["PipelinedStep"]


class PipelinedStep:
    """A step in microbatches, with the programs of this rank's stages.

    Args:
        traced: the step on the whole batch.
        plan: with a pipeline.
        mesh: of this process.
        keywords: names of keyword inputs, in the order of the trace.
        passes, fusion: of the programs, as for `emit_stage`.
        backend: "inductor" compiles each part of each program.

    Attributes:
        programs: by stage.
        compiled: what runs in place of parts as they were emitted, by stage and name.
        returned: by index of the user output, the stage that yields it and a stand-in.
        updated: by pipeline rank, the buffers that its stages write: `(FQN, stand-in)`.
    """

    def __init__(
        self,
        traced: TracedModel,
        plan: Plan,
        mesh: PipelineMesh,
        keywords: tuple[str, ...] = (),
        *,
        passes: Collection[str] | None = None,
        fusion: Fusion | None = None,
        backend: str = "eager",
    ) -> None:
        assert plan.pipeline is not None
        self.passes = passes
        self.fusion = fusion
        self.traced = traced
        self.keywords = keywords
        self.shared = shared_lookups(traced, plan)
        self.plan = plan
        self.mesh = mesh
        self.pipeline: PipelinePlan = plan.pipeline
        turns = stages_at_turns(traced, self.pipeline)
        self.micro = turns[0].microbatch
        self.transfers = turns[0].stages.transfers
        orders = self.pipeline.actions()
        if not traced.training:
            orders = tuple(tuple(a for a in order if a.kind == "F") for order in orders)
        self.orders = orders
        self.order = orders[mesh.rank]
        self.arrived = arrived(orders)[mesh.rank]
        self.device = torch.device(mesh.stage.device_type)
        coords = mesh.stage.get_coordinate()
        assert coords is not None
        self.coords = tuple(coords)
        groups = [mesh.stage.get_group(i).group_name for i in range(mesh.stage.ndim)]
        self.programs = alike_on_all(
            lambda: {
                s: self.emit(turns, s, self.coords, groups) for s in self.stages_of(mesh.rank)
            },
            lambda programs: {f"stage {s}": p.joint.graph for s, p in programs.items()},
        )
        self.backend = backend
        self.returned = _returned(turns[0])
        self.updated = self._updated(turns[0])
        self.closing = self.closing_of(mesh.rank, self.programs)
        self.compiled: Mapping[tuple[int, str], Callable[[list[Any]], Any]] = {}
        if backend == "inductor":
            self.compiled = compile_parts(self.programs, self._executed())

    def _updated(self, first: Staged) -> dict[int, list[tuple[str, torch.Tensor]]]:
        """`updated`. Where several stages write a buffer, the last one yields its final value."""
        found: dict[int, list[tuple[str, torch.Tensor]]] = {}
        for stage, model in enumerate(first.stages.models):
            for spec in model.outputs:
                if spec.kind == "buffer" and spec.node is not None:
                    like = tensor_meta(model.nodes()[spec.node])
                    assert like is not None
                    found.setdefault(stage % self.pipeline.size, []).append((spec.target, like))
        return found

    def stages_of(self, rank: int) -> range:
        """The stages of a rank of the pipeline."""
        return range(rank, len(self.pipeline.stages), self.pipeline.size)

    def closing_of(self, rank: int, programs: Mapping[int, StageProgram]) -> frozenset[Action]:
        """The last action of a rank, where its stage's gradients are reduced beside it.

        Args:
            rank: of the pipeline.
            programs: of its stages.
        """
        if self.backend == "inductor":
            return frozenset()  # Inductor has a schedule of its own
        last = closing_action(self.orders, rank)
        if last is None or "last" not in programs[last.stage].parts:
            return frozenset()
        return frozenset([last])

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
        paths = output_paths(self.traced.out_spec)
        names = ", ".join(paths[int(s.target)] or "its output" for s in dropped)
        warnings.warn(
            f"the plan runs in {self.pipeline.microbatches} microbatches: a training step returns "
            f"the loss, and None in place of {names}. Pass constraints={{'pipeline': 'none'}} to "
            "autopar.parallelize to have them.",
            stacklevel=2,
        )

    @property
    def communicates(self) -> bool:
        """True if ranks wait for each other in it."""
        return self.pipeline.size > 1 or bool(self.plan.predicted.comm_bytes)

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

    def emit(
        self,
        turns: Sequence[Staged],
        stage: int,
        coords: Sequence[int],
        group_names: Sequence[str] | None = None,
    ) -> StageProgram:
        """The program of a rank of a stage; one that is not run has groups of symbolic names."""
        fusion = self.fusion
        if fusion is not None and fusion.dump is not None:
            # a folder for the sources of each stage's kernels
            dump = None if group_names is None else f"{fusion.dump}/stage{stage}"
            fusion = replace(fusion, dump=dump)
        return emit_stage(
            [t.stages.models[stage] for t in turns],
            self.pipeline.stages[stage],
            coords,
            group_names=group_names,
            device=self.device,
            passes=self.passes,
            fusion=fusion,
        )

    def run(self, whole: Mapping[str, Any]) -> PipelineResult:
        """One step.

        Args:
            whole: by placeholder of the step: local parameters of this rank's stages, and whole
                values of all else.
        """
        return PipelineRun(self, whole).run()


def _returned(first: Staged) -> dict[int, tuple[int, torch.Tensor]]:
    return {
        int(spec.target): (stage, model.nodes()[spec.node].meta["val"])
        for stage, model in enumerate(first.stages.models)
        for spec in model.outputs
        if spec.kind == "output" and spec.node is not None
    }
