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
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

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

__all__ = ["ELEMENTWISE", "attend", "create_mask", "flex_attention"]

Mod = Callable[..., Any]


def flex_attention(
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
    stats = return_lse or return_aux is not None
    given = (query, key, value, score_mod, block_mask, scale, enable_gqa, stats)
    return flex_outputs(*attend(*given), return_lse, return_aux)


def create_mask(
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
        return _called(mod_fn, (), indices, shape).expand(shape)
    zeros = torch.zeros(shape, device=device)
    return ~torch.isneginf(_called(mod_fn, (zeros,), indices, shape).expand(shape))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Mod | None,
    block_mask: Any,
    scale: float | None,
    enable_gqa: bool,
    stats: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Attention of q (B, H, S, D) to k and v (B or 1, H_kv, T, D).

    Returns:
        The output; if `stats`, the log-sum-exp and the maximum of each row, (B, H, S).
    """
    _check(q, k, block_mask, enable_gqa)
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    if k.shape[0] != q.shape[0]:
        k, v = (x.expand(q.shape[0], *x.shape[1:]) for x in (k, v))
    shape = (*q.shape[:3], k.shape[2])
    indices = _indices(shape, q.device)
    mask = None
    if not says_nothing(block_mask):
        mask = _called(block_mask.mask_mod, (), indices, shape)
    added = _Added() if score_mod is None else _added(score_mod, indices, q)
    if stats or added is None:
        return _by_plain_ops(q, k, v, score_mod, mask, indices, scale)
    whole = _whole_mask(added, mask, q)
    out = scaled_dot_product_attention(q, k, v, whole, scale=scale, enable_gqa=enable_gqa)
    return out, None, None


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
        scores = _called(score_mod, (scores,), indices, scores.shape).to(scores.dtype)
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
    mod: Mod, score: tuple[Tensor, ...], indices: Sequence[Tensor], shape: Sequence[int]
) -> Tensor:
    """What a function says of all scores, in a shape that broadcasts to theirs."""
    try:
        with _Elementwise(indices, score):
            result = mod(*score, *indices)
        return torch.as_tensor(result, device=indices[0].device)
    except _MoreThanElementwise:
        flat = [x.reshape(-1) for x in indices]
        return mapped_over_scores(mod, score, flat).expand(tuple(shape))


@dataclass(frozen=True, slots=True)
class _Added:
    """What becomes of a score: it, plus a bias, where a mask allows it, and -inf elsewhere."""

    bias: Tensor | float | None = None
    mask: Tensor | None = None


def _added(score_mod: Mod, indices: Sequence[Tensor], q: Tensor) -> _Added | None:
    """What `score_mod` adds to a score; None where it does more."""
    score = wide(q.new_zeros((1,) * len(indices)))
    followed = _Elementwise(indices, (), follow=score)
    try:
        with followed:
            result = score_mod(score, *indices)
    except _MoreThanElementwise:
        return None
    return followed.added.get(id(result))


def _whole_mask(added: _Added, mask: Tensor | None, q: Tensor) -> Tensor | None:
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


class _MoreThanElementwise(Exception):
    """A function does what broadcasting cannot say."""


ELEMENTWISE = frozenset(
    "add sub mul div truediv floordiv mod pow radd rsub rmul rdiv rtruediv rfloordiv rmod rpow "
    "eq ne lt le gt ge and or xor rand ror rxor invert neg pos abs exp exp2 expm1 log log2 log1p "
    "tanh sigmoid sqrt rsqrt square reciprocal sin cos tan sign relu gelu silu softplus where "
    "clamp clamp_min clamp_max minimum maximum remainder fmod floor_divide true_divide divide "
    "multiply subtract negative floor ceil round trunc logical_and logical_or logical_not "
    "logical_xor bitwise_and bitwise_or bitwise_xor bitwise_not greater greater_equal less "
    "less_equal not_equal masked_fill isinf isneginf isnan to type type_as float double half "
    "bfloat16 int long bool clone detach zeros_like ones_like full_like".split()
)
_ATTRIBUTES = frozenset({"dtype", "device", "requires_grad", "is_cuda"})
_IN_PLACE = {"iadd": torch.add, "isub": torch.sub, "imul": torch.mul, "itruediv": torch.div}
_NEW = {"add_": torch.add, "sub_": torch.sub, "mul_": torch.mul, "div_": torch.div}
_SUMS = {"add": 1, "radd": 1, "sub": -1}


class _Elementwise(TorchFunctionMode):
    """Lets a function of one score run on all of them.

    Args:
        indices: of batch, head, query and key, each over its own dim of four.
        score: what else holds a number per score.
        follow: a score of which `added` says what becomes of it, by the id of the result.

    Raises:
        _MoreThanElementwise: from what runs inside, at the first op that is something else.
    """

    def __init__(
        self, indices: Sequence[Tensor], score: Sequence[Tensor], follow: Tensor | None = None
    ) -> None:
        super().__init__()
        self.dims = {id(x): dim for dim, x in enumerate(indices)}
        self.numbers = {id(x): x for x in (*indices, *score)}
        self.picked: dict[int, tuple[Tensor, Tensor, tuple[Any, ...]]] = {}
        self.added: dict[int, _Added] = {}
        if follow is not None:
            self.numbers[id(follow)] = follow
            self.added[id(follow)] = _Added()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.__getitem__:
            return self._pick(args[0], args[1] if isinstance(args[1], tuple) else (args[1],))
        name = getattr(func, "__name__", "")
        if name == "__get__" and getattr(func.__self__, "__name__", "") in _ATTRIBUTES:
            return func(*args, **kwargs)
        plain = name.removeprefix("__").removesuffix("__")
        operands = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if operands and (plain in _IN_PLACE or name in _NEW):
            func = _IN_PLACE.get(plain) or _NEW[name]
            plain = func.__name__
        elif operands and plain not in ELEMENTWISE:
            raise _MoreThanElementwise
        if not all(self._is_number(x) for x in operands):
            raise _MoreThanElementwise
        return self._noted(func(*args, **kwargs), plain, args, kwargs)

    def _is_number(self, x: Tensor) -> bool:
        return x.dim() == 0 or id(x) in self.numbers

    def _noted(self, result: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        if not isinstance(result, Tensor):
            raise _MoreThanElementwise
        followed = [x for x in (*args, *kwargs.values()) if id(x) in self.added]
        if followed:
            self._follow(result, name, args, kwargs)
        elif result.dim() and not any(isinstance(x, Tensor) for x in (*args, *kwargs.values())):
            raise _MoreThanElementwise  # a table that the function makes
        self.numbers[id(result)] = result
        return result

    def _follow(self, result: Tensor, name: str, args: Any, kwargs: dict[str, Any]) -> None:
        """What a result of the followed score is; nothing is noted of more than a sum."""
        if name in ("zeros_like", "ones_like", "full_like"):
            return
        if name in ("to", "float", "double", "clone") and result.dtype == args[0].dtype:
            self.added[id(result)] = self.added[id(args[0])]
        elif name in _SUMS and len(args) == 2 and not kwargs and id(args[1]) not in self.added:
            before = self.added[id(args[0])]
            self.added[id(result)] = _plus(before, args[1], _SUMS[name])
        elif name in ("add", "radd") and len(args) == 2 and not kwargs:
            if id(args[0]) not in self.added:
                self.added[id(result)] = _plus(self.added[id(args[1])], args[0], 1)
                return
            raise _MoreThanElementwise
        elif name == "where" and len(args) == 3 and _is_minus_infinity(args[2]):
            self.added[id(result)] = _and(self.added.get(id(args[1])), args[0])
        elif name == "where" and len(args) == 3 and _is_minus_infinity(args[1]):
            self.added[id(result)] = _and(self.added.get(id(args[2])), ~args[0])
        elif name == "masked_fill" and len(args) == 3 and _is_minus_infinity(args[2]):
            self.added[id(result)] = _and(self.added.get(id(args[0])), ~args[1])
        else:
            raise _MoreThanElementwise

    def _pick(self, source: Tensor, places: tuple[Any, ...]) -> Tensor:
        """What a tensor holds at places, of which there is a number per score."""
        if id(source) in self.picked:  # x[b][q] is x[b, q]
            _, source, before = self.picked[id(source)]
            places = (*before, *places)
        elif id(source) in self.numbers:
            raise _MoreThanElementwise
        if len(places) > source.dim() or not all(
            isinstance(x, int) or (isinstance(x, Tensor) and self._is_index(x)) for x in places
        ):
            raise _MoreThanElementwise
        if len(places) < source.dim():
            part = source[(0,) * len(places)]  # stands for what is picked further, and is not read
            self.picked[id(part)] = part, source, places
            return part
        result = _at(source, places, self.dims)
        self.numbers[id(result)] = result
        return result

    def _is_index(self, x: Tensor) -> bool:
        return self._is_number(x) and x.dtype in (torch.int64, torch.int32)


def _is_minus_infinity(x: Any) -> bool:
    return isinstance(x, (int, float)) and x == -math.inf


def _plus(before: _Added, more: Any, sign: int) -> _Added:
    bias = before.bias
    if bias is None:
        return replace(before, bias=more if sign > 0 else -more)
    return replace(before, bias=bias + more if sign > 0 else bias - more)


def _and(before: _Added | None, mask: Any) -> _Added:
    if before is None:  # the condition depends on the score
        raise _MoreThanElementwise
    return replace(before, mask=mask if before.mask is None else before.mask & mask)


def _at(source: Tensor, places: Sequence[Any], dims: dict[int, int]) -> Tensor:
    """`source[places]` with four dims, where places broadcast to four.

    A dim that is read at all of its own indices in turn is kept, and the others are picked from.
    """
    fixed = tuple(x if isinstance(x, int) else slice(None) for x in places)
    source, places = source[fixed], [x for x in places if not isinstance(x, int)]
    kept: dict[int, int] = {}  # dim of the source -> dim of the scores
    for own, place in enumerate(places):
        dim = dims.get(id(place))
        if dim is not None and dim not in kept.values() and source.shape[own] >= place.numel():
            kept[own] = dim
    others = [x for own, x in enumerate(places) if own not in kept]
    varies = {d for x in others if x.dim() for d in range(4) if x.shape[d] > 1}
    kept = {own: dim for own, dim in kept.items() if dim not in varies}
    for own in kept:
        source = source.narrow(own, 0, places[own].numel())
    picked = [own for own in range(len(places)) if own not in kept]
    source = source.permute([*kept, *picked])
    if picked:
        spread = torch.broadcast_tensors(*(places[own] for own in picked))
        four = [x if x.dim() else x.view(1, 1, 1, 1) for x in spread]
        source = source[(*(slice(None),) * len(kept), *four)]
    else:
        source = source.reshape(*source.shape, 1, 1, 1, 1)
    # (kept dims, four dims), each kept dim in place of its dim of one
    count = len(kept)
    for position, dim in enumerate(kept.values()):
        source = source.transpose(position, count + dim)
    return source.reshape(source.shape[count:])
