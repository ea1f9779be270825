"""`check_same_batch`: every rank passes the global batch, not a batch of its own."""

from __future__ import annotations

import base64
import io
import itertools
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar._compat import default_store
from autopar.errors import AutoparError
from autopar.runtime.agree import wait_for_all

__all__ = ["check_same_batch"]

_SAMPLED = 4096  # elements of a tensor that are compared
_NEAR = 1e-2  # of the largest, for floats: ranks may have computed them, with other rounding

_calls = itertools.count()

_Sample: TypeAlias = tuple[Tensor, float]


def check_same_batch(args: Any, kwargs: Any) -> None:
    """Compare the tensors of a batch with those of rank 0, on a sample of each.

    Every rank of the world calls it. Samples go through the store of the process group: the step
    itself communicates what its plan says and nothing else. Shares from `shard_dataloader` are not
    compared.

    Raises:
        AutoparError: on every rank, if one has other values.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    leaves, _ = pytree.tree_flatten_with_path(kwargs or args)
    mine = {
        pytree.keystr(path): _sample(value)
        for path, value in leaves
        if isinstance(value, Tensor) and not isinstance(value, DTensor)
    }
    store, rank, key = default_store(), dist.get_rank(), f"autopar/batch/{next(_calls)}"
    if rank == 0:
        store.set(f"{key}/first", _packed(mine))
    wait_for_all("compare their batches")
    first = mine if rank == 0 else _unpacked(store.get(f"{key}/first"))
    other = next((name for name in mine if not _near(mine[name], first[name])), None)
    if other is not None:
        told = (
            f"rank {rank} passes another batch than rank 0: the values of input {other} differ. "
            "Every rank passes the whole global batch, and autopar takes the rank's share of it: "
            "seed the shuffling alike and leave DistributedSampler out, broadcast the batch, or "
            "load shares with model.shard_dataloader(loader)"
        )
        store.compare_set(f"{key}/other", "", told)
    wait_for_all("compare their batches")
    if store.check([f"{key}/other"]):
        raise AutoparError(store.get(f"{key}/other").decode())
    if rank == 0:
        store.delete_key(f"{key}/first")


def _packed(samples: dict[str, _Sample]) -> str:
    buffer = io.BytesIO()
    torch.save(samples, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def _unpacked(data: bytes) -> dict[str, _Sample]:
    samples: dict[str, _Sample] = torch.load(io.BytesIO(base64.b64decode(data)), weights_only=True)
    return samples


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
