"""Random calls of the exported graph, by the counter-based numbers of `core/random.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from autopar.core.ops import ops

__all__ = [
    "RandomContext",
    "bernoulli",
    "draws",
    "dropout",
    "feature_dropout",
    "native_dropout",
    "rand",
    "rand_like",
    "randn",
    "randn_like",
]


class RandomContext:
    """The seed input of the graph and a running number for each random op in it."""

    def __init__(self, seed: Tensor) -> None:
        self.seed = seed
        self._next = 0

    def salt(self) -> int:
        self._next += 1
        return self._next

    def uniform(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        size = list(shape)
        return ops.uniform(self.seed, self.salt(), size, size, [0] * len(size), dtype)


def dropout(rng: RandomContext, x: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0.0:
        return x
    size = list(x.shape)
    return ops.dropout(x, p, rng.seed, rng.salt(), size, [0] * len(size))


def native_dropout(
    rng: RandomContext, x: Tensor, p: float, train: bool | None
) -> tuple[Tensor, Tensor]:
    """The mask is only for ATen's own backward, which autopar's dropout does not use."""
    return dropout(rng, x, p, train is not False), torch.ones_like(x, dtype=torch.bool)


def feature_dropout(rng: RandomContext, x: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0.0:
        return x
    shape = [*x.shape[:2], *([1] * (x.dim() - 2))]
    keep = (rng.uniform(shape, torch.float64) >= p).to(x.dtype)
    return x * keep / (1.0 - p) if p < 1.0 else x * 0.0


def rand_like(rng: RandomContext, x: Tensor, **options: Any) -> Tensor:
    return rng.uniform(x.shape, options.get("dtype") or x.dtype)


def rand(rng: RandomContext, size: Sequence[int], **options: Any) -> Tensor:
    return rng.uniform(size, options.get("dtype") or torch.get_default_dtype())


def _normal(rng: RandomContext, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Box-Muller transform of two uniforms."""
    radius = torch.sqrt(-2.0 * torch.log1p(-rng.uniform(size, torch.float64)))
    angle = 2.0 * math.pi * rng.uniform(size, torch.float64)
    return (radius * torch.cos(angle)).to(dtype)


def randn(rng: RandomContext, size: Sequence[int], **options: Any) -> Tensor:
    return _normal(rng, size, options.get("dtype") or torch.get_default_dtype())


def randn_like(rng: RandomContext, x: Tensor, **options: Any) -> Tensor:
    return _normal(rng, x.shape, options.get("dtype") or x.dtype)


def bernoulli(rng: RandomContext, x: Tensor, p: float | None = None, **options: Any) -> Tensor:
    return (rng.uniform(x.shape, torch.float64) < (x if p is None else p)).to(x.dtype)


@cache
def draws(name: str) -> bool:
    """True for the name of an op that draws random numbers."""
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return False
    overloads = (getattr(packet, overload) for overload in packet.overloads())
    return any(torch.Tag.nondeterministic_seeded in op.tags for op in overloads)
