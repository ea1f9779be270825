"""DTensors of an optimizer's step whose sums over shards are reduced at once.

A norm or a mean over a sharded dim is a DTensor that is partial: each rank has that of its shard.
Torch would reduce it at the next op, but not in place, and `.item()` returns this rank's part
(torch 2.13). So while an optimizer that is not elementwise steps, its parameters, their gradients
and its states are of a class that reduces such results first. `torch.optim.Adafactor` needs it:

    u = g / sqrt(r c / mean(r))        p -= max(eps2, rms(p)) rho u / max(1, rms(u) / d)

with a row's mean of g² in r and a column's in c (Shazeer and Stern 2018, arXiv 1804.04235). Here r
is sharded as the rows of g are, c as its columns, so that r c has the shards of g: ranks send no
more than a row, a column or a number. Left alone, torch would have r and c whole on every rank, and
gather g.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from autopar._dtensors import dtensor_like, layout_of
from autopar.core.placement import Layout, Replicate
from autopar.runtime.state import to_dtensor

__all__ = ["Summed", "dress", "layout_of_sums", "undress"]

_DRESSED = "_autopar_dressed"
_PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__}
_FOREACH = "_foreach_"


class Summed(DTensor):
    """A DTensor no result of which is partial."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            found = _of_shards(func, args, kwargs or {})
            return pytree.tree_map_only(DTensor, _summed, found)


def _of_shards(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What a function yields, without communication where torch would gather shards."""
    if len(args) == 2 and isinstance(args[0], DTensor):
        if func is Tensor.new_zeros and isinstance(args[1], list | tuple):
            return _zeros(args[0], tuple(args[1]), kwargs)
        if func in _PRODUCTS and not kwargs and (found := _outer(*args)) is not None:
            return found
    try:
        return func(*args, **kwargs)
    except NotImplementedError:
        name = getattr(func, "__name__", "")
        if not name.startswith(_FOREACH):
            raise
        # torch 2.11 has no `_foreach_lerp_` and `_foreach_rsqrt_` of DTensors
        single: Callable[..., Any] = getattr(Tensor, name.removeprefix(_FOREACH))
        lists = [a if isinstance(a, list | tuple) else [a] * len(args[0]) for a in args]
        return [single(*given, **kwargs) for given in zip(*lists, strict=True)]


def _summed(value: DTensor) -> DTensor:
    """The value itself, or its sum; of this class."""
    if any(p.is_partial() for p in value.placements):
        value = _whole(value)
    if type(value) is DTensor:
        _become(value, Summed)
    return value


def _become(tensor: DTensor, kind: type[DTensor]) -> None:
    tensor.__class__ = kind


def _whole(value: DTensor) -> DTensor:
    """Reduced on the mesh's devices, where its ranks can talk, and where it was before."""
    placements = [TorchReplicate() if p.is_partial() else p for p in value.placements]
    local, there = value._local_tensor, value.device_mesh.device_type
    if local.device.type == there:
        return value.redistribute(placements=placements)
    found = dtensor_like(local.to(there), value).redistribute(placements=placements)
    return dtensor_like(found._local_tensor.to(local.device), found)


def layout_of_sums(shape: Sequence[int], source: DTensor) -> Layout:
    """Placements for sums over dims of a tensor, kept with size 1: the source's on other dims."""
    same = len(shape) == source.dim()
    return tuple(
        p if not p.is_shard or (same and shape[p.dim] == source.shape[p.dim]) else Replicate()
        for p in layout_of(source.placements)
    )


def _zeros(like: DTensor, shape: tuple[int, ...], options: dict[str, Any]) -> DTensor:
    layout, local = layout_of_sums(shape, like), like._local_tensor
    sharded = {p.dim for p in layout if p.is_shard}
    here = [local.shape[dim] if dim in sharded else size for dim, size in enumerate(shape)]
    return to_dtensor(local.new_zeros(here, **options), shape, layout, like.device_mesh)


def _outer(column: DTensor, row: Any) -> DTensor | None:
    """`(…, n, 1) @ (…, 1, m)` as each rank's product of its shards; None where it is not that."""
    if (
        not isinstance(row, DTensor)
        or column.dim() != row.dim()
        or column.dim() < 2
        or column.device_mesh != row.device_mesh
    ):
        return None
    if column.shape[-1] != 1 or row.shape[-2] != 1 or column.shape[:-2] != row.shape[:-2]:
        return None
    layout, last = [], column.dim() - 1
    for ours, theirs in zip(layout_of(column.placements), layout_of(row.placements), strict=True):
        if ours.is_partial or theirs.is_partial:
            return None
        by_batch = any(p.is_shard and p.dim < last - 1 for p in (ours, theirs))
        if ours != theirs and (by_batch or (ours.is_shard and theirs.is_shard)):
            return None
        layout.append(ours if ours.is_shard else theirs)
    shape = (*column.shape[:-1], row.shape[-1])
    product = column._local_tensor * row._local_tensor
    return to_dtensor(product, shape, tuple(layout), column.device_mesh)


def dress(optimizer: Optimizer) -> None:
    """Let the DTensors that an optimizer holds be `Summed`, until `undress`."""
    kinds: list[tuple[DTensor, type[DTensor]]] = optimizer.__dict__.setdefault(_DRESSED, [])
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            states = pytree.tree_leaves(optimizer.state.get(parameter))
            for tensor in (parameter, parameter.grad, *states):
                if isinstance(tensor, DTensor) and not isinstance(tensor, Summed):
                    kinds.append((tensor, type(tensor)))
                    _become(tensor, Summed)


def undress(optimizer: Optimizer) -> None:
    """Undo `dress`, of what has become a state meanwhile too."""
    kinds: list[tuple[DTensor, type[DTensor]]] = optimizer.__dict__.pop(_DRESSED, [])
    for tensor, kind in kinds:
        _become(tensor, kind)
    if kinds:
        for value in pytree.tree_leaves(list(optimizer.state.values())):
            if type(value) is Summed:
                _become(value, DTensor)
