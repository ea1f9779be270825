"""`simulate`: the seconds of a planned step, op by op, from the program that would run."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from autopar.cache import cache_directory
from autopar.codegen.emit import emit
from autopar.codegen.fusion import Fusion
from autopar.core.folding import unfolded
from autopar.core.graph import TracedModel
from autopar.core.made_for import check_is_plan
from autopar.core.placement import local_shape
from autopar.core.plan import Plan
from autopar.cost_model import Cluster
from autopar.cost_model.memory import Offloaded, dtype_bytes
from autopar.cost_model.opdb import OpDatabase
from autopar.cost_model.simulator import Simulation
from autopar.cost_model.simulator import simulate as simulate_program
from autopar.errors import AutoparError
from autopar.search.symmetric_calls import with_symmetric_calls
from autopar.tracer.trace import trace

__all__ = ["simulate"]


def simulate(
    plan: Plan,
    model: nn.Module,
    example_inputs: Any,
    *,
    cluster: Cluster | None = None,
    loss_fn: Any = None,
    ops: bool = False,
    traced: TracedModel | None = None,
    passes: Collection[str] | None = None,
    fusion: Any = None,
) -> Simulation:
    """Simulate a step of a plan's first rank: compute beside communication, then the update.

    Args:
        plan: made for this model and these inputs.
        model: on any device, meta included.
        example_inputs, loss_fn: as for `autopar.plan`.
        cluster: prices ops and collectives; default: the plan's own.
        ops: time each op on the device at hand, and keep what is measured in the cache folder
            (`ops.sqlite`); False prices ops by the cluster's profile.
        traced: the model's whole trace, if at hand, to save the time of another.
        passes: as for `autopar.parallelize`.
        fusion: as for `autopar.parallelize`; None fuses what the plan was priced with.

    Returns:
        Seconds of the step, with the communication that is hidden behind compute and exposed.

    Raises:
        PlanMismatchError: the plan is for another model or input.
        AutoparError: the plan is in microbatches; `plan.predicted` has what was simulated.
    """
    check_is_plan(plan)
    if plan.pipeline is not None:
        raise AutoparError(
            "simulate is for one program a rank; a plan in microbatches was simulated when it was "
            "made: see plan.predicted and plan.pipeline.slots"
        )
    if cluster is not None and not isinstance(cluster, Cluster):
        raise AutoparError(f"cluster is a {type(cluster).__name__}; pass an autopar.Cluster")
    described = cluster or Cluster.from_dict(plan.cluster)
    described = described.with_mesh_shape(plan.mesh_shape, plan.axis_names)
    options: dict[str, Any] = {
        "training": plan.training,
        "loss_fn": loss_fn,
        "precision": plan.precision,
        "reduce_dtype": plan.reduce_dtype,
    }
    whole = traced or trace(model, example_inputs, **options)
    if plan.repeats:
        plan = unfolded(plan, trace(model, example_inputs, fold=True, **options), whole)
    first = [0] * len(plan.mesh_shape)
    fused = Fusion.of(plan) if fusion is None else fusion
    plan = with_symmetric_calls(plan, whole, passes)
    program = emit(whole, plan, first, passes=passes, fusion=fused)
    trainable = {spec.target for spec in whole.parameters() if spec.trainable}
    held = [(_local_bytes(plan, n), plan.dtypes[n]) for n in plan.parameters if n in trainable]
    optimizer = Offloaded(plan.optimizer) if plan.offload == "optimizer" else plan.optimizer
    return simulate_program(
        program.joint.graph,
        described,
        parameter_bytes=held,
        optimizer=optimizer if plan.training else None,
        times=_database(described) if ops else None,
    )


def _local_bytes(plan: Plan, name: str) -> int:
    count = dtype_bytes(plan.dtypes[name])
    for size in local_shape(plan.shapes[name], plan.parameters[name], plan.mesh_shape):
        count *= size
    return count


def _database(cluster: Cluster) -> OpDatabase:
    device = cluster.device
    share = max(1.0, device.concurrent_ranks / device.cores) if device.cores else 1.0
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    return OpDatabase(cache_directory() / "ops.sqlite", kind, share=share)
