"""`parallelize` and `plan`: what users call. Ties the packages together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.codegen.fusion import Fusion
from autopar.codegen.passes import check_passes
from autopar.core import extensions
from autopar.core.constraints import NO_PIPELINE, Constraints
from autopar.core.made_for import check_is_plan
from autopar.core.plan import Plan
from autopar.core.units import format_bytes, parse_bytes, parse_seconds
from autopar.cost_model import Cluster
from autopar.cost_model.memory import check_optimizer, optimizer_text
from autopar.errors import AutoparError, PlanMismatchError
from autopar.planning import Planner, Settings, traced_for
from autopar.runtime.agree import agree
from autopar.runtime.children import as_in
from autopar.runtime.inductor import check_backend
from autopar.runtime.lost import beat
from autopar.runtime.module import ParallelModule
from autopar.runtime.optimizers import guard_optimizers
from autopar.runtime.state import check_devices
from autopar.step_plans import StepPlans
from autopar.tracer.accepted import check_model
from autopar.tracer.precision import low_dtype, sum_dtype
from autopar.tracer.scopes import values_in_reach
from autopar.tracer.trace import normalize_inputs

__all__ = ["load_plan", "parallelize", "plan"]

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
    memory_limit: float | str | None = None,
    optimizer: object = "adamw",
    loss_fn: Callable[..., Any] | None = None,
    training: bool = True,
    cache: bool = True,
    precision: str | None = None,
    reduce_dtype: str | None = None,
    fusion: bool | Mapping[str, Any] | None = None,
    time_limit: float | None = None,
) -> Plan:
    """Plan a training step. Needs no devices and no process group.

    Args:
        model: an unmodified module, on any device including meta.
        cluster: the hardware to plan for: a `Cluster`, or a live `DeviceMesh` to describe.
        example_inputs: the global batch, as a tuple of positional or a dict of keyword arguments of
            `model.forward`. The plan holds for batches of the same shapes and dtypes.
        constraints: what to pin, as a dict or `Constraints`; the solver chooses the rest.
        memory_limit: per device, in bytes or as text such as "16GiB"; default: the device's memory.
        optimizer: torch optimizer class, instance or name, whose states count as memory. A class
            that is not known counts as Adam does, with a warning.
        loss_fn: `loss_fn(output, target)`, for a model that returns no loss; may be a module
            without parameters, such as `nn.CrossEntropyLoss(weight=...)`. `target` is the keyword
            input of that name, or the last positional one; predictions need none.
        training: plan forward and backward; False plans inference.
        cache: look for the plan in `$AUTOPAR_CACHE_DIR` first, and store it there.
        precision: "bf16" or "fp16" computes on casts of the parameters and of floating inputs, and
            keeps the parameters as they are; None or "fp32" runs the model as it is.
        reduce_dtype: "fp32", "bf16" or "fp16", the dtype in which gradients are summed over
            devices; None lets the solver choose between compute's and the parameter's.
        fusion: which fused kernels will run, as for `parallelize`; ops are priced accordingly.
        time_limit: seconds of searching after which the best plan that is known is taken, with the
            bound that is proved by then; where none is known yet, the search goes on to the first.
            Tracing is not counted. Default: the search runs to its end, which gives the same plan
            each time; one that ends before a limit may give another, as it looks for plans that it
            could end with first.

    Returns:
        The plan: placements of every tensor, predicted seconds and bytes, and the solver's proof.

    Raises:
        TraceError: the model cannot be captured.
        ConstraintError: a constraint is unknown, matches nothing or cannot hold.
        InfeasiblePlanError: no plan fits; carries the smallest limit that a plan was found for.
        AutoparError: another argument is not what it must be.
    """
    limit = _limit(memory_limit)
    return step_plans(
        model,
        cluster,
        example_inputs,
        constraints=constraints,
        optimizer=optimizer,
        loss_fn=loss_fn,
        training=training,
        cache=cache,
        precision=precision,
        reduce_dtype=reduce_dtype,
        fusion=fusion,
        several=False,
        time_limit=parse_seconds(time_limit),
    ).under(limit)


def step_plans(
    model: nn.Module,
    cluster: Cluster | DeviceMesh,
    example_inputs: Any,
    *,
    constraints: ConstraintsLike = None,
    optimizer: object = "adamw",
    loss_fn: Callable[..., Any] | None = None,
    training: bool = True,
    cache: bool = True,
    precision: str | None = None,
    reduce_dtype: str | None = None,
    fusion: bool | Mapping[str, Any] | None = None,
    several: bool = True,
    time_limit: float | None = None,
) -> StepPlans:
    """Plans of one training step under memory limits, one or several; else arguments as `plan`."""
    described = _described(cluster)
    parsed = Constraints.parse(constraints)
    check_optimizer(optimizer)
    traced = traced_for(
        model,
        example_inputs,
        constraints=parsed,
        training=training,
        loss_fn=loss_fn,
        precision=precision,
        reduce_dtype=reduce_dtype,
    )
    fused = Fusion.parse(fusion, torch.device(described.device_type))
    given = (traced, described, parsed, optimizer, cache, fused)
    return StepPlans(*given, several=several, time_limit=time_limit)


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    example_inputs: Any = None,
    *,
    constraints: ConstraintsLike = None,
    plan: Plan | str | Path | None = None,
    memory_limit: float | str | None = None,
    optimizer: object = "adamw",
    loss_fn: Callable[..., Any] | None = None,
    init_weights: Callable[[nn.Module], Any] | None = None,
    cluster: Cluster | None = None,
    seed: int | None = None,
    cache: bool = True,
    precision: str | None = None,
    reduce_dtype: str | None = None,
    backend: str = "eager",
    passes: Collection[str] | None = None,
    fusion: bool | Mapping[str, Any] | None = None,
    time_limit: float | None = None,
) -> ParallelModule:
    """Turn a module into one that trains on all devices of a mesh. Call it on every rank.

    Args:
        model: an unmodified module. If it has values, those of the mesh's first rank are sharded;
            on the meta device, each rank initialises only what it holds.
        mesh: device mesh with any number of axes that covers the whole world.
        example_inputs: the global batch, as for `autopar.plan`; default: the first call plans,
            and never a pipeline, as what a rank of one holds must be known before.
        constraints, memory_limit, optimizer, loss_fn, cache, time_limit: as for `autopar.plan`.
        precision, reduce_dtype: as for `autopar.plan`; a given `plan` brings its own.
        plan: use this plan, or the one in this file, instead of solving.
        init_weights: called with each module of a meta model, on the CPU, to fill its tensors.
        cluster: the hardware that the mesh is made of; default: described from the mesh.
        seed: of dropout; default: the first rank's `torch.initial_seed()`.
        backend: "eager" runs the emitted graphs as they are. "inductor" compiles them with torch's
            Inductor; graphs that it fails on run as they are, with a warning.
        passes: names of the passes over the program, from `autopar.PASSES` and
            "symmetric_memory", which runs only where it is named; the same on every rank. Default:
            `autopar.PASSES`.
        fusion: True or False for the usual fused kernels or none, or a dict: "on", "off" or "only"
            with names of kernels, "dump" with a folder for the sources of generated ones. Default:
            on CUDA only.

    Returns:
        A module that is called with the global batch, as the model is; its parameters are DTensors
        under the model's names.

    Raises:
        AutoparError: the mesh does not cover the world, a parameter is on the wrong device, ranks
            hold different models, or another argument is not what it must be.
        PlanMismatchError: `plan` is for another model, mesh, input or precision, was made under
            other constraints, or needs more than `memory_limit`.
        TraceError, ConstraintError, InfeasiblePlanError: as for `autopar.plan`.
    """
    _check_arguments(model, mesh)
    limit, seconds = _limit(memory_limit), parse_seconds(time_limit)
    if cluster is not None and not isinstance(cluster, Cluster):
        raise AutoparError(_no_cluster(cluster))
    check_backend(backend)
    check_optimizer(optimizer)
    _check_world(mesh)
    beat()
    equal = {
        "precision": precision,
        "reduce_dtype": reduce_dtype,
        "memory_limit": limit,
        "optimizer": optimizer_text(optimizer),
        "backend": backend,
        "passes": passes,
        "time_limit": seconds,
    }
    given, parsed, base = _agreed_settings(model, mesh, plan, constraints, seed, equal)
    guard_optimizers(model)
    if given is not None:
        precision, reduce_dtype = given.precision, given.reduce_dtype
    if example_inputs is None and parsed.pipeline is None:
        # what a rank of a pipeline holds is known only with the plan
        parsed = replace(parsed, pipeline=NO_PIPELINE)
    settings = Settings(
        constraints=parsed,
        memory_limit=limit,
        optimizer=optimizer,
        loss_fn=loss_fn,
        cluster=cluster,
        cache=cache,
        precision=precision,
        reduce_dtype=reduce_dtype,
        backend=backend,
        passes=passes,
        fusion=Fusion.parse(fusion, torch.device(mesh.device_type)),
        time_limit=seconds,
    )
    planner = Planner(model, mesh, given, settings)
    create = partial(planner.hold, init_weights=init_weights, base=base)
    reachable = partial(values_in_reach, model)
    module = ParallelModule(model, planner.compile, mesh, create, base, precision, reachable)
    if example_inputs is None:
        module.reserve(model, mesh)
        return module
    args, kwargs = normalize_inputs(example_inputs)
    with as_in(module):
        step = planner.compile(args, kwargs, model.training)
    module.install(step)
    module.keep(step, args, kwargs, model.training)
    return module


def _check_arguments(model: nn.Module, mesh: object) -> None:
    if isinstance(model, ParallelModule):
        raise AutoparError("the model is parallel already; pass the module that it was made from")
    if not _is_mesh(mesh):
        raise AutoparError(
            f"mesh is a {type(mesh).__name__}; pass a DeviceMesh, such as "
            "torch.distributed.device_mesh.init_device_mesh('cpu', (4,))"
        )


def _is_mesh(value: object) -> bool:
    return all(hasattr(value, name) for name in ("mesh", "size", "device_type"))


def _described(cluster: Cluster | DeviceMesh) -> Cluster:
    """The hardware to plan for, given as such or as a mesh of it."""
    if isinstance(cluster, Cluster):
        return cluster
    if not _is_mesh(cluster):
        raise AutoparError(_no_cluster(cluster))
    return Cluster.from_mesh(cluster)


def _no_cluster(given: object) -> str:
    name = given if isinstance(given, str) else "h100-sxm"
    return (
        f"cluster is a {type(given).__name__}; pass a Cluster, such as "
        f"autopar.Cluster.from_profile({name!r}, nodes=1)"
    )


def _limit(memory_limit: object) -> int | None:
    """Bytes per device; None without a limit of the user's."""
    if memory_limit is None:
        return None
    try:
        return parse_bytes(memory_limit)
    except AutoparError as error:
        raise AutoparError(f"memory_limit: {error}") from None


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
    equal: Mapping[str, Any],
) -> tuple[Plan | None, Constraints, int]:
    """Plan, constraints and seed; all ranks stop where one has an error or another model.

    Args:
        model, mesh, plan, constraints, seed: as for `parallelize`.
        equal: other settings, by name, which must be the same on every rank.
    """
    given: Plan | None = None
    parsed = Constraints()
    failure: Exception | None = None
    extended = ""
    mine: dict[str, Any] = {"the model's class": type(model).__name__}
    try:
        check_model(model)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            mine[name] = (tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad)
        check_devices(model, mesh.device_type)
        given = _loaded(plan)
        if seed is not None and not isinstance(seed, Integral):
            raise AutoparError(f"seed={seed!r} must be a whole number")
        parsed = Constraints.parse(constraints)
        low_dtype(equal["precision"])
        sum_dtype(equal["reduce_dtype"])
        check_passes(equal["passes"])
        _check_given(given, parsed, equal)
        extended = extensions.digest()
    except Exception as error:  # whatever it is, the other ranks must hear of it
        failure = error
    if given is not None:
        mine["the plan"] = given.digest()
    mine["the constraints"] = parsed.to_dict()
    mine |= {f"the {name}": value for name, value in equal.items()}
    mine["what extends autopar"] = extended
    agree(failure, mine, "parallelize a model")
    box = [(torch.initial_seed() if seed is None else seed) % (1 << 48)]
    if mesh.size() > 1:
        dist.broadcast_object_list(box, src=int(mesh.mesh.flatten()[0]))
    return given, parsed, int(box[0])


def _loaded(plan: Plan | str | Path | None) -> Plan | None:
    found = Plan.load(plan) if isinstance(plan, (str, Path)) else plan
    if found is not None:
        check_is_plan(found)
    return found


def _check_given(given: Plan | None, constraints: Constraints, asked: Mapping[str, Any]) -> None:
    """A plan that is given is used as it is: what else is asked for must hold of it."""
    if given is None:
        return
    for name in ("reduce_dtype", "precision"):
        if asked[name] not in (None, getattr(given, name)):
            raise PlanMismatchError(
                f"the plan has {name} {getattr(given, name)}, not {asked[name]}: plan again, or "
                f"leave {name}= out"
            )
    pinned = constraints.to_dict()
    if pinned not in (Constraints().to_dict(), given.constraints):
        raise PlanMismatchError(
            f"the plan was made under the constraints {dict(given.constraints)}, not {pinned}: "
            "plan again, or leave constraints= out"
        )
    peak, limit = given.predicted.peak_memory_bytes, asked["memory_limit"]
    if limit is not None and peak > limit:
        raise PlanMismatchError(
            f"the plan needs {format_bytes(peak)} on each device, more than the memory_limit of "
            f"{format_bytes(limit)}: plan again under that limit"
        )
