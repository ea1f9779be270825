"""Where the elements of a block lie in the global tensor, for kernels that draw random numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

__all__ = ["NUM_INDEX_DIMS", "index_map", "takes_block"]

NUM_INDEX_DIMS = 4


def index_map(
    shape: Sequence[int], global_shape: Sequence[int], offset: Sequence[int]
) -> tuple[list[int], list[int], int, int]:
    """How the row-major index in a block maps to that in the global tensor.

    Returns:
        Sizes and global strides of the block's dims, outermost first, merged where the inner one
        is whole and filled up to `NUM_INDEX_DIMS`; the global index of the block's first element;
        and the number of dims.

    Raises:
        ValueError: more dims than kernels decompose.
    """
    dims: list[tuple[int, int]] = []
    base = 0
    for dim, (size, start) in enumerate(zip(shape, offset, strict=True)):
        stride = math.prod(global_shape[dim + 1 :])
        base += start * stride
        if size == 1:
            continue
        if dims and dims[-1][1] == stride * size:
            dims[-1] = (dims[-1][0] * size, stride)
        else:
            dims.append((size, stride))
    if len(dims) > NUM_INDEX_DIMS:
        raise ValueError(f"a block of {len(dims)} strided dims; kernels take {NUM_INDEX_DIMS}")
    count = max(1, len(dims))
    dims = [(1, 0)] * (NUM_INDEX_DIMS - len(dims)) + dims
    return [size for size, _ in dims], [stride for _, stride in dims], base, count


def takes_block(x: Tensor, *args: Any) -> bool:
    """Whether kernels can index this block; the op's last two are global shape and offset."""
    global_shape = args[-2]
    return x.dim() <= NUM_INDEX_DIMS or list(global_shape) == list(x.shape)
