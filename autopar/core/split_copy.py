"""`autopar::split_copy`: tensors that lie side by side in another one, each made contiguous.

What a joined all-gather brings has a row for each rank, and in it a part of each tensor. On a GPU
all parts are copied out of it by one kernel, where a copy of each would be a launch of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.core.library import KERNEL, LIBRARY, fake_of

__all__ = ["SPLIT_COPY"]

LIBRARY.define("split_copy(Tensor x, int[] sizes) -> Tensor[]")


@fake_of("split_copy")
def _empty(x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    return [x.new_empty((x.shape[0], size)) for size in sizes]


def _split_copy(x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    parts = _empty(x, sizes)
    torch.split_with_sizes_copy(x, list(sizes), dim=1, out=parts)
    return parts


LIBRARY.impl("split_copy", _split_copy, KERNEL)

SPLIT_COPY = torch.ops.autopar.split_copy.default
"""Columns of a matrix (ranks, sum of sizes) as matrices (ranks, size) of their own."""
