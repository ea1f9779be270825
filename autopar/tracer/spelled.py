"""Calls that `torch.export` cannot capture, said with ones that it can, while a forward runs.

- ``x.data`` is ``x.detach()``: the same memory without a gradient.
- ``bincount(x, minlength=n)`` has as many bins as the largest value asks for; here it has n, and a
  value beyond them is an error when it runs.
- ``cov`` compares weights that it was not given.
- A check of values, ``torch._check_tensor_all`` or of the arguments of a distribution, passes: no
  graph can depend on it.

A derivative that the forward itself takes is refused: there would be a second one behind it.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.overrides import TorchFunctionMode

from autopar._compat import CHECKED
from autopar.errors import TraceError
from autopar.tracer.diagnose import innermost_line

__all__ = ["Spelled", "unchecked_distributions"]

_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]


class Spelled(TorchFunctionMode):
    """Says what runs inside in a way that can be captured."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == _DATA:
            return args[0].detach()
        if func in (torch.bincount, torch.Tensor.bincount):
            return _bincount(func, *args, **kwargs)
        if func is torch.cov:
            return _cov(*args, **kwargs)
        if func is CHECKED:
            return _Passed()
        if func in (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward):
            raise TraceError(
                f"cannot trace {innermost_line(traceback.extract_stack())}\n  The forward takes a "
                "derivative, and training would take one of that: autopar traces one backward. "
                "Compute a gradient penalty outside the model, or write the derivative out."
            )
        return func(*args, **kwargs)


class _Passed:
    """The result of a check, of which one asks the item."""

    def item(self) -> bool:
        return True


@contextmanager
def unchecked_distributions() -> Iterator[None]:
    """Inside, `torch.distributions` compares no arguments with what they may be, unless asked."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


def _bincount(func: Any, x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    if not minlength:
        found: Tensor = func(x, weights)
        return found
    if weights is None:
        weights = torch.ones_like(x, dtype=torch.int64)
    elif weights.dtype is not torch.float32:
        weights = weights.to(torch.float64)
    return weights.new_zeros(minlength).index_add(0, x.to(torch.int64), weights)


def _cov(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Covariances of the rows of x (variables, observations)."""
    if x.dim() != 2 or args or kwargs.keys() - {"correction"}:
        return torch.cov(x, *args, **kwargs)
    centred = x - x.mean(1, keepdim=True)
    divisor = max(0, x.shape[1] - kwargs.get("correction", 1))
    return centred @ centred.mH / divisor if divisor else torch.cov(x, **kwargs)
