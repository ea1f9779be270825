"""What is a view of a plain tensor and a copy of a DTensor: what is written to it is written there.

`w[0]`, `w.diagonal()` or `torch.split(w, 2)` of a tensor that is sharded on such a dim gathers it
(torch 2.13), and what is written to the result is lost. Here such a copy knows what it is a part
of. Ops are watched below autograd, so that methods, functions, `out=` and `inplace=True` count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, wraps
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.utils import _pytree as pytree

from autopar._dtensors import (
    aliasing_ops,
    asks_subclasses_of_dtensor,
    by_dtensors_own_way,
    dtensor_handler,
    dtensor_like,
    handle_dtensor_op,
)
from autopar.errors import AutoparError
from autopar.runtime.meeting import meet

__all__ = ["gathered", "is_whole", "refuse_gradients", "replicated", "showing", "watch_views"]

aten = torch.ops.aten

_COPYING = (
    aten.diagonal.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unbind.int,
    aten.unfold.default,
    aten.view.default,
)


def watch_views() -> None:
    """Let ops that show a part of a DTensor say so, where they copy it."""
    for op in _COPYING:
        handle_dtensor_op(op, _viewed)


# --- whole tensors ----------------------------------------------------------------------------
def gathered(tensor: DTensor) -> Tensor:
    """The whole of a tensor; every rank has to come."""
    if not is_whole(tensor):
        meet(tensor.device_mesh)
    return tensor.full_tensor()


def is_whole(tensor: DTensor) -> bool:
    """True if every rank holds all of it."""
    return all(placement.is_replicate() for placement in tensor.placements)


def replicated(tensor: DTensor) -> list[TorchReplicate]:
    """Placements of a tensor that is whole everywhere."""
    return [TorchReplicate()] * tensor.device_mesh.ndim


def refuse_gradients(tensor: DTensor) -> None:
    """Raises:
    AutoparError: a write to a part of the tensor would have to be differentiated.
    """
    if torch.is_grad_enabled() and tensor.requires_grad:
        raise AutoparError(
            f"a part of a DTensor of shape {tuple(tensor.shape)} that requires a gradient is "
            "written to: do it under torch.no_grad()"
        )


# --- copies -----------------------------------------------------------------------------------
class _Copied(DTensor):
    """A part of a DTensor that is a copy.

    Attributes:
        base: the tensor that it is a part of.
        show: makes the view of a plain tensor.
    """

    base: DTensor
    show: Callable[[Tensor], Tensor]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as DTensor
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        twins: dict[int, tuple[_Copied, DTensor]] = {}
        bare, named = pytree.tree_map_only(
            _Copied, lambda part: _twin(part, twins), (tuple(args), kwargs or {})
        )
        found = func(*bare, **named)
        for part in _written(func, args, kwargs or {}):
            twin = twins[id(part)][1]
            part._local_tensor, part._spec = twin._local_tensor, twin._spec
            part.write_back()
        if args and isinstance(args[0], _Copied) and _is_view(func):
            _mark(found, args[0], _Show(func, args[1:], kwargs or {}))
        own = {id(twin): part for part, twin in twins.values()}
        return pytree.tree_map_only(DTensor, lambda value: own.get(id(value), value), found)

    def write_back(self) -> None:
        """Put the values where a view would have them."""
        refuse_gradients(self.base)
        full = gathered(self.base).clone()
        self.show(full).copy_(gathered(self))
        self.base.copy_(full)


def _twin(part: _Copied, twins: dict[int, tuple[_Copied, DTensor]]) -> DTensor:
    """The same values as a DTensor that is no part."""
    if id(part) not in twins:
        twins[id(part)] = part, dtensor_like(part._local_tensor, part)
    return twins[id(part)][1]


def _written(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[_Copied]:
    """The parts that an op writes to."""
    for number, argument in enumerate(op._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = args[number] if number < len(args) else kwargs.get(argument.name)
        yield from (part for part in pytree.tree_leaves(given) if isinstance(part, _Copied))


def _is_view(op: Any) -> bool:
    shown = [r.alias_info for r in op._schema.returns if r.alias_info is not None]
    return any(not alias.is_write for alias in shown)


class _Show:
    """The views that a method or an op makes of a plain tensor, or one of them."""

    def __init__(self, method: Callable[..., Any], args: Any, kwargs: Any, number: int = 0) -> None:
        self._call = method, args, kwargs
        self._number = number

    def __call__(self, whole: Tensor) -> Tensor:
        method, args, kwargs = self._call
        found: Tensor = pytree.tree_leaves(method(whole, *args, **kwargs))[self._number]
        return found

    def numbered(self, number: int) -> _Show:
        """One of several."""
        return _Show(*self._call, number)


def _mark(found: Any, base: DTensor, show: _Show) -> None:
    """Let the DTensors among what was found know what they are parts of."""
    _ask_parts()
    for number, part in enumerate(pytree.tree_leaves(found)):
        if isinstance(part, DTensor):
            part.__class__ = _Copied
            copied = cast(_Copied, part)
            copied.base, copied.show = base, show.numbered(number)


@cache
def _ask_parts() -> None:
    """Let torch 2.11, which asks no subclass of DTensor, hand ops on parts to `_Copied`."""
    if not asks_subclasses_of_dtensor():
        for op in aliasing_ops():
            handle_dtensor_op(op, _asking_parts(dtensor_handler(op)))


def _asking_parts(otherwise: Callable[..., Any] | None) -> Callable[..., Any]:
    def run(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if any(isinstance(value, _Copied) for value in pytree.tree_leaves((args, kwargs))):
            return _Copied.__torch_dispatch__(op, (), args, kwargs)
        return (otherwise or by_dtensors_own_way)(op, args, kwargs)

    return run


def _viewed(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A part of a DTensor, below autograd."""
    tensor: DTensor = args[0]
    try:
        found = by_dtensors_own_way(op, args, kwargs)
    except RuntimeError:
        # with gradients it is redistributed above autograd, or not at all
        if is_whole(tensor) or torch.is_grad_enabled():
            raise
        whole = tensor.redistribute(placements=replicated(tensor))
        parts = op(gathered(tensor), *args[1:], **kwargs)
        found = pytree.tree_map_only(
            Tensor,
            lambda part: DTensor.from_local(
                part, whole.device_mesh, whole.placements, run_check=False
            ),
            parts,
        )
    if not is_whole(tensor) and not _shares_memory(found, tensor):
        _mark(found, tensor, _Show(op, args[1:], kwargs))
    return found


def _shares_memory(found: Any, tensor: DTensor) -> bool:
    """True if what an op made of a tensor shows the memory of this rank's share."""
    shown = tensor._local_tensor.untyped_storage()._cdata
    parts = [part for part in pytree.tree_leaves(found) if isinstance(part, DTensor)]
    return all(part._local_tensor.untyped_storage()._cdata == shown for part in parts)


def showing(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that makes views, also where torch cannot tell how they would be sharded."""

    @wraps(method)
    def call(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except RuntimeError:
            if is_whole(self):
                raise
        found = method(self.redistribute(placements=replicated(self)), *args, **kwargs)
        _mark(found, self, _Show(method, args, kwargs))
        return found

    return call
