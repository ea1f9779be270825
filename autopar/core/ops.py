"""Device-neutral ops that autopar's graphs are made of, next to ATen's own.

Each op stands for a family that ATen spells differently per device or per call site, so that one
sharding rule and one plan serve them all:

- ``autopar::einsum``: every dense contraction (linear, matmul, bmm, addmm, and their gradients).
- ``autopar::attention``: scaled dot-product attention; its backward is an op too.
- ``autopar::dropout``: inverted dropout whose mask is a function of the global element index, so
  a shard draws the very mask that the whole tensor would (Widynski 2020, arXiv 2004.06278).
- ``autopar::uniform``: uniform numbers from the same counter.
- ``autopar::inverse_permutation``: where each row stands after a sort.
- ``autopar::token_nll``: negative log-likelihood per token over the last dim.

All have backward formulas made of these same ops, and fake implementations for tracing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.core.einsum import contract, gradient_equations, output_shape
from autopar.core.random import keep_mask, uniform_numbers

__all__ = ["LIBRARY_NAME", "NARROW", "REARRANGING", "ops"]

LIBRARY_NAME = "autopar"

_lib = torch.library.Library(LIBRARY_NAME, "DEF")
_lib.define("einsum(str equation, Tensor a, Tensor b) -> Tensor")
_lib.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, bool is_causal, float scale)"
    " -> (Tensor, Tensor)"
)
_lib.define(
    "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor out,"
    " Tensor lse, bool is_causal, float scale) -> (Tensor, Tensor, Tensor)"
)
_lib.define(
    "dropout(Tensor x, float p, Tensor seed, int salt, SymInt[] global_shape, SymInt[] offset)"
    " -> Tensor"
)
_lib.define(
    "uniform(Tensor seed, int salt, SymInt[] shape, SymInt[] global_shape, SymInt[] offset,"
    " ScalarType dtype) -> Tensor"
)
_lib.define("inverse_permutation(Tensor permutation) -> Tensor")
_lib.define("token_nll(Tensor logits, Tensor target, int ignore_index) -> (Tensor, Tensor)")
_lib.define(
    "token_nll_backward(Tensor grad, Tensor logits, Tensor target, Tensor lse, int ignore_index)"
    " -> Tensor"
)
ops = torch.ops.autopar

# one tensor in, all of its elements out, in another shape, order or dtype
REARRANGING = frozenset(
    {
        torch.ops.aten.view.default,
        torch.ops.aten._unsafe_view.default,
        torch.ops.aten.reshape.default,
        torch.ops.aten.transpose.int,
        torch.ops.aten.permute.default,
        torch.ops.aten.t.default,
        torch.ops.aten.unsqueeze.default,
        torch.ops.aten._to_copy.default,
    }
)

# the cast in front of a sum over ranks: unlike other casts that round, it passes partial sums
NARROW = torch.ops.prims.convert_element_type.default

_IMPL = "CompositeExplicitAutograd"


# --- einsum -----------------------------------------------------------------------------------
_lib.impl("einsum", contract, _IMPL)


@torch.library.register_fake("autopar::einsum", lib=_lib)
def _einsum_fake(equation: str, a: Tensor, b: Tensor) -> Tensor:
    if a.dtype != b.dtype:
        raise RuntimeError(f"a product of dtypes {a.dtype} and {b.dtype}; cast one of them")
    return a.new_empty(output_shape(equation, a.shape, b.shape))


def _einsum_setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.equation, a, b = inputs
    ctx.save_for_backward(a, b)


def _einsum_backward(ctx, grad):  # type: ignore[no-untyped-def]
    a, b = ctx.saved_tensors
    for_a, for_b = gradient_equations(ctx.equation)
    grad_a = ops.einsum(for_a, grad, b) if ctx.needs_input_grad[1] else None
    grad_b = ops.einsum(for_b, grad, a) if ctx.needs_input_grad[2] else None
    return None, grad_a, grad_b


torch.library.register_autograd(
    "autopar::einsum", _einsum_backward, setup_context=_einsum_setup, lib=_lib
)


def _wide(x: Tensor) -> Tensor:
    """`x` in at least float32: a log-sum-exp in bfloat16 is off by some percent of a weight."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


# --- attention --------------------------------------------------------------------------------
def _expand_heads(x: Tensor, num_heads: int) -> Tensor:
    """Repeat `(B, H_kv, S, D)` to `num_heads` query heads (grouped-query attention)."""
    groups = num_heads // x.shape[1]
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


def _tokens_first(x: Tensor) -> Tensor:
    """`(B, H, S, D)` that lies in memory as (B, S, H, D), as fused kernels write it.

    So heads that come of a projection, or go to one, are joined without a copy.
    """
    if x.dim() < 3:
        return x.contiguous()
    return x.transpose(-3, -2).contiguous().transpose(-3, -2)


def _sum_groups(grad: Tensor, num_kv_heads: int) -> Tensor:
    """The sum of `(B, H, S, D)` over the query heads of each of `num_kv_heads`."""
    if grad.shape[1] == num_kv_heads:
        return grad
    return grad.transpose(1, 2).unflatten(2, (num_kv_heads, -1)).sum(3).transpose(1, 2)


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    scores = _wide(torch.matmul(q, k.transpose(-1, -2))) * scale
    if is_causal:
        allowed = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    if mask is not None:
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -math.inf)
        else:
            scores = scores + mask
    return scores


def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """softmax(q kᵀ · scale + mask) v, with the log-sum-exp of each row, `(B, H, S)`.

    The softmax and the log-sum-exp are in at least float32, as in fused kernels.
    A row with nothing to attend to gives 0, as torch's own attention does.
    """
    k, v = _expand_heads(k, q.shape[1]), _expand_heads(v, q.shape[1])
    scores = _scores(q, k, mask, is_causal, scale)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - torch.where(lse.isinf(), 0.0, lse).unsqueeze(-1))
    return _tokens_first(torch.matmul(weights.to(v.dtype), v)), lse


def _attention_backward(
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
    """Gradients of `_attention` from the saved log-sum-exp (Dao et al. 2022, arXiv 2205.14135)."""
    num_kv_heads = k.shape[1]
    full_k, full_v = _expand_heads(k, q.shape[1]), _expand_heads(v, q.shape[1])
    scores = _scores(q, full_k, mask, is_causal, scale)
    weights = torch.exp(scores - torch.where(lse.isinf(), 0.0, lse).unsqueeze(-1))
    grad_v = torch.matmul(weights.to(grad.dtype).transpose(-1, -2), grad)
    grad_weights = _wide(torch.matmul(grad, full_v.transpose(-1, -2)))
    delta = (_wide(grad) * out).sum(-1, keepdim=True)
    grad_scores = (weights * (grad_weights - delta) * scale).to(q.dtype)
    grad_q = torch.matmul(grad_scores, full_k)
    grad_k = torch.matmul(grad_scores.transpose(-1, -2), q)
    grad_k, grad_v = _sum_groups(grad_k, num_kv_heads), _sum_groups(grad_v, num_kv_heads)
    return _tokens_first(grad_q), _tokens_first(grad_k), _tokens_first(grad_v)


def _fused_on_cpu(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
    """True if ATen's CPU flash kernel computes this call."""
    return (
        q.dim() == k.dim() == v.dim() == 4
        and q.shape[-1] == k.shape[-1] == v.shape[-1]
        and q.shape[0] == k.shape[0] == v.shape[0]
        and not (is_causal and (mask is not None or q.shape[2] != k.shape[2]))
        and (mask is None or mask.dim() == 4)
        and q.numel() > 0
        and k.numel() > 0
    )


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask if mask is None else mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -math.inf)


def _attention_cpu(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """ATen's flash kernel; a row with nothing to attend to keeps a log-sum-exp of -inf."""
    if not _fused_on_cpu(q, k, v, mask, is_causal):
        return _attention(q, k, v, mask, is_causal, scale)
    k, v = _expand_heads(k, q.shape[1]), _expand_heads(v, q.shape[1])
    bias = _additive(mask, q.dtype)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, is_causal, attn_mask=bias, scale=scale
    )
    if bias is not None:
        blocked = bias.isneginf().all(-1)
        lse = lse.masked_fill(blocked, -math.inf)
    return _tokens_first(out), lse.contiguous()


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
        return _attention_backward(grad, q, k, v, mask, out, lse, is_causal, scale)
    heads, kv_heads = q.shape[1], k.shape[1]
    if mask is not None:  # else each row attends to something
        lse = lse.masked_fill(lse.isinf(), 0.0)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    grad_q, grad_k, grad_v = kernel(
        grad,
        q,
        _expand_heads(k, heads),
        _expand_heads(v, heads),
        out,
        lse,
        0.0,
        is_causal,
        attn_mask=_additive(mask, q.dtype),
        scale=scale,
    )
    grad_k, grad_v = _sum_groups(grad_k, kv_heads), _sum_groups(grad_v, kv_heads)
    return _tokens_first(grad_q), _tokens_first(grad_k), _tokens_first(grad_v)


_lib.impl("attention", _attention_cpu, "CPU")
_lib.impl("attention_backward", _attention_backward_cpu, "CPU")
_lib.impl("attention", _attention, _IMPL)
_lib.impl("attention_backward", _attention_backward, _IMPL)


@torch.library.register_fake("autopar::attention", lib=_lib)
def _attention_fake(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    out = _tokens_first(q.new_empty((*q.shape[:-1], v.shape[-1])))
    return out, q.new_empty(q.shape[:-1], dtype=wide)


@torch.library.register_fake("autopar::attention_backward", lib=_lib)
def _attention_backward_fake(grad, q, k, v, mask, out, lse, is_causal, scale):  # type: ignore[no-untyped-def]
    return tuple(_tokens_first(x.new_empty(x.shape)) for x in (q, k, v))


def _attention_setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, mask, ctx.is_causal, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, mask, *output)
    ctx.mark_non_differentiable(output[1])


def _attention_autograd(ctx, grad, _grad_lse):  # type: ignore[no-untyped-def]
    q, k, v, mask, out, lse = ctx.saved_tensors
    grads = ops.attention_backward(grad, q, k, v, mask, out, lse, ctx.is_causal, ctx.scale)
    return (*grads, None, None, None)


torch.library.register_autograd(
    "autopar::attention", _attention_autograd, setup_context=_attention_setup, lib=_lib
)


# --- dropout and random numbers ---------------------------------------------------------------
def _dropout(
    x: Tensor,
    p: float,
    seed: Tensor,
    salt: int,
    global_shape: Sequence[int],
    offset: Sequence[int],
) -> Tensor:
    """x · mask / (1 − p); `offset` is where this block begins in the global tensor."""
    if p >= 1.0:
        return torch.zeros_like(x)
    keep = keep_mask(seed, salt, p, x.shape, global_shape, offset)
    return torch.where(keep, x * (1.0 / (1.0 - p)), 0.0)


_lib.impl("dropout", _dropout, _IMPL)


@torch.library.register_fake("autopar::dropout", lib=_lib)
def _dropout_fake(x, p, seed, salt, global_shape, offset):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape)


def _dropout_setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    _, ctx.p, seed, ctx.salt, ctx.global_shape, ctx.offset = inputs
    ctx.save_for_backward(seed)


def _dropout_backward(ctx, grad):  # type: ignore[no-untyped-def]
    (seed,) = ctx.saved_tensors
    grad_x = ops.dropout(grad, ctx.p, seed, ctx.salt, ctx.global_shape, ctx.offset)
    return grad_x, None, None, None, None, None


torch.library.register_autograd(
    "autopar::dropout", _dropout_backward, setup_context=_dropout_setup, lib=_lib
)


def _uniform(
    seed: Tensor,
    salt: int,
    shape: Sequence[int],
    global_shape: Sequence[int],
    offset: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    return uniform_numbers(seed, salt, shape, global_shape, offset).to(dtype)


_lib.impl("uniform", _uniform, _IMPL)


@torch.library.register_fake("autopar::uniform", lib=_lib)
def _uniform_fake(seed, salt, shape, global_shape, offset, dtype):  # type: ignore[no-untyped-def]
    return seed.new_empty(shape, dtype=dtype)


def _inverse_permutation(permutation: Tensor) -> Tensor:
    rows = torch.arange(len(permutation), dtype=permutation.dtype, device=permutation.device)
    return torch.empty_like(permutation).scatter_(0, permutation, rows)


_lib.impl("inverse_permutation", _inverse_permutation, _IMPL)
torch.library.register_fake("autopar::inverse_permutation", torch.empty_like, lib=_lib)


# --- cross-entropy ----------------------------------------------------------------------------
def _token_nll(logits: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """lse(logits) − logits[target] per token, 0 where ignored; and the log-sum-exp.

    Computed in at least float32, which the log-sum-exp keeps.
    """
    ignored = target == ignore_index
    index = torch.where(ignored, 0, target).unsqueeze(-1)
    lse = torch.logsumexp(_wide(logits), dim=-1)
    picked = torch.gather(logits, -1, index).squeeze(-1)
    return torch.where(ignored, 0.0, lse - picked).to(logits.dtype), lse


def _token_nll_backward(
    grad: Tensor, logits: Tensor, target: Tensor, lse: Tensor, ignore_index: int
) -> Tensor:
    ignored = target == ignore_index
    scale = torch.where(ignored, 0.0, grad).unsqueeze(-1)
    index = torch.where(ignored, 0, target).unsqueeze(-1)
    # in place: a copy of the logits is large
    probs = (_wide(logits) - lse.unsqueeze(-1)).exp_().mul_(scale)
    return probs.scatter_add_(-1, index, -scale.to(probs.dtype)).to(logits.dtype)


_lib.impl("token_nll", _token_nll, _IMPL)
_lib.impl("token_nll_backward", _token_nll_backward, _IMPL)


@torch.library.register_fake("autopar::token_nll", lib=_lib)
def _token_nll_fake(logits: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(logits.dtype, torch.float32)
    return logits.new_empty(target.shape), logits.new_empty(target.shape, dtype=wide)


@torch.library.register_fake("autopar::token_nll_backward", lib=_lib)
def _token_nll_backward_fake(grad, logits, target, lse, ignore_index):  # type: ignore[no-untyped-def]
    return logits.new_empty(logits.shape)


def _token_nll_setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    logits, target, ctx.ignore_index = inputs
    ctx.save_for_backward(logits, target, output[1])
    ctx.mark_non_differentiable(output[1])


def _token_nll_autograd(ctx, grad, _grad_lse):  # type: ignore[no-untyped-def]
    logits, target, lse = ctx.saved_tensors
    return ops.token_nll_backward(grad, logits, target, lse, ctx.ignore_index), None, None


torch.library.register_autograd(
    "autopar::token_nll", _token_nll_autograd, setup_context=_token_nll_setup, lib=_lib
)
