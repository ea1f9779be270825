"""A DTensor that is pickled holds one rank's share, and remembers which rank's.

`if rank == 0: torch.save(model.state_dict(), path)` saves the shares of rank 0. Other ranks that
load the file would take them for their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.errors import CheckpointError
from autopar.runtime.agree import agreed

__all__ = ["check_own_shares", "count_as_own", "is_from_a_file", "pickled"]

_RANK = "_autopar_rank"
_HOLDERS = "_autopar_holders"


def pickled(self: DTensor, protocol: Any) -> Any:
    """`DTensor.__reduce_ex__`, with the rank and those of the mesh; the tensor stays as it is."""
    made, (function, kind, args, state) = Tensor.__reduce_ex__(self, protocol)
    if dist.is_initialized():
        own, slots = state if isinstance(state, tuple) else (state, None)
        holders = self.device_mesh.mesh.flatten().tolist()  # a mesh read on another rank is its own
        noted = {**(own or {}), _RANK: dist.get_rank(), _HOLDERS: holders}
        state = noted if slots is None else (noted, slots)
    return made, (function, kind, args, state)


def is_from_a_file(values: Iterable[Any]) -> bool:
    """True if some of them are DTensors that were pickled."""
    return any(isinstance(value, DTensor) and hasattr(value, _RANK) for value in values)


def check_own_shares(named: Mapping[str, Any]) -> None:
    """Refuse what another rank has saved of tensors that are sharded, on all ranks.

    Every rank calls this, where one has something from a file.

    Raises:
        CheckpointError: names them and the rank.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    other = {name: value for name, value in named.items() if _saved_by(value, rank) != rank}
    failure: Exception | None = None
    if other:
        name, value = next(iter(other.items()))
        more = f" and {len(other) - 1} more" if len(other) > 1 else ""
        failure = CheckpointError(
            f"{name}{more} of what is loaded on rank {rank} are shares of rank "
            f"{_saved_by(value, rank)}, which saved them: a rank that calls torch.save holds a "
            "part of each sharded tensor, and in a pipeline those of its stages. Use "
            "autopar.save_checkpoint on every rank; or make a plain model of it on every rank, "
            "plain.load_state_dict(model.state_dict()), and let one save that; or let each rank "
            "save and load a file of its own."
        )
    agreed(failure, {})


def count_as_own(value: DTensor) -> None:
    """Forget that a tensor, of which `check_own_shares` has no complaint, was pickled."""
    for note in (_RANK, _HOLDERS):
        value.__dict__.pop(note, None)


def _saved_by(value: Any, rank: int) -> int:
    """The rank whose share a tensor is; this one where it holds the same."""
    if not isinstance(value, DTensor):
        return rank
    if rank in getattr(value, _HOLDERS, [rank]) and all(p.is_replicate() for p in value.placements):
        return rank
    return int(getattr(value, _RANK, rank))
