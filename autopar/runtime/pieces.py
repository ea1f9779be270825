"""A sharded tensor as boxes of the whole tensor, for reading and writing files.

A rank's share of a strided shard is several boxes: every combination of the runs that it holds of
each dim. A box is a view of the share, so that writing to it writes to the tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar._dtensors import dtensor_placements, layout_of
from autopar.core.placement import Layout, Replicate, is_valid, local_index_runs

__all__ = ["Piece", "evened", "pieces"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor.

    Attributes:
        name: of the tensor.
        shape: of the whole tensor.
        offsets: where the box begins in it.
        value: the box, a view.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    value: Tensor

    @property
    def index(self) -> tuple[slice, ...]:
        """The box as an index of the whole tensor."""
        return tuple(
            slice(start, start + size)
            for start, size in zip(self.offsets, self.value.shape, strict=True)
        )


def evened(tensor: Tensor) -> Tensor:
    """The tensor itself, or whole on every rank where its shards are partial or not even.

    Collective in the second case, which optimizers bring about that reduce a parameter's dims.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    layout = layout_of(tensor.placements)
    even = is_valid(layout, tuple(tensor.shape), tuple(tensor.device_mesh.shape))
    if even and not any(p.is_partial for p in layout):
        return tensor
    whole: Layout = tuple(Replicate() for _ in layout)
    return tensor.redistribute(placements=dtensor_placements(whole))


def pieces(tensors: Mapping[str, Tensor]) -> list[Piece]:
    """What this rank holds of some tensors: a plain tensor whole, a DTensor by its placements."""
    found: list[Piece] = []
    for name, tensor in tensors.items():
        with torch.no_grad():
            found += (
                _sharded(name, tensor) if isinstance(tensor, DTensor) else [_whole(name, tensor)]
            )
    return found


def _whole(name: str, tensor: Tensor) -> Piece:
    return Piece(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor.detach())


def _sharded(name: str, tensor: DTensor) -> list[Piece]:
    layout, mesh = layout_of(tensor.placements), tensor.device_mesh
    coords = mesh.get_coordinate()
    shape = tuple(tensor.shape)
    local = tensor.to_local().detach()
    assert coords is not None
    runs = [
        list(local_index_runs(size, dim, layout, tuple(mesh.shape), coords))
        for dim, size in enumerate(shape)
    ]
    return [
        Piece(name, shape, tuple(start for start, _, _ in box), _view(local, box))
        for box in itertools.product(*(_with_local(r) for r in runs))
    ]


def _with_local(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """`(global start, length, local start)` of each run."""
    ends = itertools.accumulate((length for _, length in runs), initial=0)
    return [(start, length, here) for (start, length), here in zip(runs, ends, strict=False)]


def _view(local: Tensor, box: Sequence[tuple[int, int, int]]) -> Tensor:
    for dim, (_, length, here) in enumerate(box):
        local = local.narrow(dim, here, length)
    return local
