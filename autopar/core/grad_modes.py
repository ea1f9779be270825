"""Modes of autograd that a step is compiled outside of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["outside_inference_mode", "without_anomaly_mode"]


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Make tensors that training may use too, as what is made while a step is compiled outlives the
    mode of its first call; whether gradients are on stays as it is."""
    enabled = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(enabled):
        yield


@contextmanager
def without_anomaly_mode() -> Iterator[None]:
    """Look at no gradient for nan: while a step is traced, none has values."""
    with torch.autograd.set_detect_anomaly(False):
        yield
