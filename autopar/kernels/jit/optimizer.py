"""AdamW on a flat shard: 4 tensors read and 3 written, once each."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from autopar.kernels.jit import common
from autopar.kernels.optimizer import corrections
from autopar.kernels.registry import wide_dtype

_BLOCK = 1024


@triton.jit
def _kernel(
    param_ptr, grad_ptr, avg_ptr, square_ptr, rates_ptr, factor_ptr, found_ptr, count,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr, DECAY: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < tl.where(tl.load(found_ptr) == 0, count, 0)
    rate = tl.load(rates_ptr)
    first = tl.load(rates_ptr + 1)
    second = tl.load(rates_ptr + 2)
    factor = tl.load(factor_ptr).to(WIDE)
    p = tl.load(param_ptr + at, mask=mask, other=0.0).to(WIDE)
    g = tl.load(grad_ptr + at, mask=mask, other=0.0).to(WIDE) * factor
    m = tl.load(avg_ptr + at, mask=mask, other=0.0).to(WIDE)
    v = tl.load(square_ptr + at, mask=mask, other=0.0).to(WIDE)
    m += (g - m) * (1.0 - BETA1)
    v += (g * g - v) * (1.0 - BETA2)
    p = p * (1.0 - rate * DECAY) - first * m / (tl.sqrt(v) * second + EPS)
    tl.store(param_ptr + at, p.to(param_ptr.dtype.element_ty), mask=mask)
    tl.store(avg_ptr + at, m.to(avg_ptr.dtype.element_ty), mask=mask)
    tl.store(square_ptr + at, v.to(square_ptr.dtype.element_ty), mask=mask)


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
    """See `autopar.kernels.optimizer.adamw_`."""
    count = param.numel()
    rates = corrections(lr, step, beta1, beta2, wide_dtype(param))
    _kernel[(triton.cdiv(count, _BLOCK),)](
        param, grad.contiguous(), exp_avg, exp_avg_sq, rates, factor, found_inf, count,
        BETA1=beta1, BETA2=beta2, EPS=eps, DECAY=weight_decay,
        WIDE=common.wide_type(param), BLOCK=_BLOCK,
    )  # fmt: skip
