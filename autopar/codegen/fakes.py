"""Fake values of calls, without what torch's dispatcher and autograd add for ops of our own.

A plan is emitted many times while it is made, and most of the time of that goes into fake values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_aggregate

from autopar.core.library import FAKES

__all__ = ["fake_call"]

aten = torch.ops.aten


def fake_call(
    mode: FakeTensorMode, target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """What a call yields on the fake values of its operands.

    Args:
        mode: of the fake values.
        target, args, kwargs: of a call in a graph, whose operands are nodes with fake values.
    """
    given: Any = map_aggregate((tuple(args), dict(kwargs)), _value)
    operands, options = given
    if target is aten.reshape.default and operands[0].is_contiguous():
        target = aten.view.default  # what it is then, without being taken apart for it
    with mode:
        return FAKES.get(target, target)(*operands, **options)


def _value(arg: Any) -> Any:
    return arg.meta["val"] if isinstance(arg, fx.Node) else arg
