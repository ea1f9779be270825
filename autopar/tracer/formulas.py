"""ATen calls expressed in ops that have sharding rules; `decompositions` says when they apply.

The first argument of those that replace a call before autograd is the `RandomContext`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.core.ops import ops

__all__ = [
    "affine_grid",
    "bilinear",
    "block_diag",
    "det",
    "dist",
    "embedding_bag_backward",
    "exponential",
    "glu",
    "histc",
    "masked_scatter",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "multinomial",
    "normal",
    "randint",
    "randint_from",
    "randperm",
    "rot90",
    "rrelu",
    "rrelu_with_noise",
    "select_scatter",
    "slice_scatter",
    "slogdet",
    "trace",
    "uniform",
    "vdot",
    "weight_norm",
]

aten = torch.ops.aten


def vdot(x: Tensor, y: Tensor) -> Tensor:
    return (x.conj() * y).sum()


def _lu(a: Tensor) -> tuple[Tensor, Tensor]:
    """LU and pivots of A, or of its transpose where A is contiguous, as its derivative has it.

    ATen's calls factor the transpose by the strides of each run, to save a copy. Backward takes its
    choice from those of the trace, and a rank may have others; `linalg_lu_factor_ex` minds neither.
    """
    transposed = a.is_contiguous() and not a.is_complex()
    factors, pivots, _ = torch.linalg.lu_factor_ex(a.mT if transposed else a)
    return factors, pivots


def _sign_of_permutation(pivots: Tensor, dtype: torch.dtype) -> Tensor:
    """The determinant of P: -1 for each row that is exchanged with another."""
    own = torch.arange(1, pivots.shape[-1] + 1, dtype=pivots.dtype, device=pivots.device)
    return (1 - 2 * (pivots != own).to(dtype)).prod(-1)


def det(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`_linalg_det` of A (…, N, N): the determinant (…), LU and pivots."""
    factors, pivots = _lu(a)
    diagonal = factors.diagonal(0, -2, -1)
    return _sign_of_permutation(pivots, a.dtype) * diagonal.prod(-1), factors, pivots


def slogdet(a: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`_linalg_slogdet` of A (…, N, N): sign (…), logarithm of the rest (…), LU and pivots."""
    factors, pivots = _lu(a)
    diagonal = factors.diagonal(0, -2, -1)
    sign = _sign_of_permutation(pivots, a.dtype) * diagonal.sgn().prod(-1)
    return sign, diagonal.abs().log().sum(-1), factors, pivots


def dist(_rng: object, x: Tensor, y: Tensor, p: float = 2.0) -> Tensor:
    return torch.linalg.vector_norm(x - y, p)


def glu(_rng: object, x: Tensor, dim: int = -1) -> Tensor:
    value, gate = x.chunk(2, dim)
    return value * gate.sigmoid()


def rot90(_rng: object, x: Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    first, second = dims
    if k % 4 == 0:
        return x.clone()
    if k % 4 == 2:
        return x.flip((first, second))
    return x.flip(second if k % 4 == 1 else first).transpose(first, second)


def block_diag(_rng: object, tensors: Sequence[Tensor]) -> Tensor:
    """Matrices along a diagonal, with zeros around them; promotes as a sum does."""
    blocks = [torch.atleast_2d(x) for x in tensors]
    width, before, rows = sum(x.shape[1] for x in blocks), 0, []
    for block in blocks:
        rows.append(torch.nn.functional.pad(block, (before, width - before - block.shape[1])))
        before += block.shape[1]
    return torch.cat(rows)


def trace(_rng: object, x: Tensor) -> Tensor:
    return x.diagonal().sum()


def affine_grid(
    _rng: object, theta: Tensor, size: Sequence[int], align_corners: bool = False
) -> Tensor:
    """Places theta · (x, y, …, 1) that an affine map of the output's pixels reads.

    theta (N, D, D + 1), size (N, C, *space) -> (N, *space, D), with D spatial dims, x first.
    """
    space = size[2:]
    steps = []
    for count in space:
        edge = 1.0 if align_corners else 1.0 - 1.0 / count
        line = torch.linspace(-edge, edge, count, dtype=theta.dtype, device=theta.device)
        steps.append(line if count > 1 or not align_corners else torch.zeros_like(line))
    places = torch.meshgrid(*steps, indexing="ij")
    base = torch.stack([*reversed(places), torch.ones_like(places[0])], dim=-1)
    flat = ops.einsum("pj,bij->bpi", base.flatten(0, -2), theta)
    return flat.unflatten(1, list(space))


def masked_scatter(_rng: object, x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """The elements of `source` in order at the places of the mask, which counts them.

    Where the mask is one for all features of a token, whole tokens are counted.
    """
    wide = mask.shape == x.shape and x.dim() > 1 and mask.stride(-1) == 0
    if wide and source.shape[-1] == x.shape[-1]:
        picked = mask.select(-1, 0)
        rows = source.reshape(-1, x.shape[-1])
        place = (picked.flatten().cumsum(0) - 1).view(picked.shape)
        taken = rows[torch.where(picked, place, 0)]
        return torch.where(picked.unsqueeze(-1), taken, x)
    mask, x = torch.broadcast_tensors(mask, x)
    place = (mask.flatten().cumsum(0) - 1).view(mask.shape)
    return torch.where(mask, source.flatten()[torch.where(mask, place, 0)], x)


def slice_scatter(
    _rng: object, x: Tensor, source: Tensor, dim: int = 0, *bounds: Any, **more: Any
) -> Tensor:
    """Autograd has no formula of it for complex numbers, nor of `select_scatter`."""
    if not x.is_complex():
        return aten.slice_scatter.default(x, source, dim, *bounds, **more)
    parts = _parts(x), _parts(source.to(x.dtype))
    return torch.view_as_complex(aten.slice_scatter.default(*parts, dim % x.dim(), *bounds, **more))


def select_scatter(_rng: object, x: Tensor, source: Tensor, dim: int, index: int) -> Tensor:
    if not x.is_complex():
        return aten.select_scatter.default(x, source, dim, index)
    parts = _parts(x), _parts(source.to(x.dtype))
    return torch.view_as_complex(aten.select_scatter.default(*parts, dim % x.dim(), index))


def _parts(x: Tensor) -> Tensor:
    """Real and imaginary parts behind the other dims."""
    return torch.view_as_real(x.resolve_conj())


def histc(_rng: object, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Of whole numbers too, which the kernels of some devices refuse."""
    if x.is_floating_point():
        return aten.histc.default(x, *args, **kwargs)
    return aten.histc.default(x.to(torch.float64), *args, **kwargs).to(x.dtype)


def bilinear(
    _rng: object, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """x W y for each output feature; x (…, I), y (…, J), weight (O, I, J)."""
    lead = "abcdefgh"[: x.dim() - 1]
    half = ops.einsum(f"{lead}k,nkj->{lead}nj", x, weight)
    out = (half * y.unsqueeze(-2)).sum(-1)
    return out if bias is None else out + bias


def weight_norm(_rng: object, v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """g v / ‖v‖, the norm over all dims but `dim` (Salimans and Kingma 2016, arXiv 1602.07868)."""
    dims = [i for i in range(v.dim()) if dim == -1 or i != dim % v.dim()]
    return v * (g / (v * v).sum(dims, keepdim=True).sqrt())


def _reduced(losses: Tensor, reduction: int) -> Tensor:
    """As torch numbers reductions: 0 none, 1 mean, 2 sum."""
    if reduction == 0:
        return losses
    return losses.mean() if reduction == 1 else losses.sum()


def multi_margin_loss(
    _rng: object,
    x: Tensor,
    target: Tensor,
    p: float = 1,
    margin: float = 1,
    weight: Tensor | None = None,
    reduction: int = 1,
) -> Tensor:
    """The losses of rows, then their reduction: rows are independent of each other."""
    losses = aten.multi_margin_loss.default(x, target, p, margin, weight, 0)
    return _reduced(losses, reduction)


def multilabel_margin_loss(_rng: object, x: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    """As `multi_margin_loss`, with a list of targets in each row."""
    return _reduced(aten.multilabel_margin_loss.default(x, target, 0), reduction)


def embedding_bag_backward(
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor,
    offset2bag: Tensor,
    bag_size: Tensor,
    maximum_indices: Tensor,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Tensor | None,
    padding_idx: int = -1,
) -> Tensor:
    """Always dense. The bag of each index comes from the offsets: a fast kernel returns none."""
    places = torch.arange(indices.shape[0], dtype=offsets.dtype, device=indices.device)
    bags = (torch.searchsorted(offsets, places, right=True) - 1).to(indices.dtype)
    return aten._embedding_bag_dense_backward.default(
        grad,
        indices,
        bags,
        bag_size,
        maximum_indices,
        num_weights,
        scale_grad_by_freq,
        mode,
        per_sample_weights,
        padding_idx,
    )


# --- random numbers ---------------------------------------------------------------------------
def uniform(rng: Any, x: Tensor, low: float = 0.0, high: float = 1.0, **options: Any) -> Tensor:
    """What `x.uniform_()` yields."""
    return low + (high - low) * rng.uniform(x.shape, x.dtype)


def exponential(rng: Any, x: Tensor, lambd: float = 1.0, **options: Any) -> Tensor:
    """What `x.exponential_()` yields: -log(1 - u) / λ."""
    return (-torch.log1p(-rng.uniform(x.shape, torch.float64)) / lambd).to(x.dtype)


def normal(rng: Any, x: Tensor, mean: float = 0.0, std: float = 1.0, **options: Any) -> Tensor:
    """What `x.normal_()` yields: the Box-Muller transform of two uniforms."""
    radius = torch.sqrt(-2.0 * torch.log1p(-rng.uniform(x.shape, torch.float64)))
    angle = 2.0 * math.pi * rng.uniform(x.shape, torch.float64)
    return (mean + std * radius * torch.cos(angle)).to(x.dtype)


def rrelu(
    rng: Any, x: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, train: bool = False, *_: Any
) -> Tensor:
    """Negative numbers times a slope that is drawn for each, or times the mean of the slopes."""
    slope = uniform(rng, x, lower, upper) if train else (lower + upper) / 2
    return torch.where(x > 0, x, x * slope)


def rrelu_with_noise(
    rng: Any,
    x: Tensor,
    noise: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    train: bool = False,
    *_: Any,
) -> tuple[Tensor, Tensor]:
    """What `F.rrelu_` becomes; only ATen's own backward reads the noise."""
    return rrelu(rng, x, lower, upper, train), noise


def randint(rng: Any, high: int, size: Sequence[int], **options: Any) -> Tensor:
    return randint_from(rng, 0, high, size, **options)


def randint_from(rng: Any, low: int, high: int, size: Sequence[int], **options: Any) -> Tensor:
    drawn = torch.floor(rng.uniform(size, torch.float64) * (high - low)) + low
    return drawn.to(options.get("dtype") or torch.int64)


def randperm(rng: Any, n: int, **options: Any) -> Tensor:
    """The order of n uniforms."""
    order = rng.uniform([n], torch.float64).argsort()
    return order.to(options.get("dtype") or torch.int64)


def multinomial(
    rng: Any, x: Tensor, num_samples: int, replacement: bool = False, **options: Any
) -> Tensor:
    """Places by their weights x (…, k): of exponential numbers over weights the least, or, where a
    place may be drawn again, where a uniform number falls in the sums of the weights."""
    weights = x.detach().double()
    if not replacement or num_samples == 1:
        waits = -torch.log1p(-rng.uniform(x.shape, torch.float64))
        speeds = torch.where(weights > 0, weights / waits, 0.0)
        return speeds.topk(num_samples, dim=-1).indices
    ends = weights.cumsum(-1)
    drawn = rng.uniform([*x.shape[:-1], num_samples], torch.float64) * ends[..., -1:]
    return torch.searchsorted(ends, drawn, right=True).clamp(max=x.shape[-1] - 1)
