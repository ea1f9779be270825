"""The library that autopar's ops are defined in, and how their kernels are registered."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["KERNEL", "LIBRARY", "LIBRARY_NAME", "wide"]

LIBRARY_NAME = "autopar"
LIBRARY = torch.library.Library(LIBRARY_NAME, "DEF")
KERNEL = "CompositeExplicitAutograd"


def wide(x: Tensor) -> Tensor:
    """`x` in at least float32: a log-sum-exp in bfloat16 is off by some percent of a weight."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
