"""`center(x) = x − mean(x)`, mean over the last dim, and `project(x, w) = x w`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("autopar_example::center", mutates_args=())
def center(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (..., D) minus its mean over D, and the mean (..., 1)."""
    mean = x.mean(-1, keepdim=True)
    return x - mean, mean


@center.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(*x.shape[:-1], 1)


def _keep_size(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.size = inputs[0].shape[-1]


def _center_backward(ctx: Any, grad: Tensor, grad_mean: Tensor) -> Tensor:
    return center(grad)[0] + grad_mean / ctx.size  # centring is a symmetric projection


center.register_autograd(_center_backward, setup_context=_keep_size)


@torch.library.custom_op("autopar_example::project", mutates_args=())
def project(x: Tensor, weight: Tensor) -> Tensor:
    """x (B, S, K) with weight (K, N): (B, S, N)."""
    return x @ weight


@project.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[1])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _project_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, weight = ctx.saved_tensors
    return grad @ weight.t(), torch.einsum("bsk,bsn->kn", x, grad)


project.register_autograd(_project_backward, setup_context=_keep)
