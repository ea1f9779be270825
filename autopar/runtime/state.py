"""Parameters and buffers of a parallel module: from a whole module to one rank's shares."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from autopar._dtensors import dtensor_placements
from autopar.core.placement import Layout
from autopar.core.plan import Plan
from autopar.errors import AutoparError
from autopar.runtime.agree import agree
from autopar.runtime.initialize import InitWeights, initial_values
from autopar.runtime.shards import take_shard

__all__ = ["check_devices", "materialize", "share_like", "to_dtensor"]


def check_devices(model: nn.Module, device_type: str) -> bool:
    """True if the model is on the meta device.

    Raises:
        AutoparError: a parameter or buffer is on a device that is neither the mesh's, the CPU
            nor meta, or some are on meta and some are not.
    """
    meta: list[str] = []
    real: list[str] = []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        (meta if tensor.is_meta else real).append(name)
        if tensor.device.type not in ("meta", "cpu", device_type):
            raise AutoparError(
                f"{name} is on {tensor.device}, but the mesh is of {device_type} devices: move the "
                f"model to {device_type}, cpu or meta before autopar.parallelize"
            )
    parameters = dict(model.named_parameters())
    if meta and any(name in parameters for name in real):
        first = next(name for name in real if name in parameters)
        raise AutoparError(
            f"{meta[0]} is on meta but {first} is on {parameters[first].device}: "
            "put the whole model on one device"
        )
    return bool(meta)


def to_dtensor(local: Tensor, shape: tuple[int, ...], layout: Layout, mesh: DeviceMesh) -> DTensor:
    """Wrap one rank's share as the DTensor of the whole."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local,
        mesh,
        dtensor_placements(layout),
        run_check=False,
        shape=torch.Size(shape),
        stride=stride,
    )


def share_like(full: Tensor, like: DTensor) -> Tensor:
    """This rank's share of a tensor placed as another is, by torch's own reckoning; maybe a view.

    Torch makes strided shards by itself, as of a view, which our layouts do not say.
    """
    whole = [Replicate()] * like.device_mesh.ndim
    found = DTensor.from_local(full, like.device_mesh, whole, run_check=False)
    return found.redistribute(placements=like.placements)._local_tensor


def materialize(
    model: nn.Module,
    plan: Plan,
    mesh: DeviceMesh,
    coords: tuple[int, ...],
    init_weights: InitWeights | None,
    seed: int,
) -> tuple[dict[str, nn.Parameter], dict[str, Tensor]]:
    """This rank's parameters (DTensors) and buffers, by FQN, each tied one once.

    A rank of a pipeline has those of its stages, which `plan.parameters` then names.

    A model with values is sharded from those of the first rank. A model on meta is
    initialised on the CPU a few modules at a time, those that this rank holds a share of.

    Raises:
        AutoparError: on all ranks, where a tensor of one is not initialised.
    """
    device = torch.device(mesh.device_type)
    on_meta = check_devices(model, mesh.device_type)
    trainable = {name: p.requires_grad for name, p in model.named_parameters()}
    parameters: dict[str, nn.Parameter] = {}
    buffers: dict[str, Tensor] = {}

    def values() -> Iterator[tuple[str, Tensor, str]]:
        if not on_meta:
            yield from _broadcast(model, mesh)
            return
        failure: Exception | None = None
        try:
            yield from initial_values(model, init_weights, seed, plan.parameters)
        except Exception as error:  # of a user's initialiser, too: other ranks may not run it
            failure = error
        agree(failure, {}, "initialise parameters")

    for name, value, kind in values():
        if kind == "buffer":
            buffers[name] = value.to(device)
            continue
        layout = plan.parameters.get(name, ())
        if not layout and plan.pipeline is not None:
            continue
        if not layout:
            raise AutoparError(f"the plan has no placement for parameter {name}")
        local = take_shard(value, layout, plan.mesh_shape, coords).to(device).contiguous()
        tensor = to_dtensor(local, tuple(value.shape), layout, mesh)
        parameters[name] = nn.Parameter(tensor, requires_grad=trainable[name])
    # in the module's own order, which optimizers number parameters by
    return {name: parameters[name] for name in trainable if name in parameters}, buffers


def _broadcast(model: nn.Module, mesh: DeviceMesh) -> Iterator[tuple[str, Tensor, str]]:
    """Every tensor of the model as the first rank has it."""
    device = torch.device(mesh.device_type)
    world = dist.get_world_size()
    # the mesh of a pipeline's stage is a part of the world
    first = int(mesh.mesh.flatten()[0]) if mesh.size() == world else 0
    for kind, named in (
        ("parameter", model.named_parameters()),
        ("buffer", model.named_buffers()),
    ):
        for name, tensor in named:
            value = tensor.detach().to(device, copy=True).contiguous()
            if world > 1:
                dist.broadcast(value, src=first)
            yield name, value, kind
