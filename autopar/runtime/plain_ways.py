"""Lets scripts use the DTensors that parameters and gradients are as plain tensors.

Torch leaves some uses without effect, or takes a rank's part for the whole (torch 2.13):

- `g.norm().item()` is the norm of this rank's shard, as the sum over ranks is still due.
- `p.data = x` changes nothing: computations use the local tensor underneath.
- `w[0] = 1` and `w[0].zero_()` write to a copy, where `w` is sharded on that dim (`copied_views`).
- `normal_` and its like draw the same numbers for each rank's shard, on a CPU.
- `share_memory_()` ends the process.
- plain tensors next to DTensors, such as a mask next to a weight, are refused.

Here a number is that of the whole tensor, rows are written, draws are those of one device with the
same seed, and a plain tensor counts as the same on every rank. Every rank has to make such a call,
as with everything that communicates (`meeting`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.utils import _pytree as pytree

from autopar._dtensors import (
    by_dtensors_own_way,
    dtensor_like,
    handle_dtensor_op,
    replicate_plain_tensors,
)
from autopar.errors import AutoparError
from autopar.runtime.copied_views import (
    gathered,
    is_whole,
    refuse_gradients,
    replicated,
    showing,
    watch_views,
)
from autopar.runtime.local_step import is_share
from autopar.runtime.meeting import meet
from autopar.runtime.saved_shares import pickled
from autopar.runtime.state import share_like

__all__ = ["go_plain_ways"]

aten = torch.ops.aten

_DRAWN_IN_PLACE = (
    aten.normal_.default,
    aten.uniform_.default,
    aten.bernoulli_.float,
    aten.exponential_.default,
    aten.cauchy_.default,
    aten.geometric_.default,
    aten.log_normal_.default,
    aten.random_.default,
    aten.random_.to,
    getattr(aten.random_, "from"),
)
_DRAWN_LIKE = (
    aten.rand_like.default,
    aten.randn_like.default,
    aten.randint_like.default,
    aten.randint_like.low_dtype,
    aten.bernoulli.default,
)
# what averages of weights, and norms that clip, are made with
_ONTO = (
    aten.add_.Tensor,
    aten.sub_.Tensor,
    aten.mul_.Tensor,
    aten.div_.Tensor,
    aten.lerp_.Scalar,
    aten.lerp_.Tensor,
    aten.addcmul_.default,
    aten.addcdiv_.default,
    aten.clamp_.default,
    aten.clamp_min_.default,
    aten.clamp_max_.default,
    aten.pow_.Scalar,
    aten.sqrt_.default,
    aten._foreach_add_.List,
    aten._foreach_sub_.List,
    aten._foreach_mul_.List,
    aten._foreach_lerp_.Scalar,
    aten._foreach_lerp_.List,
    aten._foreach_copy_.default,
)
# what torch refuses, or leaves a parameter of another shape by, where it is sharded
_ALL_AT_ONCE = (
    aten.cumprod_.default,
    aten.cumsum_.default,
    aten.index_add_.default,
    aten.index_copy_.default,
    aten.index_fill_.int_Scalar,
    aten.index_fill_.int_Tensor,
    aten.index_put_.default,
    aten.index_reduce_.default,
    aten.masked_scatter_.default,
    aten.put_.default,
    aten.scatter_.src,
    aten.scatter_.value,
    aten.scatter_add_.default,
    aten.scatter_reduce_.two,
    aten.tril_.default,
    aten.triu_.default,
)
_VIEWS = ("select", "narrow", "chunk", "split", "unbind", "view", "diagonal")
_BASIC = int | slice | type(None) | type(Ellipsis)  # other indices make copies of plain tensors too


def go_plain_ways() -> None:
    """Let the DTensors of this process behave so, from now on."""
    replicate_plain_tensors()
    _install()


@cache
def _install() -> None:
    handle_dtensor_op(aten._local_scalar_dense.default, _number)
    handle_dtensor_op(aten.copy_.default, _copy)
    for op in (*_DRAWN_IN_PLACE, *_DRAWN_LIKE):
        handle_dtensor_op(op, _drawn)
    for op in (aten.eye.out, aten.eye.m_out):
        handle_dtensor_op(op, _made)
    handle_dtensor_op(aten._is_any_true.default, lambda op, args, kwargs: args[0].any())
    handle_dtensor_op(aten._is_all_true.default, lambda op, args, kwargs: args[0].all())
    handle_dtensor_op(aten.detach_.default, lambda op, args, kwargs: args[0])  # below autograd
    handle_dtensor_op(aten.allclose.default, lambda op, args, kwargs: op(*_whole(args), **kwargs))
    for op in (aten.std.correction, aten.var.correction):
        handle_dtensor_op(op, _of_whole)
    for op in _ONTO:
        handle_dtensor_op(op, _onto)
    for op in _ALL_AT_ONCE:
        handle_dtensor_op(op, _written)
    watch_views()
    ways: dict[str, Any] = {name: showing(getattr(Tensor, name)) for name in _VIEWS}
    ways |= {"__getitem__": _read, "__setitem__": _write, "__format__": _formatted}
    ways |= {
        "fill_diagonal_": _fill_diagonal,
        "numpy": _numpy,
        "tolist": _to_list,
        "share_memory_": _share_memory,
        "is_shared": _is_shared,
        "data": property(_data, _set_data),
    }
    ways |= {"__reduce_ex__": pickled}
    for name, way in ways.items():
        setattr(DTensor, name, way)


def _whole(value: Any) -> Any:
    """The tree with whole tensors in place of DTensors."""
    return pytree.tree_map_only(DTensor, gathered, value)


# --- ops, below autograd ----------------------------------------------------------------------
def _number(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensor: DTensor = args[0]
    if tensor._local_tensor.is_meta:
        raise AutoparError(
            "a parameter of a parallel module has no values before the first call: pass "
            "example_inputs to autopar.parallelize"
        )
    return op(tensor._local_tensor if is_whole(tensor) else gathered(tensor))


def _drawn(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """All random numbers of the whole tensor are drawn, of which this rank keeps its share."""
    tensor: DTensor = args[0]
    local = tensor._local_tensor
    if is_whole(tensor):
        found = op(local, *args[1:], **kwargs)
    else:
        reads = op is aten.bernoulli.default
        full = gathered(tensor) if reads else local.new_empty(tensor.shape)
        found = share_like(op(full, *args[1:], **kwargs), tensor)
    if op in _DRAWN_LIKE:
        return dtensor_like(found, tensor)
    if found is not local:
        local.copy_(found)
    return tensor


def _onto(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Onto plain tensors goes the whole of each DTensor; what is partial is summed before."""
    targets = [x for x in pytree.tree_leaves(args[0]) if isinstance(x, DTensor)]
    if targets:
        for target in targets:
            _sum_in_place(target)
        return by_dtensors_own_way(op, args, kwargs)
    rest, named = _whole((args[1:], kwargs))
    return op(args[0], *rest, **named)


def _written(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What is written at places of the whole tensor, of which this rank keeps its share."""
    target = args[0]
    rest, named = _whole((args[1:], kwargs))
    if not isinstance(target, DTensor):
        return op(target, *rest, **named)
    _sum_in_place(target)
    full = gathered(target).clone()
    op(full, *rest, **named)
    target._local_tensor.copy_(share_like(full, target))
    return target


def _of_whole(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What torch 2.11 takes of each share, and joins as if it were a sum."""
    tensor: DTensor = args[0]
    if not is_whole(tensor):
        meet(tensor.device_mesh)
        tensor = tensor.redistribute(placements=replicated(tensor))
    return by_dtensors_own_way(op, (tensor, *args[1:]), kwargs)


def _made(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What is made into a tensor that is given, as `nn.init.eye_` does."""
    out: DTensor = kwargs["out"]
    out._local_tensor.copy_(share_like(op(*args, out=out._local_tensor.new_empty(out.shape)), out))
    return out


def _sum_in_place(tensor: DTensor) -> None:
    if any(placement.is_partial() for placement in tensor.placements):
        placements = [TorchReplicate() if p.is_partial() else p for p in tensor.placements]
        found = tensor.redistribute(placements=placements)
        tensor._local_tensor, tensor._spec = found._local_tensor, found._spec


def _copy(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Of a plain tensor a DTensor takes its share, and the other way round the whole."""
    target, source = args[0], args[1]
    if isinstance(target, DTensor):
        if isinstance(source, DTensor):
            if source.device_mesh == target.device_mesh:
                return by_dtensors_own_way(op, args, kwargs)
            source = source.full_tensor()
        share = share_like(torch.as_tensor(source).expand(target.shape), target)
        op(target._local_tensor, share, *args[2:], **kwargs)
        return target
    return op(target, _whole(source), *args[2:], **kwargs)


# --- methods ----------------------------------------------------------------------------------
_basic_read = showing(Tensor.__getitem__)


def _read(self: DTensor, index: Any) -> Any:
    parts = index if isinstance(index, tuple) else (index,)
    basic = all(isinstance(part, _BASIC) for part in parts)
    return _basic_read(self, index) if basic else Tensor.__getitem__(self, index)


def _write(self: DTensor, index: Any, value: Any) -> None:
    refuse_gradients(self)
    index, value = _whole((index, value))
    full = gathered(cast(DTensor, self.detach())).clone()
    full[index] = value
    self.copy_(full)


def _fill_diagonal(self: DTensor, fill_value: Any, wrap: bool = False) -> Any:
    refuse_gradients(self)
    full = gathered(cast(DTensor, self.detach())).clone()
    self.copy_(full.fill_diagonal_(fill_value, wrap))
    return self


def _numpy(self: DTensor, *, force: bool = False) -> Any:
    found = gathered(self).numpy(force=force)
    # of a tensor on one device it shows the memory: what is written to a copy would be lost
    found.flags.writeable = found.flags.writeable and is_whole(self)
    return found


def _to_list(self: DTensor) -> Any:
    return gathered(self).tolist()


def _share_memory(self: DTensor) -> Any:
    """What children of this process see is this rank's share; a DTensor has no memory of its own,
    without which torch's own way ends the process."""
    self._local_tensor.share_memory_()
    return self


def _is_shared(self: DTensor) -> bool:
    return self._local_tensor.is_shared()


def _formatted(self: DTensor, spec: str) -> str:
    return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)


def _data(self: DTensor) -> Any:
    return Tensor.data.__get__(self)  # type: ignore[attr-defined]


def _set_data(self: DTensor, value: Tensor) -> None:
    """Values go where a parameter of a parallel module has its own, which programs read."""
    if not is_share(self):
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        return
    if value.shape != self.shape or value.dtype != self.dtype:
        raise AutoparError(
            f"a parameter of shape {tuple(self.shape)} and {self.dtype} is given data of shape "
            f"{tuple(value.shape)} and {value.dtype}, but the step is compiled for the former: "
            "change the model before autopar.parallelize"
        )
    with torch.no_grad():
        self.copy_(value)
