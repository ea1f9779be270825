"""Counter-based random numbers: a pure function of (seed, salt, global element index).

Uses four rounds of Squares (Widynski 2020, "Squares: a fast counter-based RNG",
arXiv 2004.06278): with counter c and key k, x = c·k, y = x, z = y + k, then three rounds of
square, add and rotate, and the top 32 bits of the fourth. Only 64-bit integer arithmetic, so
every device and every sharding draws the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["keep_mask", "salt_term", "uniform_numbers"]

_KEY = -0x3A1F5C9B7D2E4683  # an odd 64-bit key with varied digits, as the paper asks
_SALT_STEP = 0x1E3779B97F4A7C15
_LOW32 = 0xFFFFFFFF


def _wrap(value: int) -> int:
    """Two's-complement 64-bit value of a Python int."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def salt_term(salt: int) -> int:
    """What a salt adds to the key, as a signed 64-bit integer."""
    return _wrap((salt + 1) * _SALT_STEP)


def _element_index(
    shape: Sequence[int], global_shape: Sequence[int], offset: Sequence[int], device: torch.device
) -> Tensor:
    """Row-major index in the global tensor of each element of the block at `offset`."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for dim, (size, start) in enumerate(zip(shape, offset, strict=True)):
        stride = math.prod(global_shape[dim + 1 :])
        along = torch.arange(start, start + size, dtype=torch.int64, device=device) * stride
        index = index + along.reshape([-1 if d == dim else 1 for d in range(len(shape))])
    return index.expand(list(shape))


def _rotate(x: Tensor) -> Tensor:
    return ((x >> 32) & _LOW32) | (x << 32)


def _bits(
    seed: Tensor,
    salt: int,
    shape: Sequence[int],
    global_shape: Sequence[int],
    offset: Sequence[int],
) -> Tensor:
    """32 random bits per element, as int64 in [0, 2^32)."""
    key = (seed.to(torch.int64) * 2 + salt_term(salt)) ^ _KEY | 1
    index = _element_index(shape, global_shape, offset, seed.device)
    y = index * key
    z = y + key
    x = _rotate(y * y + y)
    x = _rotate(x * x + z)
    x = _rotate(x * x + y)
    return ((x * x + z) >> 32) & _LOW32


def uniform_numbers(
    seed: Tensor,
    salt: int,
    shape: Sequence[int],
    global_shape: Sequence[int],
    offset: Sequence[int],
) -> Tensor:
    """Uniform float64 numbers in [0, 1), a multiple of 2^-32 each."""
    return _bits(seed, salt, shape, global_shape, offset).to(torch.float64) * 2.0**-32


def keep_mask(
    seed: Tensor,
    salt: int,
    p: float,
    shape: Sequence[int],
    global_shape: Sequence[int],
    offset: Sequence[int],
) -> Tensor:
    """True with probability 1 − p, to 2^-32."""
    return _bits(seed, salt, shape, global_shape, offset) >= int(p * 2**32)
