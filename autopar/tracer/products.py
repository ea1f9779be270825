"""Products of matrices, and attention, as device-neutral ops: `autopar.einsum` and its like.

The replacements of ATen's calls; see `decompositions.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.core.einsum import parse_equation
from autopar.core.ops import ops
from autopar.tracer.randomness import RandomContext, dropout

__all__ = [
    "addbmm",
    "addmm",
    "addmv",
    "addr",
    "attention",
    "baddbmm",
    "bmm",
    "einsum",
    "linear",
    "matmul",
    "mm",
]

_LETTERS = "abcdefghijlmopqrsuvwxyz"  # k, n and t are kept for weights


def linear(rng: RandomContext, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    lead = _LETTERS[: x.dim() - 1]
    out = ops.einsum(f"{lead}k,nk->{lead}n", x, weight)
    return out if bias is None else out + bias


def matmul(rng: RandomContext, a: Tensor, b: Tensor) -> Tensor:
    if a.dim() < 2 or b.dim() < 2:
        return torch.matmul(a, b)
    rank = max(a.dim(), b.dim()) - 2
    batch_a, batch_b = _LETTERS[:rank][rank - a.dim() + 2 :], _LETTERS[:rank][rank - b.dim() + 2 :]
    sizes = dict(zip(batch_a, a.shape[:-2], strict=True))
    if any(sizes.get(c, size) != size for c, size in zip(batch_b, b.shape[:-2], strict=True)):
        return torch.matmul(a, b)  # broadcasts a dim of size 1
    return ops.einsum(f"{batch_a}yk,{batch_b}kz->{_LETTERS[:rank]}yz", a, b)


def _plus(out: Tensor, bias: Tensor, beta: float, alpha: float) -> Tensor:
    out = out if alpha == 1 else out * alpha
    if beta == 0:  # torch reads no bias then, which may hold NaN
        return out
    return out + (bias if beta == 1 else bias * beta)


def _product_plus(equation: str) -> Callable[..., Tensor]:
    """A call that adds the product of its last two operands to the first."""

    def call(
        rng: RandomContext, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1
    ) -> Tensor:
        return _plus(ops.einsum(equation, a, b), bias, beta, alpha)

    return call


addmm = _product_plus("yk,kn->yn")
addmv = _product_plus("yk,k->y")
baddbmm = _product_plus("byk,bkn->byn")


def addbmm(
    rng: RandomContext, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    return _plus(ops.einsum("byk,bkn->byn", a, b).sum(0), bias, beta, alpha)


def addr(
    rng: RandomContext, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    return _plus(a.unsqueeze(1) * b, bias, beta, alpha)


def mm(rng: RandomContext, a: Tensor, b: Tensor) -> Tensor:
    return ops.einsum("yk,kn->yn", a, b)


def bmm(rng: RandomContext, a: Tensor, b: Tensor) -> Tensor:
    return ops.einsum("byk,bkn->byn", a, b)


def _broadcasts(equation: str, tensors: Sequence[Tensor]) -> bool:
    """True if a letter has size 1 in one operand and another in the other."""
    first, second = (
        dict(zip(letters, x.shape, strict=False))
        for letters, x in zip(equation.partition("->")[0].split(","), tensors, strict=True)
    )
    return any(first[letter] != second[letter] for letter in first.keys() & second.keys())


def einsum(rng: RandomContext, equation: str, tensors: list[Tensor], *, path: Any = None) -> Any:
    """Two operands without sums or repeats in one operand; all else as torch spells it."""
    compact = equation.replace(" ", "")
    plain = len(tensors) == 2 and "." not in compact and "->" in compact
    if plain and not _broadcasts(compact, tensors):
        try:
            parse_equation(compact)
        except ValueError:
            return torch.einsum(equation, *tensors)
        # torch multiplies where nothing is summed, and a product promotes; else it has refused
        dtype = torch.result_type(*tensors)
        return ops.einsum(compact, *(x.to(dtype) for x in tensors))
    return torch.einsum(equation, *tensors)


def attention(
    rng: RandomContext,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    factor = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    learned_mask = attn_mask is not None and attn_mask.requires_grad
    if {x.dim() for x in (q, k, v)} == {4} and dropout_p == 0.0 and not learned_mask:
        q, k, v = _of_one_batch(q, k, v, enable_gqa)
        return ops.attention(q, k, v, attn_mask, is_causal, factor)[0]
    if enable_gqa:
        k, v = (_repeated(x, q.shape[-3]) for x in (k, v))
    scores = matmul(rng, q, k.transpose(-1, -2)) * factor
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = torch.softmax(scores, dim=-1)
    return matmul(rng, dropout(rng, weights, dropout_p, True), v)


def _of_one_batch(q: Tensor, k: Tensor, v: Tensor, grouped: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Operands (B, H, S, D) that broadcast, as `ops.attention` takes them: with one B.

    Keys and values keep fewer heads than queries where one each serves as many of them.
    """
    leading = [(x.shape[0], 1 if grouped else x.shape[1]) for x in (k, v)]
    batch, heads = torch.broadcast_shapes(q.shape[:2], *leading)
    if grouped and k.shape[1] != v.shape[1]:
        k, v = (_repeated(x, heads) for x in (k, v))
    served = max(k.shape[1], v.shape[1])
    q, k, v = (
        x if x.shape[:2] == (batch, count) else x.expand(batch, count, -1, -1)
        for x, count in ((q, heads), (k, served), (v, served))
    )
    return q, k, v


def _repeated(x: Tensor, heads: int) -> Tensor:
    """Keys or values (…, H, S, D), each head as often as queries with `heads` read it."""
    groups = heads // x.shape[-3]
    if groups == 1:
        return x
    return x.unsqueeze(-3).expand(*x.shape[:-2], groups, *x.shape[-2:]).flatten(-4, -3)
