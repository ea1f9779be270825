"""The library that autopar's ops are defined in, and how their kernels are registered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["FAKES", "KERNEL", "LIBRARY", "LIBRARY_NAME", "fake_of", "wide"]

_Fake = TypeVar("_Fake", bound=Callable[..., Any])

LIBRARY_NAME = "autopar"
LIBRARY = torch.library.Library(LIBRARY_NAME, "DEF")
KERNEL = "CompositeExplicitAutograd"
FAKES: dict[Any, Callable[..., Any]] = {}
"""What yields the empty outputs of each op of the library."""


def fake_of(name: str) -> Callable[[_Fake], _Fake]:
    """Register what yields the empty outputs of an op, for tracing."""

    def register(fake: _Fake) -> _Fake:
        torch.library.register_fake(f"{LIBRARY_NAME}::{name}", fake, lib=LIBRARY)
        FAKES[getattr(torch.ops.autopar, name).default] = fake
        return fake

    return register


def wide(x: Tensor) -> Tensor:
    """`x` in at least float32: a log-sum-exp in bfloat16 is off by some percent of a weight."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
