"""``autopar::attention``, scaled dot-product attention, and its backward (`core/ops.py`).

Both are one op each, whatever kernel a device has for it, so that one rule shards them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from autopar.core.library import KERNEL, LIBRARY, fake_of, wide

__all__ = [
    "additive",
    "attention",
    "attention_backward",
    "expand_heads",
    "rows_last",
    "sum_groups",
    "tokens_first",
]

LIBRARY.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, bool is_causal, float scale)"
    " -> (Tensor, Tensor)"
)
LIBRARY.define(
    "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor out,"
    " Tensor lse, bool is_causal, float scale) -> (Tensor, Tensor, Tensor)"
)


def expand_heads(x: Tensor, num_heads: int) -> Tensor:
    """Repeat `(B, H_kv, S, D)` to `num_heads` query heads (grouped-query attention)."""
    groups = num_heads // x.shape[1]
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


def tokens_first(x: Tensor) -> Tensor:
    """`(B, H, S, D)` that lies in memory as (B, S, H, D), as fused kernels write it.

    So heads that come of a projection, or go to one, are joined without a copy.
    """
    if x.dim() < 3:
        return x.contiguous()
    return x.transpose(-3, -2).contiguous().transpose(-3, -2)


def rows_last(x: Tensor) -> Tensor:
    """`x` with its last dim dense, which fused kernels take for granted."""
    return x if x.stride(-1) == 1 else x.contiguous()


def sum_groups(grad: Tensor, num_kv_heads: int) -> Tensor:
    """The sum of `(B, H, S, D)` over the query heads of each of `num_kv_heads`."""
    if grad.shape[1] == num_kv_heads:
        return grad
    return grad.transpose(1, 2).unflatten(2, (num_kv_heads, -1)).sum(3).transpose(1, 2)


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    scores = wide(torch.matmul(q, k.transpose(-1, -2))) * scale
    if is_causal:
        allowed = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    if mask is not None:
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -math.inf)
        else:
            scores = scores + mask
    return scores


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """softmax(q kᵀ · scale + mask) v, with the log-sum-exp of each row, `(B, H, S)`.

    The softmax and the log-sum-exp are in at least float32, as in fused kernels.
    A row with nothing to attend to gives 0, as torch's own attention does.
    """
    k, v = expand_heads(k, q.shape[1]), expand_heads(v, q.shape[1])
    scores = _scores(q, k, mask, is_causal, scale)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - torch.where(lse.isinf(), 0.0, lse).unsqueeze(-1))
    return tokens_first(torch.matmul(weights.to(v.dtype), v)), lse


def attention_backward(
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
    """Gradients of `attention` from the saved log-sum-exp (Dao et al. 2022, arXiv 2205.14135).

    Rows with a log-sum-exp of inf are taken for such as attend to nothing here.
    """
    num_kv_heads = k.shape[1]
    full_k, full_v = expand_heads(k, q.shape[1]), expand_heads(v, q.shape[1])
    scores = _scores(q, full_k, mask, is_causal, scale)
    weights = torch.exp(scores - torch.where(lse.isneginf(), 0.0, lse).unsqueeze(-1))
    grad_v = torch.matmul(weights.to(grad.dtype).transpose(-1, -2), grad)
    grad_weights = wide(torch.matmul(grad, full_v.transpose(-1, -2)))
    delta = (wide(grad) * out).sum(-1, keepdim=True)
    grad_scores = (weights * (grad_weights - delta) * scale).to(q.dtype)
    grad_q = torch.matmul(grad_scores, full_k)
    grad_k = torch.matmul(grad_scores.transpose(-1, -2), q)
    grad_k, grad_v = sum_groups(grad_k, num_kv_heads), sum_groups(grad_v, num_kv_heads)
    return tokens_first(grad_q), tokens_first(grad_k), tokens_first(grad_v)


def _fused_on_cpu(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
    """True if ATen's CPU flash kernel computes this call."""
    return (
        q.dim() == k.dim() == v.dim() == 4
        and q.shape[-1] == k.shape[-1] == v.shape[-1]
        and q.shape[0] == k.shape[0] == v.shape[0]
        and not (is_causal and (mask is not None or q.shape[2] != k.shape[2]))
        and (mask is None or mask.dim() in (2, 4))
        and q.numel() > 0
        and k.numel() > 0
    )


def additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask as what is added to scores."""
    if mask is None or mask.dtype != torch.bool:
        return mask if mask is None else mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -math.inf)


def _attention_cpu(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """ATen's flash kernel; a row with nothing to attend to keeps a log-sum-exp of -inf."""
    if not _fused_on_cpu(q, k, v, mask, is_causal):
        return attention(q, k, v, mask, is_causal, scale)
    k, v = expand_heads(k, q.shape[1]), expand_heads(v, q.shape[1])
    q, k, v = rows_last(q), rows_last(k), rows_last(v)
    bias = additive(mask, q.dtype)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, is_causal, attn_mask=bias, scale=scale
    )
    if bias is not None:
        blocked = bias.isneginf().all(-1)
        lse = lse.masked_fill(blocked, -math.inf)
    return tokens_first(out), lse.contiguous()


def _attention_backward_cpu(
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
    if not _fused_on_cpu(q, k, v, mask, is_causal):
        return attention_backward(grad, q, k, v, mask, out, lse, is_causal, scale)
    heads, kv_heads = q.shape[1], k.shape[1]
    if mask is not None:  # else each row attends to something
        lse = lse.masked_fill(lse.isneginf(), 0.0)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    grad_q, grad_k, grad_v = kernel(
        rows_last(grad),
        rows_last(q),
        rows_last(expand_heads(k, heads)),
        rows_last(expand_heads(v, heads)),
        rows_last(out),
        lse.contiguous(),
        0.0,
        is_causal,
        attn_mask=additive(mask, q.dtype),
        scale=scale,
    )
    grad_k, grad_v = sum_groups(grad_k, kv_heads), sum_groups(grad_v, kv_heads)
    return tokens_first(grad_q), tokens_first(grad_k), tokens_first(grad_v)


LIBRARY.impl("attention", _attention_cpu, "CPU")
LIBRARY.impl("attention_backward", _attention_backward_cpu, "CPU")
LIBRARY.impl("attention", attention, KERNEL)
LIBRARY.impl("attention_backward", attention_backward, KERNEL)


@fake_of("attention")
def _attention_fake(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    out = tokens_first(q.new_empty((*q.shape[:-1], v.shape[-1])))
    return out, q.new_empty(q.shape[:-1], dtype=wide)


@fake_of("attention_backward")
def _attention_backward_fake(grad, q, k, v, mask, out, lse, is_causal, scale):  # type: ignore[no-untyped-def]
    return tuple(tokens_first(x.new_empty(x.shape)) for x in (q, k, v))


def _attention_setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, mask, ctx.is_causal, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, mask, *output)
    ctx.mark_non_differentiable(output[1])


def _attention_autograd(ctx, grad, _grad_lse):  # type: ignore[no-untyped-def]
    q, k, v, mask, out, lse = ctx.saved_tensors
    grads = torch.ops.autopar.attention_backward(
        grad, q, k, v, mask, out, lse, ctx.is_causal, ctx.scale
    )
    return (*grads, None, None, None)


torch.library.register_autograd(
    "autopar::attention", _attention_autograd, setup_context=_attention_setup, lib=LIBRARY
)
