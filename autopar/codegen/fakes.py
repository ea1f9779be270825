"""Fake values of calls, computed without the overhead of torch's dispatcher and autograd.

A plan is emitted many times while it is made, and most of that time goes into fake values. So what
a call returns is remembered by the metadata of its operands, and made again without running it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from autopar import _compat
from autopar.core.library import FAKES

__all__ = ["fake_call"]

aten = torch.ops.aten

_MOST = 1 << 16  # calls that are kept
_PLAIN = (str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))


class _Made(NamedTuple):
    """A tensor that a call yields.

    Attributes:
        size, stride, dtype, device: of it.
        operand: which of the call's tensors it is a view of; None: it has a storage of its own.
        offset: elements from where that operand begins.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    operand: int | None = None
    offset: int = 0


_known: dict[object, _Made | tuple[_Made, ...]] = {}


class _NotKept(Exception):
    """What a call yields depends on more than metadata that can be compared."""


def fake_call(
    mode: FakeTensorMode, target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """What a call yields on the fake values of its operands.

    Args:
        mode: of the fake values.
        target, args, kwargs: of a call in a graph, whose operands are nodes with fake values.
    """
    given: Any = fx.map_arg((tuple(args), dict(kwargs)), lambda n: n.meta["val"])
    operands, options = given
    if target is operator.getitem:
        return operator.getitem(*operands)
    tensors: list[FakeTensor] = []
    known, shift = _from_start(operands) if target is aten.slice.Tensor else (operands, 0)
    try:
        asked = _key(known, tensors), _key(options, tensors)
    except _NotKept:
        return _called(mode, target, operands, options)
    # only that counts from the start of the storage
    begins = tuple(t.storage_offset() for t in tensors) if target is aten.as_strided.default else ()
    key = (target, torch.get_default_dtype(), begins, *asked)
    made = _known.get(key)
    if made is None:
        result = _called(mode, target, operands, options)
        found = _all_made(result, tensors, shift)
        if found is not None:
            if len(_known) >= _MOST:
                _known.clear()
            _known[key] = found
        return result
    if isinstance(made, _Made):
        return _again(mode, made, tensors, shift)
    return tuple(_again(mode, each, tensors, shift) for each in made)


def _again(mode: FakeTensorMode, made: _Made, tensors: Sequence[FakeTensor], shift: int) -> Any:
    """What was made before, of other operands that are like those."""
    if made.operand is None:
        return _compat.fake_empty(mode, made.size, made.stride, made.dtype, made.device)
    source = tensors[made.operand]
    offset = int(source.storage_offset()) + made.offset + shift
    return _compat.fake_view(mode, source, made.size, made.stride, offset)


def _from_start(operands: tuple[Any, ...]) -> tuple[tuple[Any, ...], int]:
    """A slice as one of as many rows from the first one, and how many elements there are before."""
    if len(operands) != 4 or any(type(n) is not int for n in operands[1:]):
        return operands, 0
    x, dim, start, end = operands
    if not 0 < start < end <= x.shape[dim]:
        return operands, 0
    return (x, dim, 0, end - start), start * x.stride()[dim]


def _called(
    mode: FakeTensorMode, target: Callable[..., Any], operands: Sequence[Any], options: Any
) -> Any:
    if target is aten.reshape.default and not options and _is_plain(operands[0]):
        return _reshaped(mode, *operands)
    with mode:
        return FAKES.get(target, target)(*operands, **options)


def _is_plain(value: FakeTensor) -> bool:
    """True for a tensor of which `_key` says all."""
    try:
        _of_tensor(value)
    except _NotKept:
        return False
    return True


def _reshaped(mode: FakeTensorMode, value: FakeTensor, size: Sequence[int]) -> FakeTensor:
    """`aten.reshape` of such a tensor: the mode would take it apart, which takes milliseconds."""
    inside = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    found = inside.reshape(size)
    size, stride = tuple(found.shape), found.stride()
    if found.untyped_storage()._cdata == inside.untyped_storage()._cdata:
        return _compat.fake_view(mode, value, size, stride, int(value.storage_offset()))
    return _compat.fake_empty(mode, size, stride, value.dtype, value.device)


def _key(value: Any, tensors: list[FakeTensor]) -> object:
    """What can be compared of an argument; its tensors are added to `tensors`.

    Raises:
        _NotKept: that is not all of it.
    """
    if isinstance(value, FakeTensor):
        tensors.append(value)
        return _of_tensor(value)
    if isinstance(value, list | tuple):
        return type(value), *(_key(v, tensors) for v in value)
    if isinstance(value, dict):
        return tuple((name, _key(v, tensors)) for name, v in value.items())
    if isinstance(value, bool | int | float):
        return type(value), value  # 1, 1.0 and True are equal
    if isinstance(value, _PLAIN):
        return value
    raise _NotKept


def _of_tensor(value: FakeTensor) -> object:
    if (
        value.requires_grad
        or value.constant is not None
        or value.layout is not torch.strided
        or value.is_conj()
        or value.is_neg()
    ):
        raise _NotKept
    size, stride = tuple(value.shape), value.stride()
    if any(type(n) is not int for n in (*size, *stride, value.storage_offset())):
        raise _NotKept  # symbolic
    return size, stride, value.dtype, value.device


def _all_made(
    result: Any, tensors: Sequence[FakeTensor], shift: int
) -> _Made | tuple[_Made, ...] | None:
    """How to make all that a call has yielded again; None where that takes another call."""
    if type(result) is not tuple:
        made = _made(result, tensors)
        return made and made._replace(offset=made.offset - shift)
    found: list[_Made] = []
    storages: set[int] = set()
    for each in result:
        made = _made(each, tensors)
        if made is None or (storage := each.untyped_storage()._cdata) in storages:
            return None  # of results that share a storage it is not known which one it is
        storages.add(storage)
        found.append(made._replace(offset=made.offset - shift))
    return tuple(found)


def _made(result: Any, tensors: Sequence[FakeTensor]) -> _Made | None:
    """How to make a tensor that a call has yielded again."""
    if type(result) is not FakeTensor or any(result is tensor for tensor in tensors):
        return None
    try:
        _of_tensor(result)
    except _NotKept:
        return None
    found = _Made(tuple(result.shape), result.stride(), result.dtype, result.device)
    storage, offset = result.untyped_storage(), int(result.storage_offset())
    shown = [n for n, x in enumerate(tensors) if x.untyped_storage()._cdata == storage._cdata]
    if shown:
        source = tensors[shown[0]]
        same = source.dtype == result.dtype and source.device == result.device
        # of operands that share a storage it is not known which one it is a view of
        sure = same and len(shown) == 1
        first = offset - int(source.storage_offset())
        return found._replace(operand=shown[0], offset=first) if sure else None
    extent = 1 + sum((n - 1) * step for n, step in zip(found.size, found.stride, strict=True))
    whole = 0 if 0 in found.size else extent * result.element_size()
    return found if offset == 0 and storage.nbytes() == whole else None
