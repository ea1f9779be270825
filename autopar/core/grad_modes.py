"""What is made while a step is compiled outlives the mode that its first call was made in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["outside_inference_mode"]


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Make tensors that training may use too; whether gradients are on stays as it is."""
    enabled = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(enabled):
        yield
