"""`parallelize` and `plan`: what users call. Ties the rooms together."""

from __future__ import annotations

import fnmatch
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from autopar.cache import PlanCache
from autopar.codegen.emit import emit
from autopar.core.constraints import Constraints
from autopar.core.folding import every_instance, same_for_all_instances, unfolded
from autopar.core.graph import TracedModel
from autopar.core.plan import Plan
from autopar.cost_model import Cluster
from autopar.errors import AutoparError, PlanMismatchError
from autopar.runtime.agree import agree
from autopar.runtime.module import CompiledStep, ParallelModule, StateName, input_signature
from autopar.runtime.optimizers import guard_optimizers
from autopar.runtime.state import check_devices, materialize
from autopar.tracer.fold import find_repeats
from autopar.tracer.precision import low_dtype
from autopar.tracer.trace import normalize_inputs, trace

__all__ = ["load_plan", "parallelize", "plan", "traced_for"]

ConstraintsLike = Constraints | Mapping[str, Any] | None


def load_plan(path: str | Path) -> Plan:
    """Read a plan saved with `Plan.save`.

    Raises:
        PlanMismatchError: not a plan, truncated, or of another version.
    """
    return Plan.load(path)


def plan(
    model: nn.Module,
    cluster: Cluster | DeviceMesh,
    example_inputs: Any,
    *,
    constraints: ConstraintsLike = None,
    memory_limit: int | None = None,
    optimizer: object = "adamw",
    loss_fn: Callable[..., Any] | None = None,
    training: bool = True,
    cache: bool = True,
    precision: str | None = None,
) -> Plan:
    """Plan a training step. Needs no devices and no process group.

    Args:
        model: an unmodified module, on any device including meta.
        cluster: a `Cluster`, or a `DeviceMesh` to describe.
        example_inputs: tuple or dict of tensors with the global batch.
        constraints: what to pin; the rest is chosen.
        memory_limit: bytes per device; default: the device's memory.
        optimizer: torch optimizer class or name, whose states count in memory.
        loss_fn: `loss_fn(output, target)` for a model that returns no loss; `target` is then
            the keyword input of that name or the last positional one.
        training: plan forward and backward, else inference.
        cache: look for the plan in `$AUTOPAR_CACHE_DIR` first, and keep it there.
        precision: "bf16" or "fp16" computes on casts of the parameters, which stay as they are, and
            of floating inputs; None or "fp32" runs the model as it is.

    Raises:
        TraceError: the model cannot be captured.
        ConstraintError: a constraint is unknown, matches nothing or cannot hold.
        InfeasiblePlanError: nothing fits; carries the smallest limit that would.
    """
    described = cluster if isinstance(cluster, Cluster) else Cluster.from_mesh(cluster)
    parsed = Constraints.parse(constraints)
    traced = traced_for(
        model,
        example_inputs,
        constraints=parsed,
        training=training,
        loss_fn=loss_fn,
        precision=precision,
    )
    found = _solved(traced, described, parsed, memory_limit, optimizer, cache)
    emit(traced, found, [0] * len(found.mesh_shape))
    return found


def traced_for(
    model: nn.Module,
    example_inputs: Any,
    *,
    constraints: Constraints,
    training: bool,
    loss_fn: Callable[..., Any] | None,
    precision: str | None = None,
) -> TracedModel:
    """The graph that `plan` solves for these arguments: folded where the pins allow it."""
    return trace(
        model,
        example_inputs,
        training=training,
        loss_fn=loss_fn,
        fold=_may_fold(model, constraints),
        precision=precision,
    )


def _solved(
    traced: TracedModel,
    cluster: Cluster,
    constraints: Constraints,
    memory_limit: int | None,
    optimizer: object,
    cache: bool,
) -> Plan:
    """The plan from the cache, or solved and kept there."""
    plans = PlanCache() if cache else None
    key = plans.key(traced, cluster, constraints, memory_limit, optimizer) if plans else ""
    known = plans.get(key) if plans else None
    if known is not None:
        return known
    from autopar.solver.solve import solve

    found = solve(
        traced, cluster, constraints=constraints, memory_limit=memory_limit, optimizer=optimizer
    )
    if plans is not None:
        plans.put(key, found)
    return found


def _may_fold(model: nn.Module, constraints: Constraints) -> bool:
    """False where a pin tells apart blocks that would share one choice."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    matches = {glob: fnmatch.filter(names, glob) for glob in constraints.params}
    return same_for_all_instances(matches, find_repeats(model))


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    example_inputs: Any = None,
    *,
    constraints: ConstraintsLike = None,
    plan: Plan | str | Path | None = None,
    memory_limit: int | None = None,
    optimizer: object = "adamw",
    loss_fn: Callable[..., Any] | None = None,
    init_weights: Callable[[nn.Module], Any] | None = None,
    cluster: Cluster | None = None,
    seed: int | None = None,
    cache: bool = True,
    precision: str | None = None,
) -> ParallelModule:
    """Turn a module into one that trains on all devices of a mesh. Call it on every rank.

    Args:
        model: an unmodified module. With values, those of the mesh's first rank are sharded; on
            meta, each rank initialises only what it holds.
        mesh: device mesh of any number of axes, covering the whole world.
        example_inputs: tuple or dict of tensors with the global batch; without it, the first call
            plans.
        constraints, memory_limit, optimizer, loss_fn, cache, precision: see `autopar.plan`; a
            given plan brings its precision.
        plan: a plan or its file, instead of solving.
        init_weights: called with each module of a meta model, on the CPU, to fill its tensors.
        cluster: what the mesh is made of; default: described from the mesh.
        seed: of dropout; default: the first rank's `torch.initial_seed()`.

    Raises:
        AutoparError: the mesh does not cover the world, a parameter is on the wrong device, or
            ranks hold different models.
        PlanMismatchError: `plan` is for another model, mesh, input or precision.
    """
    _check_arguments(model, mesh, memory_limit)
    _check_world(mesh)
    guard_optimizers()
    given, parsed, base = _agreed_settings(model, mesh, plan, constraints, seed, precision)
    if given is not None:
        precision = given.precision
    planner = _Planner(
        model,
        mesh,
        given,
        parsed,
        memory_limit,
        optimizer,
        loss_fn,
        cluster,
        cache,
        precision,
    )

    def create(chosen: Plan) -> Any:
        planned = planner.device_mesh(chosen)
        coords = planned.get_coordinate()
        assert coords is not None
        parameters, buffers = materialize(model, chosen, planned, tuple(coords), init_weights, base)
        return planned, parameters, buffers

    module = ParallelModule(planner.compile, mesh, create, _names(model), base)
    module.train(model.training)
    if example_inputs is not None:
        args, kwargs = normalize_inputs(example_inputs)
        signature = (model.training, model.training, input_signature(args, kwargs))
        step = planner.compile(args, kwargs, model.training, model.training)
        module.install(step, signature)
    else:
        module.reserve(model, mesh)
    return module


def _check_arguments(model: nn.Module, mesh: object, memory_limit: object) -> None:
    if isinstance(model, ParallelModule):
        raise AutoparError("the model is parallel already; pass the module that it was made from")
    if not all(hasattr(mesh, name) for name in ("mesh", "size", "device_type")):
        raise AutoparError(
            f"mesh is a {type(mesh).__name__}; pass a DeviceMesh, such as "
            "torch.distributed.device_mesh.init_device_mesh('cpu', (4,))"
        )
    if memory_limit is not None and not isinstance(memory_limit, (int, float)):
        raise AutoparError(f"memory_limit is {memory_limit!r}; pass a number of bytes per device")


def _check_world(mesh: DeviceMesh) -> None:
    if not dist.is_initialized():
        raise AutoparError(
            "no process group: start the script with torchrun, and create the mesh with "
            "torch.distributed.device_mesh.init_device_mesh"
        )
    world = dist.get_world_size()
    if mesh.size() != world:
        raise AutoparError(
            f"the mesh has {mesh.size()} devices {tuple(mesh.mesh.shape)}, the world {world} "
            "ranks: make a mesh of all ranks"
        )


def _agreed_settings(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Plan | str | Path | None,
    constraints: ConstraintsLike,
    seed: int | None,
    precision: str | None,
) -> tuple[Plan | None, Constraints, int]:
    """Plan, constraints and seed; all ranks stop where one has an error or another model."""
    given: Plan | None = None
    parsed = Constraints()
    failure: Exception | None = None
    try:
        check_devices(model, mesh.device_type)
        given = Plan.load(plan) if isinstance(plan, (str, Path)) else plan
        parsed = Constraints.parse(constraints)
        low_dtype(precision)
        _check_precision(given, precision)
    except (AutoparError, OSError) as error:
        failure = error
    mine: dict[str, Any] = {"the model's class": type(model).__name__}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        mine[name] = (tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad)
    if given is not None:
        # ranks may each have solved it: in other seconds
        same = {k: v for k, v in given.to_dict().items() if k != "solver"}
        text = json.dumps(same, sort_keys=True)
        mine["the plan"] = hashlib.sha256(text.encode()).hexdigest()[:16]
    mine["the constraints"] = parsed.to_dict()
    mine["the precision"] = precision
    agree(failure, mine)
    box = [(torch.initial_seed() if seed is None else seed) % (1 << 48)]
    if mesh.size() > 1:
        dist.broadcast_object_list(box, src=int(mesh.mesh.flatten()[0]))
    return given, parsed, int(box[0])


def _check_precision(given: Plan | None, precision: str | None) -> None:
    if given is not None and precision not in (None, given.precision):
        raise PlanMismatchError(
            f"the plan computes in {given.precision}, not in {precision}: plan again, or leave "
            "precision= out"
        )


def _names(model: nn.Module) -> tuple[StateName, ...]:
    """Every FQN of the model's state in its order, tied ones too."""
    transient = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
    owners: dict[int, str] = {}
    return tuple(
        StateName(
            name=name, owner=owners.setdefault(id(tensor), name), persistent=name not in transient
        )
        for name, tensor in (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        )
    )


class _Planner:
    """Compiles a step for each input signature of one parallel module."""

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        given: Plan | None,
        constraints: Constraints,
        memory_limit: int | None,
        optimizer: object,
        loss_fn: Callable[..., Any] | None,
        cluster: Cluster | None,
        cache: bool,
        precision: str | None,
    ) -> None:
        self.model = model
        self.mesh = mesh
        self.first = given
        self.given = given
        self.constraints = constraints
        self.memory_limit = memory_limit
        self.optimizer = optimizer
        self.loss_fn = loss_fn
        self.cluster = cluster
        self.cache = cache
        self.precision = precision
        self._mesh_of: dict[tuple[int, ...], DeviceMesh] = {tuple(mesh.mesh.shape): mesh}

    def device_mesh(self, chosen: Plan) -> DeviceMesh:
        """The user's mesh, or the same ranks in the shape that the plan wants."""
        shape = chosen.mesh_shape
        if shape not in self._mesh_of:
            ranks = self.mesh.mesh.reshape(shape)
            self._mesh_of[shape] = DeviceMesh(
                self.mesh.device_type, ranks, mesh_dim_names=chosen.axis_names
            )
        return self._mesh_of[shape]

    def compile(self, args: Any, kwargs: Any, training: bool, mode: bool) -> CompiledStep:
        """Trace, plan (rank 0 decides) and emit for one input signature.

        Args:
            args, kwargs: the global batch.
            training: with gradients.
            mode: the module's training flag.
        """
        if mode != self.model.training:
            self.model.train(mode)
        traced, chosen = self._planned(args, kwargs, training)
        planned = self.device_mesh(chosen)
        coords = planned.get_coordinate()
        assert coords is not None
        groups = [planned.get_group(i).group_name for i in range(planned.ndim)]
        program = emit(traced, chosen, coords, group_names=groups, device=self.mesh.device_type)
        return CompiledStep(traced=traced, plan=chosen, program=program)

    def _planned(self, args: Any, kwargs: Any, training: bool) -> tuple[TracedModel, Plan]:
        """The whole graph and its plan, chosen on the folded graph where there is one."""
        given = self.given
        if given is None:
            fold = self.first is None and _may_fold(self.model, self.constraints)
        else:
            fold = bool(given.repeats)
        traced = self._traced(args, kwargs, training, fold)
        chosen = self._choose(traced)
        if not traced.repeats:
            return traced, chosen
        whole = self._traced(args, kwargs, training, False)
        try:
            return whole, unfolded(chosen, traced, whole)
        except PlanMismatchError:
            if given is not None:
                raise
        # blocks that look alike but compute different things: each has its own choice
        self.first = None
        return whole, self._choose(whole)

    def _traced(self, args: Any, kwargs: Any, training: bool, fold: bool) -> TracedModel:
        """The graph, the same on all ranks."""
        traced: TracedModel | None = None
        failure: Exception | None = None
        try:
            if args and kwargs:
                raise AutoparError("pass the batch either by position or by keyword, not both")
            inputs = pytree.tree_map_only(Tensor, _as_example, (args, kwargs))
            example = (*inputs[0],) if inputs[0] else inputs[1]
            traced = trace(
                self.model,
                example,
                training=training,
                loss_fn=self.loss_fn,
                fold=fold,
                precision=self.precision,
            )
        except Exception as error:  # whatever it is, the other ranks must hear of it
            failure = error
        agree(failure, {} if traced is None else _describe(traced))
        assert traced is not None
        return traced

    def _choose(self, traced: TracedModel) -> Plan:
        if self.given is not None:
            chosen, self.given = self.given, None
            self._check_given(chosen, traced)
            self.first = chosen
            return chosen
        box: list[Any] = [None]
        src = int(self.mesh.mesh.flatten()[0])
        failure: Exception | None = None
        if dist.get_rank() == src:
            try:
                box = [self._solve(traced)]
            except AutoparError as error:
                box = [error]
            except Exception as error:
                failure = error
                box = [AutoparError(f"rank {src} failed to plan: {type(error).__name__}: {error}")]
        if self.mesh.size() > 1:
            dist.broadcast_object_list(box, src=src)
        if failure is not None:
            raise failure
        chosen = box[0]
        if isinstance(chosen, AutoparError):
            raise chosen
        assert isinstance(chosen, Plan)
        if self.first is None:
            self.first = chosen
        return chosen

    def _solve(self, traced: TracedModel) -> Plan:
        described = self.cluster or Cluster.from_mesh(self.mesh)
        constraints = self.constraints
        if self.first is not None:
            described = described.with_mesh_shape(self.first.mesh_shape, self.first.axis_names)
            constraints = Constraints(
                params={
                    name: tuple(p.short for p in layout)
                    for name, layout in self.first.parameters.items()
                }
            )
        return _solved(
            traced, described, constraints, self.memory_limit, self.optimizer, self.cache
        )

    def _check_given(self, chosen: Plan, traced: TracedModel) -> None:
        total = 1
        for size in chosen.mesh_shape:
            total *= size
        if total != self.mesh.size():
            raise PlanMismatchError(
                f"the plan is for {total} devices {chosen.mesh_shape}, the mesh has "
                f"{self.mesh.size()} {tuple(self.mesh.mesh.shape)}"
            )
        shapes = every_instance({s.target: s.shape for s in traced.parameters()}, traced.repeats)
        for name in sorted({*shapes, *chosen.shapes}):
            if shapes.get(name) != chosen.shapes.get(name):
                raise PlanMismatchError(
                    f"parameter {name} has shape {shapes.get(name)} in the model and "
                    f"{chosen.shapes.get(name)} in the plan"
                )


def _as_example(value: Tensor) -> Tensor:
    """A stand-in of the global shape; nothing of the batch is kept."""
    return (
        torch.empty(value.shape, dtype=value.dtype, device="meta")
        if value.is_meta
        else (torch.zeros(value.shape, dtype=value.dtype))
    )


def _describe(traced: TracedModel) -> dict[str, Any]:
    return {
        **{s.target: (s.shape, str(s.dtype)) for s in traced.inputs},
        "the number of ops": len(traced.graph.nodes),
        "the graph": traced.fingerprint(),
    }
