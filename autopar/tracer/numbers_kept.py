"""Numbers that a forward makes tensors of: the meta device loses them, so the CPU has them.

A model that was built there makes its constants there, too: by `torch.tensor` and the like, and by
lists that index a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["numbers_on_meta", "with_places"]

_MAKING = (torch.tensor, torch.as_tensor, torch.asarray)


def numbers_on_meta(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """What a call makes of numbers on the meta device, copied there; None where it does not."""
    like = args[0] if func is Tensor.new_tensor else None
    values = args if like is None else args[1:]
    if func not in (*_MAKING, Tensor.new_tensor) or len(values) != 1:
        return None
    default = torch.get_default_device() if like is None else like.device
    on_meta = torch.device(kwargs.get("device") or default).type == "meta"
    if (
        not on_meta
        or kwargs.get("requires_grad")
        or any(isinstance(x, Tensor) for x in pytree.tree_leaves(values))
    ):
        return None
    dtype = kwargs.get("dtype") or (None if like is None else like.dtype)
    return torch.tensor(values[0], dtype=dtype, device="cpu").to("meta")


def with_places(x: Tensor, index: Any) -> Any:
    """An index of `x` with the places of what lists of flags pick: how many these are is known.

    Of the meta device, other lists become tensors on the CPU, too.
    """
    if isinstance(index, list) and any(isinstance(each, list) for each in index):
        index = tuple(index)  # to torch, too
    found: list[Any] = []
    for each in index if isinstance(index, tuple) else (index,):
        plain = all(isinstance(before, (int, slice, list)) for before in found)
        if plain and _is_flags(each) and x.shape[len(found) : len(found) + 1] == (len(each),):
            each = [place for place, picked in enumerate(each) if picked]
        if x.is_meta and _is_numbers(each):
            each = torch.tensor(each, dtype=None if each else torch.long, device="cpu")
        found.append(each)
    return tuple(found) if isinstance(index, tuple) else found[0]


def _is_flags(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(x, bool) for x in value)


def _is_numbers(value: Any) -> bool:
    """True for a list of numbers, or of such lists."""
    return isinstance(value, list) and all(isinstance(x, int) or _is_numbers(x) for x in value)
