"""What kernels share: activations, random bits, index arithmetic, launch sizes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from autopar.core.random import salt_term
from autopar.kernels.indexing import index_map


def wide_type(x: Tensor) -> tl.dtype:
    """What a kernel computes in."""
    return tl.float64 if x.dtype == torch.float64 else tl.float32


def as_rows(x: Tensor) -> Tensor:
    """`(…, H)` as `(rows, H)` with elements of a row side by side; a copy only where it must be."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()


def row_block(size: int) -> int:
    return triton.next_power_of_2(max(size, 1))


def warps_for(block: int) -> int:
    """Warps of a program that holds `block` elements: eight elements a thread, within limits."""
    return min(16, max(4, block // 256))


def tile_of(size: int) -> int:
    """Elements of a row that one program handles: the tile that leaves the fewest lanes idle."""
    if size <= 256:
        return row_block(size)
    return min((2048, 1024, 512), key=lambda tile: -(-size // tile) * tile)


def flat_rows(*tensors: Tensor) -> list[Tensor]:
    """Operands of one shape as rows; dense ones as a single row."""
    if all(x.is_contiguous() for x in tensors):
        return [x.reshape(1, -1) for x in tensors]
    return [as_rows(x) for x in tensors]


def random_arguments(
    x: Tensor,
    p: float,
    salt: int,
    global_shape: Sequence[int],
    offset: Sequence[int],
) -> tuple[int, ...]:
    """What `keep_mask` in a kernel needs beside the seed: salt, threshold, and the index map."""
    sizes, strides, base, _ = index_map(x.shape, global_shape, offset)
    return (salt_term(salt), int(p * 2**32), base, *sizes[1:], *strides)


def index_dims(x: Tensor, global_shape: Sequence[int], offset: Sequence[int]) -> int:
    """Number of dims that `global_index` decomposes."""
    return index_map(x.shape, global_shape, offset)[3]


@triton.jit
def global_index(i, base, n1, n2, n3, s0, s1, s2, s3, DIMS: tl.constexpr):
    """Index in the global tensor of element `i` of a block, of DIMS merged dims."""
    if DIMS == 1:
        index = base + i.to(tl.int64) * s3
    else:
        index = base + (i % n3).to(tl.int64) * s3
        rest = i // n3
        if DIMS == 2:
            index += rest.to(tl.int64) * s2
        else:
            index += (rest % n2).to(tl.int64) * s2
            rest = rest // n2
            if DIMS == 3:
                index += rest.to(tl.int64) * s1
            else:
                index += (rest % n1).to(tl.int64) * s1 + (rest // n1).to(tl.int64) * s0
    return index


@triton.jit
def _rotate(x):
    return ((x >> 32) & 0xFFFFFFFF) | (x << 32)


@triton.jit
def random_bits(seed, salt, index):
    """32 bits an element as int64: Squares (Widynski 2020), as in `core.random`."""
    key = ((seed * 2 + salt) ^ -0x3A1F5C9B7D2E4683) | 1
    y = index * key
    z = y + key
    x = _rotate(y * y + y)
    x = _rotate(x * x + z)
    x = _rotate(x * x + y)
    return ((x * x + z) >> 32) & 0xFFFFFFFF


@triton.jit
def keep_mask(seed, salt, threshold, i, base, n1, n2, n3, s0, s1, s2, s3, DIMS: tl.constexpr):
    """True where element `i` of the block is kept."""
    index = global_index(i, base, n1, n2, n3, s0, s1, s2, s3, DIMS)
    return random_bits(seed, salt, index) >= threshold


@triton.jit
def tanh(x):
    """Near 0 by its series, where the quotient of exponentials would cancel."""
    a = tl.abs(x)
    e = tl.exp(-2.0 * a)
    far = (1.0 - e) / (1.0 + e)
    q = a * a
    near = a * (1.0 + q * (-1.0 / 3 + q * (2.0 / 15 + q * (-17.0 / 315 + q * (62.0 / 2835)))))
    y = tl.where(a < 0.02, near, far)
    return tl.where(x < 0.0, -y, y)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def activate(z, ACT: tl.constexpr):
    if ACT == "silu":
        y = z * sigmoid(z)
    elif ACT == "gelu":
        y = 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
    elif ACT == "gelu_tanh":
        y = 0.5 * z * (1.0 + tanh(0.7978845608028654 * (z + 0.044715 * z * z * z)))
    else:
        tl.static_assert(ACT == "relu")
        y = tl.where(z < 0.0, 0.0, z)
    return y


@triton.jit
def slope(z, ACT: tl.constexpr):
    if ACT == "silu":
        s = sigmoid(z)
        y = s * (1.0 + z * (1.0 - s))
    elif ACT == "gelu":
        density = tl.exp(-0.5 * z * z) * 0.3989422804014327
        y = 0.5 * (1.0 + tl.erf(z * 0.7071067811865476)) + z * density
    elif ACT == "gelu_tanh":
        t = tanh(0.7978845608028654 * (z + 0.044715 * z * z * z))
        inner = 0.7978845608028654 * (1.0 + 0.134145 * z * z)
        y = 0.5 * (1.0 + t) + 0.5 * z * (1.0 - t * t) * inner
    else:
        tl.static_assert(ACT == "relu")
        y = tl.where(z > 0.0, 1.0, 0.0)
    return y


@triton.jit
def row_softmax(x, inside):
    x = tl.where(inside, x, -float("inf"))
    p = tl.exp(x - tl.max(x, 1, keep_dims=True))
    return p / tl.sum(p, 1, keep_dims=True)


@triton.jit
def row_softmax_backward(grad, p, inside):
    return p * (grad - tl.sum(tl.where(inside, grad * p, 0.0), 1, keep_dims=True))
