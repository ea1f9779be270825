"""The global norm of sharded gradients, and clipping by it.

    ‖g‖_p = ( Σ over tensors and shards of Σ |x|^p )^(1/p)

Each of c copies of a shard counts as 1/c of it. So a norm takes one all-reduce of one number,
whatever the placements are, and what is not finite on one rank is not finite in the norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from autopar.runtime.lost import naming_lost_ranks

__all__ = ["clip_gradients", "collective_device", "global_norm", "local_gradients", "total_norm"]


def local_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """This rank's part of each gradient that there is; writing to it writes to the gradient."""
    found = (p.grad for p in parameters)
    return [g.to_local() if isinstance(g, DTensor) else g for g in found if g is not None]


def collective_device() -> torch.device:
    """Where a rank without gradients makes the number that it adds to the others'."""
    if dist.is_initialized() and "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def global_norm(parameters: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients as one vector, the same on every rank.

    Every rank calls this, also one whose parameters have no gradients.

    Args:
        parameters: DTensors, or tensors that are the same on all ranks.
        norm_type: p, positive or infinite.

    Returns:
        In fp32, or in the widest dtype of this rank's gradients.
    """
    parameters = list(parameters)
    wide = torch.float32
    for parameter in parameters:
        if parameter.grad is not None and not parameter.grad.is_complex():
            wide = torch.promote_types(wide, parameter.grad.dtype)
    return total_norm(parameters, norm_type).to(wide)


@torch.no_grad()
def total_norm(parameters: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """`global_norm` in fp64."""
    if not norm_type > 0:
        raise AutoparError(f"the norm of order {norm_type} is not offered: give p > 0 or inf")
    parts = [_share(p.grad, norm_type) for p in parameters if p.grad is not None]
    device = parts[0].device if parts else collective_device()
    total = torch.zeros((), dtype=torch.float64, device=device)
    infinite = math.isinf(norm_type)
    if parts:
        stacked = torch.stack([part.to(torch.float64) for part in parts])
        total = stacked.amax() if infinite else stacked.sum()
    if dist.is_initialized() and dist.get_world_size() > 1:
        with naming_lost_ranks("in the norm of all gradients"):
            dist.all_reduce(total, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM)
    return total if infinite else total ** (1.0 / norm_type)


def _share(grad: Tensor, norm_type: float) -> Tensor:
    """What this rank adds for one gradient: its part of Σ|x|^p, or the largest |x|."""
    local = grad
    copies = dist.get_world_size() if dist.is_initialized() else 1
    if isinstance(grad, DTensor):
        sizes = zip(grad.device_mesh.shape, grad.placements, strict=True)
        copies = math.prod(size for size, placement in sizes if placement.is_replicate())
        local = grad.to_local()
    if not local.numel():
        return torch.zeros((), device=local.device)
    wide = torch.promote_types(local.dtype, torch.float32)
    norm = torch.linalg.vector_norm(local, norm_type, dtype=wide).to(torch.float64)
    return norm if math.isinf(norm_type) else norm**norm_type / copies


def clip_gradients(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients in place so that their global norm is at most `max_norm`.

    As `torch.nn.utils.clip_grad_norm_`, with one all-reduce in all.

    Returns:
        The norm before clipping.

    Raises:
        AutoparError: the norm is not finite, where `error_if_nonfinite` asks for it; on all ranks.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    norm = global_norm(parameters, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise AutoparError(f"the gradients' norm of order {norm_type} is {norm.item()}")
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    with torch.no_grad():
        for local in local_gradients(parameters):
            local.mul_(factor.to(local.device))
    return norm
