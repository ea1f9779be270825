"""Reshapes that copy: where the strides of what they read allow no view."""

from __future__ import annotations

import functools
from typing import Any

import torch

from autopar.core.graph import tensor_meta
from autopar.core.strategy import OpCall

__all__ = ["is_reshape", "rows_are_runs", "view_class"]

aten = torch.ops.aten
_RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


def is_reshape(target: Any) -> bool:
    """True for ops whose result is a view where strides allow it, and else a copy."""
    return target in _RESHAPES


def view_class(call: OpCall) -> str:
    """Class in the cost model of an op that yields a view if it can: "view", or that of a copy."""
    given = tensor_meta(call.nodes[0]) if call.target in _RESHAPES and call.nodes else None
    if given is None or not call.outputs:
        return "view"
    return _class(tuple(given.shape), given.stride(), call.outputs[0].shape)


@functools.cache
def _class(shape: tuple[int, ...], stride: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    try:
        torch.empty_strided(shape, stride, device="meta").view(wanted)
    except RuntimeError:
        return "memory" if rows_are_runs(shape, stride) else "transpose"
    return "view"


def rows_are_runs(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """True if the last dim is contiguous, so that a copy reads runs of memory."""
    return not shape or stride[-1] == 1 or shape[-1] == 1
