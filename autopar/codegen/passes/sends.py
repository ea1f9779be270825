"""Collectives of a program and the waits for them."""

from __future__ import annotations

import torch
from torch import fx

__all__ = ["is_start", "is_wait"]

_WAIT = torch.ops._c10d_functional.wait_tensor.default


def is_start(node: fx.Node) -> bool:
    """True for a collective, which a wait ends."""
    return "collective" in node.meta


def is_wait(node: fx.Node) -> bool:
    """True for the wait for a collective."""
    return node.target is _WAIT
