"""Ops of shapes drawn at random: predictions are checked on them beside the held-out shapes.

The held-out shapes of `cost_model/probes.py` are few, and known to who works on the cost model.
These are drawn from a seed, log-uniformly over what layers of small models have, for every class.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

from autopar.cost_model.byte_probes import byte_probes
from autopar.cost_model.probe import Probe
from autopar.cost_model.probes import (
    attention_probes,
    batched_probes,
    convolution_probes,
    matmul_probes,
    recurrent_probes,
)

__all__ = ["random_probes"]

_MOST_FLOPS = 5e8  # about 5 ms on one core
_HEAD_DIMS = (32, 48, 64, 80, 96, 128)
_KERNELS = ((3, 1), (3, 1), (3, 2), (5, 1), (1, 1), (1, 1), (1, 2))  # with stride
_STEMS = ((3, 1), (7, 2), (4, 4), (8, 8), (16, 16))  # of images


def random_probes(device: str, dtype: str, seed: int = 1) -> Iterator[Probe]:
    """Probes of every class on shapes that only `seed` determines.

    Args:
        device: "cpu" or "cuda".
        dtype: dtype name.
        seed: of the shapes.
    """
    draw = random.Random(seed)
    for group in range(8):
        yield from matmul_probes(device, dtype, group, [_matmul(draw)])
    for group in range(5):
        yield from attention_probes(device, dtype, group, _heads(draw), masked=True)
        yield from batched_probes(device, dtype, group, _heads(draw))
    for group in range(6):
        width = _uniform(draw, 64, 4096)
        rows = max(2, _uniform(draw, 1 << 12, 1 << 21) // width)
        yield from byte_probes(device, dtype, group, rows * width, width, "all")
    for group in range(14):
        kind = ("dense", "dense", "depthwise", "image")[group % 4]
        yield from convolution_probes(device, dtype, group, _image(draw, kind))
    for group in range(4):
        batch, width = _uniform(draw, 2, 32), _uniform(draw, 16, 512)
        yield from recurrent_probes(device, dtype, group, batch, width)


def _uniform(draw: random.Random, low: int, high: int) -> int:
    """Log-uniform between two numbers."""
    return round(math.exp(draw.uniform(math.log(low), math.log(high))))


def _bounded(
    draw: random.Random,
    shape: Callable[[random.Random], tuple[int, ...]],
    flops: Callable[[tuple[int, ...]], float],
) -> tuple[int, ...]:
    """Draws until a shape is not too large to be timed."""
    while True:
        found = shape(draw)
        if flops(found) <= _MOST_FLOPS:
            return found


def _matmul(draw: random.Random) -> tuple[int, ...]:
    return _bounded(
        draw,
        lambda d: (_uniform(d, 16, 4096), _uniform(d, 32, 2048), _uniform(d, 32, 2048)),
        lambda s: 2.0 * math.prod(s),
    )


def _heads(draw: random.Random) -> tuple[int, ...]:
    return _bounded(
        draw,
        lambda d: (
            _uniform(d, 1, 16),
            _uniform(d, 1, 16),
            _uniform(d, 16, 512),
            d.choice(_HEAD_DIMS),
        ),
        lambda s: 10.0 * math.prod(s) * s[2],
    )


def _image(draw: random.Random, kind: str) -> tuple[int, ...]:
    def shape(d: random.Random) -> tuple[int, ...]:
        batch, side = _uniform(d, 1, 16), 16 * d.randint(1, 4)
        channels, out = (8 * _uniform(d, 1, 32) for _ in range(2))
        if kind == "image":
            return batch, 3, side, out, *d.choice(_STEMS), 1
        if kind == "depthwise":
            return batch, channels, side, channels, 3, d.choice((1, 2)), channels
        return batch, channels, side, out, *d.choice(_KERNELS), 1

    def flops(s: tuple[int, ...]) -> float:
        batch, channels, side, out, kernel, stride, groups = s
        return 4.0 * batch * out * (side / stride) ** 2 * channels / groups * kernel**2

    return _bounded(draw, shape, flops)
