"""One op that a device is measured with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Probe", "normal", "size_of"]


@dataclass(frozen=True, slots=True)
class Probe:
    """One op on real tensors.

    Attributes:
        op_class, dtype: the curve that it belongs to.
        unit: "flops" or "bytes".
        group: probes of one class and group make one point of the curve.
        work: of the unit, in each step.
        num_bytes: read plus written in each step.
        run: calls the op.
        label: op and shape, for tables.
        steps: equal parts of the op, which run one after the other.
    """

    op_class: str
    dtype: str
    unit: str
    group: int
    work: float
    num_bytes: int
    run: Callable[[], object]
    label: str
    steps: int = 1


def size_of(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def normal(device: str, dtype: str, *shape: int) -> Tensor:
    return torch.randn(shape, device=device).to(getattr(torch, dtype))
