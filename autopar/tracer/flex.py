"""`flex_attention`, whose mask and scores a user's functions describe, as plain attention.

    out = softmax(score_mod(q kᵀ · scale) where mask_mod, else -inf) v

torch maps both functions over batch, head, query and key by `vmap`, and compiles the result; on a
CPU it has no backward. Here each function is called once, on index tensors (B, 1, 1, 1),
(1, H, 1, 1), (1, 1, S, 1) and (1, 1, 1, T), which gives the whole mask or bias: its elementwise
ops broadcast, and what it reads at an index that runs over a whole dim is a view of that tensor, so
that a batch of documents stays split over ranks. A `score_mod` that adds something to the score, or
sets it to -inf, is the mask of `scaled_dot_product_attention`; any other one (a soft cap) is
applied to scores that are computed by plain ops. A function that does more than elementwise ops is
mapped by `vmap`, as torch does it.

Which blocks of the scores a kernel may skip follows from `mask_mod`, and is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from autopar._tracing import (
    flex_outputs,
    is_sliced,
    made_for,
    makes_mask,
    mapped_over_scores,
    says_nothing,
)
from autopar.core.attention import expand_heads
from autopar.core.library import wide
from autopar.tracer.elementwise import Added, Elementwise, MoreThanElementwise

__all__ = ["Flex"]

Mod = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class _Made:
    """A mask that `create_mask` has made of a function, in a shape that broadcasts."""

    mod: Mod
    mask: Tensor
    shape: tuple[int, ...]
    read: frozenset[int]  # dims whose indices the function looks at

    def serves(self, shape: Sequence[int], device: torch.device) -> bool:
        dims = zip(range(len(shape)), self.shape, shape, strict=True)
        same = all(own == other or dim not in self.read for dim, own, other in dims)
        return same and self.mask.device == device


class Flex:
    """The calls of one export.

    Blocks that share a mask, made in front of them, share what it says of all scores.
    """

    def __init__(self) -> None:
        self.made: dict[int, _Made] = {}

    def flex_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: Mod | None = None,
        block_mask: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        kernel_options: object = None,
        *,
        return_aux: Any = None,
    ) -> Any:
        """In place of torch's function of this name."""
        _check(query, key, block_mask, enable_gqa)
        if key.shape[0] != query.shape[0]:
            key, value = (x.expand(query.shape[0], *x.shape[1:]) for x in (key, value))
        indices = _indices((*query.shape[:3], key.shape[2]), query.device)
        mask = None if says_nothing(block_mask) else self._mask(block_mask.mask_mod, indices)
        scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
        added = Added() if score_mod is None else _added(score_mod, indices, query)
        if return_lse or return_aux is not None or added is None:
            found = _by_plain_ops(query, key, value, score_mod, mask, indices, scale)
            return flex_outputs(*found, return_lse, return_aux)
        whole = _whole_mask(added, mask, query)
        return scaled_dot_product_attention(
            query, key, value, whole, scale=scale, enable_gqa=enable_gqa
        )

    def create_mask(
        self,
        mod_fn: Mod,
        B: int | None,  # noqa: N803  (torch's names)
        H: int | None,  # noqa: N803
        Q_LEN: int,  # noqa: N803
        KV_LEN: int,  # noqa: N803
        device: Any = None,
    ) -> Tensor:
        """In place of torch's function: the boolean mask (B, H, S, T) that a user's describes."""
        if device is None:
            device = torch.accelerator.current_accelerator() or "cpu"
        shape = (B or 1, H or 1, Q_LEN, KV_LEN)
        indices = _indices(shape, torch.device(device))
        if makes_mask(mod_fn):
            mask, read = _called(mod_fn, (), indices)
            self.made[id(mod_fn)] = _Made(mod_fn, mask, shape, read)
            return mask.expand(shape)
        zeros = torch.zeros(shape, device=device)
        return ~torch.isneginf(_called(mod_fn, (zeros,), indices)[0].expand(shape))

    def _mask(self, mod: Mod, indices: Sequence[Tensor]) -> Tensor:
        made = self.made.get(id(mod))
        shape = [x.numel() for x in indices]
        if made is not None and made.serves(shape, indices[0].device):
            return made.mask
        return _called(mod, (), indices)[0]


def _check(q: Tensor, k: Tensor, block_mask: Any, enable_gqa: bool) -> None:
    """What torch says of operands that do not fit."""
    if q.dim() != 4 or k.dim() != 4:
        raise NotImplementedError("NYI: query, key, and value must be 4D tensors")
    heads, kv_heads = q.shape[1], k.shape[1]
    if heads != kv_heads and (not enable_gqa or heads % kv_heads):
        raise ValueError(
            f"flex_attention of {heads} query heads and {kv_heads} key heads: these must be equal, "
            "or with enable_gqa=True divide them"
        )
    if q.shape[0] != k.shape[0] and k.shape[0] != 1:
        raise ValueError(
            f"flex_attention of a batch of {q.shape[0]} queries and {k.shape[0]} keys: these must "
            "be equal, or the keys one for all"
        )
    if block_mask is None:
        return
    if is_sliced(block_mask):
        raise RuntimeError("Cannot use mask_mod from a sliced BlockMask")
    lengths = (q.shape[2], k.shape[2])
    if made_for(block_mask) not in (None, lengths):
        raise ValueError(
            f"block_mask was created for block_mask.shape={block_mask.shape} but got "
            f"q_len={lengths[0]} and kv_len={lengths[1]}."
        )


def _by_plain_ops(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Mod | None,
    mask: Tensor | None,
    indices: Sequence[Tensor],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    k, v = expand_heads(k, q.shape[1]), expand_heads(v, q.shape[1])
    scores = wide(q) @ wide(k).transpose(-1, -2) * scale
    if score_mod is not None:
        scores = _called(score_mod, (scores,), indices)[0].to(scores.dtype)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    lse, most = scores.logsumexp(-1), scores.amax(-1)
    blocked = most.isneginf().unsqueeze(-1)  # a row with nothing to attend to gives 0
    weights = scores.masked_fill(blocked, 0.0).softmax(-1).masked_fill(blocked, 0.0)
    return weights.to(q.dtype) @ v, lse, most


def _indices(shape: Sequence[int], device: torch.device) -> tuple[Tensor, ...]:
    """Of each dim, the index of every element; of one dim each, so that they broadcast."""
    dims = range(len(shape))
    return tuple(
        torch.arange(size, device=device).view([size if d == dim else 1 for d in dims])
        for dim, size in enumerate(shape)
    )


def _called(
    mod: Mod, score: tuple[Tensor, ...], indices: Sequence[Tensor]
) -> tuple[Tensor, frozenset[int]]:
    """What a function says of all scores, in a shape that broadcasts to theirs.

    Returns:
        that, and the dims whose indices the function looks at
    """
    try:
        with Elementwise(indices, score) as called:
            result = mod(*score, *indices)
        return torch.as_tensor(result, device=indices[0].device), frozenset(called.read)
    except MoreThanElementwise:
        flat = [x.reshape(-1) for x in indices]
        whole = mapped_over_scores(mod, score, flat).expand([x.numel() for x in flat])
        return whole, frozenset(range(len(indices)))


def _added(score_mod: Mod, indices: Sequence[Tensor], q: Tensor) -> Added | None:
    """What `score_mod` adds to a score; None where it does more."""
    score = wide(q.new_zeros((1,) * len(indices)))
    followed = Elementwise(indices, (), follow=score)
    try:
        with followed:
            result = score_mod(score, *indices)
    except MoreThanElementwise:
        return None
    return followed.added.get(id(result))


def _whole_mask(added: Added, mask: Tensor | None, q: Tensor) -> Tensor | None:
    """One mask for `scaled_dot_product_attention`: boolean, or added to the scores."""
    masks = [x for x in (mask, added.mask) if x is not None]
    allowed = masks[0] & masks[1] if len(masks) == 2 else masks[0] if masks else None
    if added.bias is None:
        return allowed
    dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    bias = torch.as_tensor(added.bias, device=q.device).to(dtype)
    if allowed is not None:
        bias = torch.where(allowed, bias, -math.inf)
    return bias.reshape((1,) * (4 - bias.dim()) + tuple(bias.shape))
