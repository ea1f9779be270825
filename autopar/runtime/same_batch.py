"""`check_same_batch`: every rank passes the global batch, not a batch of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar.errors import AutoparError
from autopar.runtime.agree import agree

__all__ = ["check_same_batch"]

_SAMPLED = 4096  # elements of a tensor that are compared
_NEAR = 1e-2  # of the largest, for floats: ranks may have computed them, with other rounding

_Sample: TypeAlias = tuple[Tensor, float]


def check_same_batch(mesh: DeviceMesh, args: Any, kwargs: Any) -> None:
    """Compare the tensors of a batch with those of the mesh's first rank, on a sample of each.

    Every rank of the world calls it. Shares from `shard_dataloader` are not compared.

    Raises:
        AutoparError: on every rank, if one has other values.
    """
    if not dist.is_initialized() or mesh.size() == 1:
        return
    # a rank that has another step to compile must not be waited for in the broadcast
    agree(None, {"the step of this batch": "known before"})
    leaves, _ = pytree.tree_flatten_with_path(kwargs or args)
    mine = {
        pytree.keystr(path): _sample(value)
        for path, value in leaves
        if isinstance(value, Tensor) and not isinstance(value, DTensor)
    }
    source = int(mesh.mesh.flatten()[0])
    box: list[Mapping[str, _Sample]] = [mine]
    dist.broadcast_object_list(box, src=source)
    other = next((name for name in mine if not _near(mine[name], box[0][name])), None)
    failure = None
    if other is not None:
        failure = AutoparError(
            f"rank {dist.get_rank()} passes another batch than rank {source}: the values of input "
            f"{other} differ. Every rank passes the whole global batch, and autopar takes the "
            "rank's share of it: seed the shuffling alike and leave DistributedSampler out, "
            "broadcast the batch, or load shares with model.shard_dataloader(loader)"
        )
    agree(failure, {})


def _sample(value: Tensor) -> _Sample:
    """Elements at equal distances, and the sum of all, which is made without a copy."""
    flat = value.detach().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    step = max(1, flat.numel() // _SAMPLED)
    total = flat.sum(dtype=torch.float64 if flat.is_floating_point() else torch.int64)
    return flat[::step].cpu(), total.item() / max(1, flat.numel())


def _near(mine: _Sample, first: _Sample) -> bool:
    (some, mean), (others, other_mean) = mine, first
    if not others.is_floating_point():
        return torch.equal(some, others) and mean == other_mean
    some, others = some.double(), others.double()
    finite = others.isfinite()
    if not torch.equal(finite, some.isfinite()):
        return False
    allowed = _NEAR * (others[finite].abs().max().item() if bool(finite.any()) else 0.0)
    apart = (some[finite] - others[finite]).abs()
    return bool((apart <= allowed).all()) and not abs(mean - other_mean) > allowed
