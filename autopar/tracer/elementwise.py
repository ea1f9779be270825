"""Functions of one number for each of many, called once on all of them, whose shapes broadcast.

    def score_mod(score, batch, head, query, key):
        return score + table[head, query - key]

Elementwise ops do as they are, and a tensor that is read at an index that runs over a whole dim is
a view of it. What else a function may do, only `vmap` can say.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["ELEMENTWISE", "Added", "Elementwise", "MoreThanElementwise"]


@dataclass(frozen=True, slots=True)
class Added:
    """What becomes of a score: it, plus a bias, where a mask allows it, and -inf elsewhere."""

    bias: Tensor | float | None = None
    mask: Tensor | None = None


class MoreThanElementwise(Exception):
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
_IN_PLACE = {
    f"{mark}{name}{end}": getattr(torch, full)
    for name, full in (("add", "add"), ("sub", "sub"), ("mul", "mul"))
    for mark, end in (("i", ""), ("", "_"))
}
# may return their operand, or a view of it
_KEEPING = frozenset("to type type_as float double half bfloat16 int long bool detach pos".split())
_SUMS = {"add": 1, "radd": 1, "sub": -1}


class Elementwise(TorchFunctionMode):
    """Lets a function of one score run on all of them.

    Args:
        indices: of batch, head, query and key, each over its own dim of four.
        score: what else holds a number per score.
        follow: a score of which `added` says what becomes of it, by the id of the result.

    Raises:
        MoreThanElementwise: from what runs inside, at the first op that is something else.
    """

    def __init__(
        self, indices: Sequence[Tensor], score: Sequence[Tensor], follow: Tensor | None = None
    ) -> None:
        super().__init__()
        self.dims = {id(x): dim for dim, x in enumerate(indices)}
        self.read: set[int] = set()
        self.numbers = {id(x): x for x in (*indices, *score)}
        self.picked: dict[int, tuple[Tensor, Tensor, tuple[Any, ...]]] = {}
        self.added: dict[int, Added] = {}
        # what may be written to: views of a user's tensors may not
        self.own = {id(x) for x in score}
        if follow is not None:
            self.numbers[id(follow)] = follow
            self.added[id(follow)] = Added()

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
        if operands and (plain in _IN_PLACE or name in _IN_PLACE):
            return self._in_place(func, _IN_PLACE.get(plain) or _IN_PLACE[name], args, kwargs)
        if operands and plain not in ELEMENTWISE:
            raise MoreThanElementwise
        if not all(self._is_number(x) for x in operands):
            raise MoreThanElementwise
        return self._noted(func(*args, **kwargs), plain, args, kwargs)

    def _in_place(self, func: Any, plain: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The result of an op that writes to its first operand, which other names may have."""
        operands = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if not all(self._is_number(x) for x in operands) or id(args[0]) in self.dims:
            raise MoreThanElementwise
        if id(args[0]) in self.added:
            result = self._noted(plain(*args, **kwargs), plain.__name__, args, kwargs)
            self.added[id(args[0])] = self.added[id(result)]
            return result
        shape = torch.broadcast_shapes(*(x.shape for x in operands))
        if id(args[0]) not in self.own or args[0].shape != shape:
            raise MoreThanElementwise
        return func(*args, **kwargs)

    def _is_number(self, x: Tensor) -> bool:
        if id(x) in self.dims:
            self.read.add(self.dims[id(x)])
        return x.dim() == 0 or id(x) in self.numbers

    def _noted(self, result: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        if not isinstance(result, Tensor):
            raise MoreThanElementwise
        followed = [x for x in (*args, *kwargs.values()) if id(x) in self.added]
        if followed:
            self._follow(result, name, args, kwargs)
        elif result.dim() and not any(isinstance(x, Tensor) for x in (*args, *kwargs.values())):
            raise MoreThanElementwise  # a table that the function makes
        self.numbers[id(result)] = result
        if name not in _KEEPING:
            self.own.add(id(result))
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
            raise MoreThanElementwise
        elif name == "where" and len(args) == 3 and _is_minus_infinity(args[2]):
            self.added[id(result)] = _and(self.added.get(id(args[1])), args[0])
        elif name == "where" and len(args) == 3 and _is_minus_infinity(args[1]):
            self.added[id(result)] = _and(self.added.get(id(args[2])), ~args[0])
        elif name == "masked_fill" and len(args) == 3 and _is_minus_infinity(args[2]):
            self.added[id(result)] = _and(self.added.get(id(args[0])), ~args[1])
        else:
            raise MoreThanElementwise

    def _pick(self, source: Tensor, places: tuple[Any, ...]) -> Tensor:
        """What a tensor holds at places, of which there is a number per score."""
        if id(source) in self.picked:  # x[b][q] is x[b, q]
            _, source, before = self.picked[id(source)]
            places = (*before, *places)
        elif id(source) in self.numbers:
            raise MoreThanElementwise
        if len(places) > source.dim() or not all(
            isinstance(x, int) or (isinstance(x, Tensor) and self._is_index(x)) for x in places
        ):
            raise MoreThanElementwise
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


def _plus(before: Added, more: Any, sign: int) -> Added:
    bias = before.bias
    if bias is None:
        return replace(before, bias=more if sign > 0 else -more)
    return replace(before, bias=bias + more if sign > 0 else bias - more)


def _and(before: Added | None, mask: Any) -> Added:
    if before is None:  # the condition depends on the score
        raise MoreThanElementwise
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
