"""Plans and compiles the steps of a model: trace, look up or solve, unfold, emit."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar._compat import register_dataclasses
from autopar.codegen.emit import emit
from autopar.codegen.fusion import Fusion
from autopar.codegen.passes import check_passes
from autopar.codegen.program import Program
from autopar.codegen.stage_unfolding import unfolded_plan
from autopar.core.constraints import NO_PIPELINE, Constraints, PipelinePin
from autopar.core.folding import every_instance, same_for_all_instances
from autopar.core.graph import Repeat, TracedModel
from autopar.core.plan import Plan
from autopar.cost_model import Cluster
from autopar.errors import AutoparError, ConstraintError, PlanMismatchError
from autopar.runtime.agree import agree, alike_on_all, of_one_rank
from autopar.runtime.compiled_step import CompiledStep, in_one_piece, outputs_behind
from autopar.runtime.index_ranges import shared_lookups
from autopar.runtime.inductor import compile_program
from autopar.runtime.initialize import InitWeights
from autopar.runtime.pipeline import PipelinedStep
from autopar.runtime.pipeline_mesh import PipelineMesh, check_ascending, own_plan
from autopar.runtime.state import materialize
from autopar.search.symmetric_calls import with_symmetric_calls
from autopar.step_plans import StepPlans
from autopar.tracer.accepted import check_model
from autopar.tracer.repeats import find_repeats
from autopar.tracer.trace import trace

__all__ = ["Planner", "Settings", "traced_for"]


def traced_for(
    model: nn.Module,
    example_inputs: Any,
    *,
    constraints: Constraints,
    training: bool,
    loss_fn: Callable[..., Any] | None,
    precision: str | None = None,
    reduce_dtype: str | None = None,
) -> TracedModel:
    """The graph that `plan` solves for these arguments: folded where the pins allow it."""
    check_model(model)
    traced = partial(
        trace,
        model,
        example_inputs,
        training=training,
        loss_fn=loss_fn,
        precision=precision,
        reduce_dtype=reduce_dtype,
    )
    folded = traced(fold=may_fold(model, constraints, find_repeats(model)))
    return folded if may_fold(model, constraints, folded.repeats) else traced(fold=False)


def may_fold(model: nn.Module, constraints: Constraints, repeats: Sequence[Repeat]) -> bool:
    """False where a pin tells apart blocks that would share one choice."""
    if not repeats:
        return True
    pin = constraints.pipeline
    if pin is not None and pin != NO_PIPELINE:
        # the cuts of a folded graph stand between blocks that repeat together
        if pin.cuts is not None or any(r.period > 1 for r in repeats):
            return False
        # equal stages share one plan
        if constraints.pins_blocks:
            return False
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    matches = {glob: fnmatch.filter(names, glob) for glob in constraints.params}
    return same_for_all_instances(matches, repeats)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The arguments of `autopar.parallelize` for all steps, parsed and agreed by all ranks."""

    constraints: Constraints
    memory_limit: int | None
    optimizer: object
    loss_fn: Callable[..., Any] | None
    cluster: Cluster | None
    cache: bool
    precision: str | None
    reduce_dtype: str | None
    backend: str
    passes: Collection[str] | None
    fusion: Fusion
    time_limit: float | None = None

    def passes_in_order(self) -> tuple[str, ...]:
        """Names of the passes that run."""
        # Inductor has a pass of its own for that, and takes no op that writes to its operand
        without = {"in_place"} if self.backend == "inductor" else set()
        return tuple(name for name in check_passes(self.passes) if name not in without)


class Planner:
    """Compiles a step for each input signature of one parallel module.

    Args:
        model: the user's.
        mesh: of all ranks.
        given: the plan of the first step; None: it is solved.
        settings: of all steps.
    """

    def __init__(
        self, model: nn.Module, mesh: DeviceMesh, given: Plan | None, settings: Settings
    ) -> None:
        self.model = model
        self.mesh = mesh
        self.first = given
        self.given = given
        self.settings = settings
        self.passes = settings.passes_in_order()
        self._num_args: int | None = None
        self._mesh_of: dict[tuple[int, ...], DeviceMesh] = {tuple(mesh.mesh.shape): mesh}
        self._pipelines: dict[tuple[int, ...], PipelineMesh] = {}

    def pipeline_mesh(self, chosen: Plan) -> PipelineMesh:
        """This rank's place in a plan's pipeline."""
        assert chosen.pipeline is not None
        shape = (chosen.pipeline.size, *chosen.mesh_shape)
        if shape not in self._pipelines:
            self._pipelines[shape] = PipelineMesh.over(self.mesh, chosen)
        return self._pipelines[shape]

    def device_mesh(self, chosen: Plan) -> DeviceMesh:
        """The user's mesh, or the same ranks in the shape that the plan wants.

        With a pipeline, the mesh of this rank's stages.
        """
        if chosen.pipeline is not None:
            return self.pipeline_mesh(chosen).stage
        shape = chosen.mesh_shape
        ranks = self.mesh.mesh.reshape(shape)
        check_ascending(ranks)
        if shape not in self._mesh_of:
            self._mesh_of[shape] = DeviceMesh(
                self.mesh.device_type, ranks, mesh_dim_names=chosen.axis_names
            )
        return self._mesh_of[shape]

    def hold(
        self, chosen: Plan, init_weights: InitWeights | None, base: int
    ) -> tuple[DeviceMesh, dict[str, nn.Parameter], dict[str, Tensor]]:
        """The mesh that a plan runs on, and this rank's parameters and buffers (`materialize`)."""
        if chosen.pipeline is not None:
            chosen = own_plan(chosen, self.pipeline_mesh(chosen).rank)
        planned = self.device_mesh(chosen)
        coords = planned.get_coordinate()
        assert coords is not None
        held = materialize(self.model, chosen, planned, tuple(coords), init_weights, base)
        return planned, *held

    def compile(self, args: Any, kwargs: Any, training: bool) -> CompiledStep | PipelinedStep:
        """Trace, plan (rank 0 decides) and emit for one input signature, in the model's modes.

        Args:
            args, kwargs: the global batch.
            training: with gradients.
        """
        traced, chosen = self._planned(args, kwargs, training)
        if "symmetric_memory" in self.passes:
            marked = partial(with_symmetric_calls, chosen, traced, self.passes)
            chosen = self._by_first(marked)
        if chosen.pipeline is not None:
            return PipelinedStep(
                traced,
                chosen,
                self.pipeline_mesh(chosen),
                tuple(kwargs),
                passes=self.passes,
                fusion=self.settings.fusion,
                backend=self.settings.backend,
            )
        planned = self.device_mesh(chosen)
        program = self._emitted(traced, chosen, planned)
        compiled = compile_program(program) if self.settings.backend == "inductor" else None
        return CompiledStep(
            traced=traced,
            plan=chosen,
            program=program,
            fusion=self.settings.fusion,
            keywords=tuple(kwargs),
            compiled=compiled,
            at_once=in_one_piece(traced, program) if compiled is None else None,
            shared=shared_lookups(traced, chosen),
            reached_from=outputs_behind(traced),
        )

    def _emitted(self, traced: TracedModel, chosen: Plan, planned: DeviceMesh) -> Program:
        """This rank's program, with the collectives that all ranks have."""
        coords = planned.get_coordinate()
        assert coords is not None
        write = partial(
            emit,
            traced,
            chosen,
            coords,
            group_names=[planned.get_group(i).group_name for i in range(planned.ndim)],
            device=self.mesh.device_type,
            passes=self.passes,
            fusion=self.settings.fusion,
        )
        return alike_on_all(write, lambda program: {"the step": program.joint.graph})

    def _planned(self, args: Any, kwargs: Any, training: bool) -> tuple[TracedModel, Plan]:
        """The whole graph and its plan, chosen on the folded graph where there is one."""
        given = self.given
        if given is None:
            fold = self.first is None and self._may_fold(find_repeats(self.model))
        else:
            fold = bool(given.repeats)
        traced = self._traced(args, kwargs, training, fold)
        if given is None and not self._may_fold(traced.repeats):
            traced = self._traced(args, kwargs, training, False)
        chosen = self._choose(traced)
        if not traced.repeats:
            return traced, chosen
        whole = self._traced(args, kwargs, training, False)
        try:
            return whole, unfolded_plan(chosen, traced, whole)
        except PlanMismatchError:
            if given is not None:
                raise
        # blocks that look alike but compute different things: each has its own choice
        self.first = None
        whole = replace(whole, held_by={})
        return whole, self._choose(whole)

    def _may_fold(self, repeats: Sequence[Repeat]) -> bool:
        return may_fold(self.model, self.settings.constraints, repeats)

    def _traced(self, args: Any, kwargs: Any, training: bool, fold: bool) -> TracedModel:
        """The graph, the same on all ranks."""
        traced: TracedModel | None = None
        failure: Exception | None = None
        try:
            if args and kwargs:
                raise AutoparError("pass the batch either by position or by keyword, not both")
            loss_fn = self._loss_for(args, kwargs, training)
            register_dataclasses((args, kwargs))
            inputs = pytree.tree_map_only(Tensor, _as_example, (args, kwargs))
            example = (*inputs[0],) if inputs[0] else inputs[1]
            traced = trace(
                self.model,
                example,
                training=training,
                loss_fn=loss_fn,
                fold=fold,
                precision=self.settings.precision,
                reduce_dtype=self.settings.reduce_dtype,
            )
        except Exception as error:  # whatever it is, the other ranks must hear of it
            failure = error
        agree(failure, {} if traced is None else _describe(traced), "plan a step")
        assert traced is not None
        return traced if self.first is None else replace(traced, held_by=_holders(self.first))

    def _loss_for(self, args: Any, kwargs: Any, training: bool) -> Callable[..., Any] | None:
        """The loss function, but where no target comes: for predictions without gradients."""
        if self._num_args is None:
            self._num_args = len(args)
        given = "target" in kwargs if kwargs else len(args) >= self._num_args
        return self.settings.loss_fn if training or given else None

    def _choose(self, traced: TracedModel) -> Plan:
        if self.given is not None:
            chosen, self.given = self.given, None
            self._check_given(chosen, traced)
            self.first = chosen
            return chosen
        chosen = self._by_first(partial(self._solve, traced))
        if self.first is None:
            self.first = chosen
        return chosen

    def _by_first(self, plan: Callable[[], Plan]) -> Plan:
        """What the mesh's first rank plans, on every rank."""
        return of_one_rank(int(self.mesh.mesh.flatten()[0]), "plan", plan)

    def _solve(self, traced: TracedModel) -> Plan:
        described = self.settings.cluster or Cluster.from_mesh(self.mesh)
        if self.first is None:
            return self._solved(traced, described, self.settings.constraints)
        described, like = _like(self.first, described, traced.training)
        if traced.training:
            like = replace(like, checkpoint=self.settings.constraints.checkpoint)
        if like.pipeline is None or not traced.training:
            return self._solved(traced, described, like)
        refused: ConstraintError | None = None
        for pin in _fewer_turns(like.pipeline, traced):  # a short batch, as the last of an epoch
            try:
                return self._solved(traced, described, replace(like, pipeline=pin))
            except ConstraintError as error:
                refused = refused or error
        assert refused is not None
        raise refused

    def _solved(self, traced: TracedModel, cluster: Cluster, constraints: Constraints) -> Plan:
        s = self.settings
        given = (traced, cluster, constraints, s.optimizer, s.cache, s.fusion)
        return StepPlans(*given, time_limit=s.time_limit).under(s.memory_limit)

    def _check_given(self, chosen: Plan, traced: TracedModel) -> None:
        if chosen.num_devices != self.mesh.size():
            raise PlanMismatchError(
                f"the plan is for {chosen.num_devices} devices {chosen.mesh_shape}, the mesh has "
                f"{self.mesh.size()} {tuple(self.mesh.mesh.shape)}"
            )
        shapes = every_instance({s.target: s.shape for s in traced.parameters()}, traced.repeats)
        for name in sorted({*shapes, *chosen.shapes}):
            if shapes.get(name) != chosen.shapes.get(name):
                raise PlanMismatchError(
                    f"parameter {name} has shape {shapes.get(name)} in the model and "
                    f"{chosen.shapes.get(name)} in the plan"
                )


def _holders(plan: Plan) -> dict[str, int]:
    """The stage that holds each parameter, where the plan has several."""
    if plan.pipeline is None or len(plan.pipeline.stages) == 1:
        return {}
    return {name: i for i, stage in enumerate(plan.pipeline.stages) for name in stage.parameters}


def _like(first: Plan, cluster: Cluster, training: bool) -> tuple[Cluster, Constraints]:
    """Mesh and constraints of a step whose parameters lie as another step's plan has them."""
    params = {name: tuple(p.short for p in layout) for name, layout in first.parameters.items()}
    if first.pipeline is None:
        described = cluster.with_mesh_shape(first.mesh_shape, first.axis_names)
        return described, Constraints(params=params, offload=first.offload)
    p = first.pipeline
    if p.size == 1 and not training:
        described = cluster.with_mesh_shape(first.mesh_shape, first.axis_names)
        return described, Constraints(params=params, offload=first.offload)
    names = ("pipeline", *first.axis_names)
    described = cluster.with_mesh_shape((p.size, *first.mesh_shape), names)
    pin = PipelinePin(
        size=p.size,
        microbatches=p.microbatches if training else 1,
        schedule=p.schedule if training else "gpipe",
        chunks=p.chunks,
        cuts=p.cuts,
    )
    return described, Constraints(params=params, pipeline=pin, offload=first.offload)


def _fewer_turns(pin: PipelinePin, traced: TracedModel) -> Iterator[PipelinePin]:
    """The pin with as many microbatches, then with fewer, of those that may divide a batch."""
    assert pin.microbatches is not None
    batches = [s.shape[0] for s in traced.inputs if s.kind == "input" and s.shape]
    for turns in range(pin.microbatches, 0, -1):
        if turns == 1 or any(batch % turns == 0 for batch in batches):
            whole = pin.size is None or turns % pin.size == 0
            schedule = pin.schedule if whole or pin.schedule != "interleaved" else "gpipe"
            yield replace(pin, microbatches=turns, schedule=schedule)


def _as_example(value: Tensor) -> Tensor:
    """A stand-in of the global shape; of the batch nothing is kept but what a forward may ask for:
    sizes, and integers that functions of them alone are given.
    """
    if not (value.is_floating_point() or value.is_complex() or value.is_meta):
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        return whole.detach().to("cpu", copy=True)
    return torch.zeros(value.shape, dtype=value.dtype, device="meta" if value.is_meta else "cpu")


def _describe(traced: TracedModel) -> dict[str, Any]:
    return {
        **{s.target: (s.shape, str(s.dtype)) for s in traced.inputs},
        "the number of ops": len(traced.graph.nodes),
        "the graph": traced.fingerprint(),
    }
