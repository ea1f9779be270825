"""AdamW on a flat shard, with unscaling and clipping folded in.

AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101), with g = grad · factor, where `factor` is the
clipping coefficient over the loss scale: p ← p·(1 − lr·λ), m ← β₁m + (1 − β₁)g,
v ← β₂v + (1 − β₂)g², p ← p − lr/(1 − β₁ᵗ) · m / (√(v / (1 − β₂ᵗ)) + ε). If `found_inf` is not 0,
nothing is written. Each tensor is read and written once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.kernels.registry import define, wide

__all__ = ["corrections"]


def corrections(lr: Tensor, step: Tensor, beta1: float, beta2: float, dtype: torch.dtype) -> Tensor:
    """(lr, lr / (1 − β₁ᵗ), 1 / √(1 − β₂ᵗ)) on the device of `step`."""
    lr, step = lr.to(torch.float64), step.to(torch.float64)
    first = lr / (1.0 - beta1**step)
    second = torch.rsqrt(1.0 - beta2**step)
    return torch.stack([lr, first, second]).to(dtype)


def _fake(  # type: ignore[no-untyped-def]
    param, grad, exp_avg, exp_avg_sq, step, lr, factor, found_inf, beta1, beta2, eps, decay
):
    return None


def _takes(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *_: object) -> bool:
    return all(x.is_contiguous() for x in (param, exp_avg, exp_avg_sq))


def _one_pass(param: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> bool:
    states = exp_avg, exp_avg_sq
    alike = all(x.dtype == param.dtype and x.is_contiguous() for x in states)
    return alike and param.is_contiguous() and param.numel() > 0


@define(
    "adamw_(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor step,"
    " Tensor lr, Tensor factor, Tensor found_inf, float beta1, float beta2, float eps,"
    " float weight_decay) -> ()",
    module="optimizer",
    fake=_fake,
    takes=_takes,
)
def adamw_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    lr: Tensor,
    factor: Tensor,
    found_inf: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """Update a shard in place; `step` counts from 1, `step` to `found_inf` are 0-dim.

    A CPU has a kernel of torch's own that makes one pass.
    """
    if param.device.type == "cpu" and _one_pass(param, exp_avg, exp_avg_sq):
        g = (grad.to(param.dtype) * factor.to(param.dtype)).contiguous()
        torch._fused_adamw_(
            [param], [g], [exp_avg], [exp_avg_sq], [], [step.to(torch.float32)], lr=float(lr),
            beta1=beta1, beta2=beta2, weight_decay=weight_decay, eps=eps, amsgrad=False,
            maximize=False, found_inf=(found_inf != 0).to(torch.float32),
        )  # fmt: skip
        return
    p, m, v = wide(param), wide(exp_avg), wide(exp_avg_sq)
    rate, first, second = corrections(lr, step, beta1, beta2, p.dtype).unbind()
    g = wide(grad).to(p.dtype) * factor.to(p.dtype)
    m = m + (g - m) * (1.0 - beta1)
    v = v + (g * g - v) * (1.0 - beta2)
    p = p * (1.0 - rate * weight_decay) - first * m / (torch.sqrt(v) * second + eps)
    skip = found_inf != 0
    for old, new in ((param, p), (exp_avg, m), (exp_avg_sq, v)):
        old.copy_(torch.where(skip, old, new.to(old.dtype)))
