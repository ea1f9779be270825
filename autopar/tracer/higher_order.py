"""Ops that take functions are called as what they stand for.

- ``cond(pred, f, g, x)`` of a tensor computes both sides and takes one of them for each result.
- ``scan`` and ``map`` are loops over slices.
- ``associative_scan`` of elementwise ops is a tree over whole slices, of log T levels, as torch
  computes it; of others it is a loop.
- ``flex_attention`` is plain attention (`flex`).
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopar._tracing import replaced_functions
from autopar.errors import TraceError, UncheckedWarning
from autopar.tracer.diagnose import innermost_line
from autopar.tracer.elementwise import ELEMENTWISE
from autopar.tracer.flex import Flex

__all__ = ["HigherOrder", "warn_of_both"]

_BOTH_SIDES = (
    "computes both sides, and takes the results of one. What a side would do to a batch that is "
    "not its own must be finite, and so must its derivative: 0 times infinity is nan."
)
_warned: set[str] = set()


class HigherOrder:
    """The calls of one export of a model; `both_sides` are the lines of conditions on tensors."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.both_sides: dict[str, None] = {}

    def called(self) -> AbstractContextManager[None]:
        """Inside, torch's functions are those of this module."""
        flex = Flex()
        return replaced_functions(
            {
                "flex_attention": flex.flex_attention,
                "create_mask": flex.create_mask,
                "cond": partial(_cond, self.model, self.both_sides),
                "scan": _scan,
                "associative_scan": _associative_scan,
                "map": _map,
            }
        )


def warn_of_both(lines: Iterable[str]) -> None:
    """One warning for each condition of which both sides are computed."""
    for where in lines:
        if where not in _warned:
            _warned.add(where)
            warnings.warn(f"{where}\n  {_BOTH_SIDES}", UncheckedWarning, stacklevel=2)


def _cond(
    model: nn.Module,
    both_sides: dict[str, None],
    pred: Any,
    true_fn: Callable[..., Any],
    false_fn: Callable[..., Any],
    operands: Any = (),
) -> Any:
    if not isinstance(pred, Tensor):
        return true_fn(*operands) if pred else false_fn(*operands)
    where = innermost_line(traceback.extract_stack())
    both_sides[where] = None
    held = [*model.buffers(), *(x for x in pytree.tree_leaves(operands) if isinstance(x, Tensor))]
    before = [x._version for x in held]
    taken, spec = pytree.tree_flatten(true_fn(*operands))
    other, other_spec = pytree.tree_flatten(false_fn(*operands))
    if [x._version for x in held] != before:
        raise TraceError(
            f"cannot trace {where}\n  A side of torch.cond writes to a buffer or an operand, which "
            "is not undone where the other side is taken. Return the new value instead."
        )
    shapes = [tuple(x.shape) if isinstance(x, Tensor) else x for x in (*taken, *other)]
    if spec != other_spec or shapes[: len(taken)] != shapes[len(taken) :]:
        raise TraceError(
            f"cannot trace {where}\n  The sides of torch.cond return results of unlike shapes: "
            f"{shapes[: len(taken)]} and {shapes[len(taken) :]}."
        )
    condition = pred.reshape(()).to(torch.bool)
    results = [
        torch.where(condition, x, y) if isinstance(x, Tensor) else x
        for x, y in zip(taken, other, strict=True)
    ]
    return pytree.tree_unflatten(results, spec)


def _slices(tree: Any, dim: int) -> list[Any]:
    """A tree of tensors, at each index of a dim."""
    leaves, spec = pytree.tree_flatten(tree)
    parts = zip(*(x.unbind(dim) for x in leaves), strict=True)
    return [pytree.tree_unflatten(list(part), spec) for part in parts]


def _stacked(trees: list[Any], dim: int) -> Any:
    """What `_slices` takes apart; a result of fewer dims is stacked in front."""
    return pytree.tree_map(lambda *xs: torch.stack(xs, dim if dim <= xs[0].dim() else 0), *trees)


def _scan(
    combine_fn: Callable[..., Any], init: Any, xs: Any, *, dim: int = 0, reverse: bool = False
) -> tuple[Any, Any]:
    leaves = pytree.tree_leaves(xs)
    if not leaves:
        return init, []
    dim = dim % leaves[0].dim()
    steps = _slices(xs, dim)
    carry, found = init, []
    for step in reversed(steps) if reverse else steps:
        carry, result = combine_fn(carry, step)
        found.append(result)
    return carry, _stacked(found[::-1] if reverse else found, dim)


def _map(f: Callable[..., Any], xs: Any, *args: Any) -> Any:
    return _stacked([f(x, *args) for x in _slices(xs, 0)], 0)


def _associative_scan(
    combine_fn: Callable[[Any, Any], Any],
    xs: Any,
    dim: int,
    reverse: bool = False,
    combine_mode: str = "pointwise",
) -> Any:
    leaves, spec = pytree.tree_flatten(xs)
    dim = dim % leaves[0].dim()
    flip = partial(pytree.tree_map, lambda x: x.flip(dim)) if reverse else lambda tree: tree
    leaves = pytree.tree_leaves(flip(xs))

    def combined(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
        pair = (pytree.tree_unflatten(part, spec) for part in (left, right))
        return pytree.tree_leaves(combine_fn(*pair))

    def of_whole_slices(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
        with _Elementwise():
            return combined(left, right)

    try:
        scanned = _tree(of_whole_slices, leaves, dim)
    except _NotElementwise:
        running: list[Any] = []
        for step in _slices(leaves, dim):
            running.append(combined(running[-1], step) if running else step)
        scanned = _stacked(running, dim)
    return flip(pytree.tree_unflatten(scanned, spec))


def _tree(
    combined: Callable[[list[Tensor], list[Tensor]], list[Tensor]], xs: list[Tensor], dim: int
) -> list[Tensor]:
    """Of pairs, then of what is between (Blelloch 1990): element i combines xs[0] to xs[i]."""
    count = xs[0].shape[dim]
    if count < 2:
        return xs
    pairs = _paired(xs, dim)
    odd = _tree(combined, combined(*pairs), dim)
    if count == 2:
        return [torch.cat([x.narrow(dim, 0, 1), y], dim) for x, y in zip(xs, odd, strict=True)]
    rest = (count - 1) // 2
    even = combined([y.narrow(dim, 0, rest) for y in odd], _every_second(xs, dim, 2))
    firsts = [torch.cat([x.narrow(dim, 0, 1), y], dim) for x, y in zip(xs, even, strict=True)]
    return [_interleaved(x, y, dim) for x, y in zip(firsts, odd, strict=True)]


def _paired(xs: list[Tensor], dim: int) -> tuple[list[Tensor], list[Tensor]]:
    even = xs[0].shape[dim] // 2 * 2
    whole = [x.narrow(dim, 0, even) for x in xs]
    return _every_second(whole, dim, 0), _every_second(whole, dim, 1)


def _every_second(xs: list[Tensor], dim: int, start: int) -> list[Tensor]:
    return [x[(*(slice(None),) * dim, slice(start, None, 2))] for x in xs]


def _interleaved(even: Tensor, odd: Tensor, dim: int) -> Tensor:
    """even[0], odd[0], even[1], …; there may be one more of even."""
    both = odd.shape[dim]
    mixed = torch.stack([even.narrow(dim, 0, both), odd], dim + 1).flatten(dim, dim + 1)
    return mixed if even.shape[dim] == both else torch.cat([mixed, even.narrow(dim, both, 1)], dim)


class _NotElementwise(Exception):
    """A function does what would mix the elements of whole slices."""


class _Elementwise(TorchFunctionMode):
    """Raises `_NotElementwise` where a function calls something else, or of unlike shapes."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "").removeprefix("__").removesuffix("__")
        operands = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, Tensor)]
        if name not in ELEMENTWISE or len({x.shape for x in operands if x.dim()}) != 1:
            raise _NotElementwise
        return func(*args, **(kwargs or {}))
