"""``autopar::attention`` on CUDA: ATen's fused kernels, which never store the scores.

Flash attention (Dao 2023, arXiv 2307.08691) for half precision without a mask, the
memory-efficient kernel (Rabe and Staats 2021, arXiv 2112.05682) for float32 and for masks, and
the formula (`core/attention.py`) for what neither takes. Both give the log-sum-exp of each row,
and their backwards work from it, also where the ring has merged it over blocks of keys.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.core.attention import (
    additive,
    attention,
    attention_backward,
    expand_heads,
    rows_last,
    sum_groups,
    tokens_first,
)
from autopar.core.library import LIBRARY

__all__ = ["choose_kernel", "efficient", "efficient_backward", "flash", "flash_backward"]

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_ROWS = 32  # the memory-efficient kernel pads the rows of its log-sum-exp to a multiple of it
_COLUMNS = 16  # and wants rows of a bias to begin at multiples of it


def choose_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    capability: tuple[int, int],
) -> str:
    """ "flash", "efficient" or "formula".

    Args:
        q, k, v, mask, is_causal: of the call.
        capability: compute capability of the device.
    """
    regular = q.dim() == k.dim() == v.dim() == 4 and q.shape[0] == k.shape[0] == v.shape[0]
    same = q.shape[-1] == k.shape[-1] == v.shape[-1]
    if not regular or not same or q.numel() == 0 or k.numel() == 0:
        return "formula"
    width = q.shape[-1]
    # the backward for wider heads needs the shared memory of 8.0, 9.0 and 10.x; 12.x has less
    widest = 256 if capability == (8, 0) or capability[0] in (9, 10) else 192
    aligned = not is_causal or q.shape[2] == k.shape[2]  # else flash counts from the last row
    if q.dtype in _HALF and capability >= (8, 0) and mask is None and aligned:
        if width % 8 == 0 and width <= widest:
            return "flash"
    known = q.dtype == torch.float32 or (q.dtype in _HALF and capability >= (8, 0))
    plain_mask = mask is None or (mask.dim() in (2, 4) and not is_causal)
    if known and plain_mask and width % (4 if q.dtype == torch.float32 else 8) == 0:
        return "efficient"
    return "formula"


def _kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> str:
    return choose_kernel(q, k, v, mask, is_causal, torch.cuda.get_device_capability(q.device))


def flash(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Output, and log-sum-exp of each row; k and v may have fewer heads than q."""
    q, k, v = rows_last(q), rows_last(k), rows_last(v)
    out, lse, *_ = aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, is_causal, False, scale=scale
    )
    return tokens_first(out), lse.contiguous()


def flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `flash`."""
    unused = q.new_empty((2,), dtype=torch.uint64), q.new_empty((), dtype=torch.uint64)
    grads = aten._scaled_dot_product_flash_attention_backward(
        rows_last(grad), rows_last(q), rows_last(k), rows_last(v),
        rows_last(out), lse.contiguous(), None, None,
        q.shape[2], k.shape[2], 0.0, is_causal, *unused, scale=scale,
    )  # fmt: skip
    return tokens_first(grads[0]), tokens_first(grads[1]), tokens_first(grads[2])


def _bias(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """What is added to the scores `(B, H, S, T)`, its rows as the kernel wants them."""
    bias = additive(mask, q.dtype)
    if bias is None:
        return None
    columns = k.shape[2]
    bias = bias.expand(*bias.shape[:-1], columns)
    bias = F.pad(bias, (0, -columns % _COLUMNS)).contiguous()[..., :columns]
    return bias.expand(q.shape[0], q.shape[1], q.shape[2], columns)


def efficient(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Output, and log-sum-exp of each row: 0 and -inf for one that has nothing to attend to."""
    rows, bias = q.shape[2], _bias(mask, q, k)
    k, v = expand_heads(k, q.shape[1]), expand_heads(v, q.shape[1])
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        rows_last(q), rows_last(k), rows_last(v), bias, True, 0.0, is_causal, scale=scale
    )
    lse = lse[..., :rows]
    if bias is not None:
        blocked = bias.isneginf().all(-1)
        out, lse = out.masked_fill(blocked.unsqueeze(-1), 0.0), lse.masked_fill(blocked, -math.inf)
    return tokens_first(out), lse.contiguous()


def efficient_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `efficient`."""
    heads, kv_heads, rows = q.shape[1], k.shape[1], q.shape[2]
    if mask is not None:
        lse = lse.masked_fill(lse.isneginf(), 0.0)
    lse = F.pad(lse, (0, -rows % _ROWS), value=math.inf)  # weights of rows that are not there: 0
    unused = q.new_empty((), dtype=torch.int64), q.new_empty((), dtype=torch.int64)
    grad_q, grad_k, grad_v, _ = aten._scaled_dot_product_efficient_attention_backward(
        rows_last(grad), rows_last(q),
        rows_last(expand_heads(k, heads)), rows_last(expand_heads(v, heads)),
        _bias(mask, q, k), rows_last(out), lse, *unused, 0.0, [True, True, True, False], is_causal,
        scale=scale,
    )  # fmt: skip
    grad_k, grad_v = sum_groups(grad_k, kv_heads), sum_groups(grad_v, kv_heads)
    return tokens_first(grad_q), tokens_first(grad_k), tokens_first(grad_v)


def _attention_cuda(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    kernel = _kernel(q, k, v, mask, is_causal)
    if kernel == "flash":
        return flash(q, k, v, is_causal, scale)
    if kernel == "efficient":
        return efficient(q, k, v, mask, is_causal, scale)
    return attention(q, k, v, mask, is_causal, scale)


def _attention_backward_cuda(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    kernel = _kernel(q, k, v, mask, is_causal)
    if kernel == "flash":
        return flash_backward(grad, q, k, v, out, lse, is_causal, scale)
    if kernel == "efficient":
        return efficient_backward(grad, q, k, v, mask, out, lse, is_causal, scale)
    return attention_backward(grad, q, k, v, mask, out, lse, is_causal, scale)


LIBRARY.impl("attention", _attention_cuda, "CUDA")
LIBRARY.impl("attention_backward", _attention_backward_cuda, "CUDA")
