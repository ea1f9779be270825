"""Cross-entropy over whole or vocabulary-sharded logits, and fused with the linear in front of it.

For a token with logits z and target t, nll = lse − z_t with lse = log Σ exp z. The ranks that hold
parts of z exchange three numbers a token (Shoeybi et al. 2019, arXiv 1909.08053): the maximum m of
each part, s = Σ exp(z − m), and z_t where the part has it; Σ_ranks s·exp(m − max m) is the whole
sum. One pass over z yields all three (Milakov and Gimelshein 2018, arXiv 1805.02867). Backward:
dz = (exp(z − lse) − onehot(t)) · dnll.

`linear_nll` takes z = x·Wᵀ in chunks of rows, so that no more than one chunk of logits is ever
there, and computes them again in the backward (as in Hsu et al. 2024, arXiv 2410.10989, but with
any gradient per token).
"""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.kernels.registry import define, wide, wide_dtype

__all__ = ["CHUNK_ROWS"]

CHUNK_ROWS = 1024


def _local_target(target: Tensor, start: int, count: int, ignore: int) -> tuple[Tensor, Tensor]:
    """Index of the target among `count` logits from `start`, and whether it is there and counts."""
    index = target - start
    inside = (index >= 0) & (index < count) & (target != ignore)
    return torch.where(inside, index, 0).unsqueeze(-1), inside


def _stats_fake(logits, target, start, ignore_index):  # type: ignore[no-untyped-def]
    return tuple(logits.new_empty(logits.shape[:-1], dtype=wide_dtype(logits)) for _ in range(3))


@define(
    "nll_stats(Tensor logits, Tensor target, int start, int ignore_index)"
    " -> (Tensor, Tensor, Tensor)",
    module="loss",
    fake=_stats_fake,
)
def nll_stats(
    logits: Tensor, target: Tensor, start: int, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Maximum, Σ exp(z − maximum) and the target's logit (0 if elsewhere) of each token.

    Where the maximum is infinite, the sum is taken without subtracting it.
    """
    z = wide(logits)
    top = z.amax(-1)
    shift = torch.where(top.isinf(), 0.0, top)
    total = torch.exp(z - shift.unsqueeze(-1)).sum(-1)
    index, inside = _local_target(target, start, logits.shape[-1], ignore_index)
    picked = torch.where(inside, z.gather(-1, index).squeeze(-1), 0.0)
    return top, total, picked


def _token_nll_fake(logits, target, ignore_index):  # type: ignore[no-untyped-def]
    out = logits.new_empty(logits.shape[:-1], dtype=wide_dtype(logits))
    return out, out.new_empty(out.shape)


@define(
    "token_nll(Tensor logits, Tensor target, int ignore_index) -> (Tensor, Tensor)",
    module="loss",
    fake=_token_nll_fake,
)
def token_nll(logits: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """nll, 0 where ignored, and lse of each token, in at least float32."""
    z = wide(logits)
    lse = torch.logsumexp(z, -1)
    index, inside = _local_target(target, 0, logits.shape[-1], ignore_index)
    return torch.where(inside, lse - z.gather(-1, index).squeeze(-1), 0.0), lse


def _nll_backward_fake(grad, logits, target, lse, start, ignore_index):  # type: ignore[no-untyped-def]
    return logits.new_empty(logits.shape)


@define(
    "nll_backward(Tensor grad, Tensor logits, Tensor target, Tensor lse, int start,"
    " int ignore_index) -> Tensor",
    module="loss",
    fake=_nll_backward_fake,
)
def nll_backward(
    grad: Tensor, logits: Tensor, target: Tensor, lse: Tensor, start: int, ignore_index: int
) -> Tensor:
    """Gradient of this part of the logits, in their dtype; 0 for ignored tokens."""
    scale = torch.where(target == ignore_index, 0.0, wide(grad)).unsqueeze(-1)
    out = torch.exp(wide(logits) - lse.unsqueeze(-1)) * scale
    index, inside = _local_target(target, start, logits.shape[-1], ignore_index)
    out = out.scatter_add(-1, index, torch.where(inside.unsqueeze(-1), -scale, 0.0).to(out.dtype))
    return out.to(logits.dtype).contiguous()


def _linear_nll_fake(x, weight, target, ignore_index):  # type: ignore[no-untyped-def]
    out = x.new_empty(target.shape, dtype=wide_dtype(x))
    return out, out.new_empty(out.shape)


@define(
    "linear_nll(Tensor x, Tensor weight, Tensor target, int ignore_index) -> (Tensor, Tensor)",
    module="loss",
    fake=_linear_nll_fake,
)
def linear_nll(
    x: Tensor, weight: Tensor, target: Tensor, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """nll and lse of the logits x·Wᵀ; x `(…, D)`, weight `(V, D)`, a target a row of x."""
    return in_chunks(x, weight, target, ignore_index, token_nll)


def in_chunks(x, weight, target, ignore_index, nll):  # type: ignore[no-untyped-def]
    """nll and lse by a function of a chunk of logits."""
    rows, targets = x.reshape(-1, x.shape[-1]), target.reshape(-1)
    parts = [
        nll(r @ weight.t(), t, ignore_index)
        for r, t in zip(rows.split(CHUNK_ROWS), targets.split(CHUNK_ROWS), strict=True)
    ]
    loss, lse = (torch.cat(column).reshape(target.shape) for column in zip(*parts, strict=True))
    return loss, lse


def _linear_backward_fake(grad, x, weight, target, lse, ignore_index):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


@define(
    "linear_nll_backward(Tensor grad, Tensor x, Tensor weight, Tensor target, Tensor lse,"
    " int ignore_index) -> (Tensor, Tensor)",
    module="loss",
    fake=_linear_backward_fake,
)
def linear_nll_backward(
    grad: Tensor, x: Tensor, weight: Tensor, target: Tensor, lse: Tensor, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the weight; logits are computed again, a chunk at a time."""
    return backward_in_chunks(grad, x, weight, target, lse, ignore_index, nll_backward)


def backward_in_chunks(grad, x, weight, target, lse, ignore_index, slope):  # type: ignore[no-untyped-def]
    """Gradients by a function that yields the gradient of a chunk of logits.

    The weight's gradient is summed over chunks in at least float32.
    """
    rows = x.reshape(-1, x.shape[-1])
    pieces = [v.reshape(-1).split(CHUNK_ROWS) for v in (grad, target, lse)]
    dx = torch.empty_like(rows)
    dw = torch.zeros(weight.shape, dtype=wide_dtype(weight), device=weight.device)
    begin = 0
    for r, g, t, s in zip(rows.split(CHUNK_ROWS), *pieces, strict=True):
        dz = slope(g, r @ weight.t(), t, s, 0, ignore_index)
        torch.mm(dz, weight, out=dx[begin : begin + len(r)])
        dw += wide(dz.t() @ r)
        begin += len(r)
    return dx.reshape(x.shape), dw.to(weight.dtype)
