"""Functions of a model that programs call as they are: of integers, where no gradient passes.

    position_ids = self.positions(input_ids, attention_mask)  # loops, lists, branches on values

Such a function has no graph, and needs none: no parameter is in it, so nothing of it is trained or
worth splitting. `autopar::eager_call` runs it on whole tensors, in every step and on every rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.core.library import KERNEL, LIBRARY, fake_of
from autopar.errors import AutoparError

__all__ = ["EAGER_CALL", "EagerCall"]

LIBRARY.define("eager_call(Tensor[] tensors, str name) -> Tensor[]")
EAGER_CALL = torch.ops.autopar.eager_call.default
_HOLE = object()
_CALLS: MutableMapping[str, EagerCall] = WeakValueDictionary()


@dataclass(eq=False)
class EagerCall:
    """A call without its tensors. A graph names it, and a traced model keeps it.

    Args:
        function: that is called.
        leaves: of its arguments `(args, kwargs)`; those that are tensors are given in each call.
        spec: their structure.
        remedy: what to do where the results have other shapes.
    """

    function: Callable[..., Any]
    leaves: tuple[Any, ...]
    spec: Any
    remedy: str = "Call it outside the model, and pass the result in as an input."
    name: str = ""
    out_spec: Any = None
    likes: tuple[tuple[tuple[int, ...], torch.dtype], ...] = ()

    def __post_init__(self) -> None:
        self.leaves = tuple(_HOLE if isinstance(x, Tensor) else x for x in self.leaves)

    def named(self, results: Any) -> EagerCall:
        """Take a name that graphs know it by, and shapes and dtypes from its results."""
        leaves, self.out_spec = pytree.tree_flatten(results)
        self.likes = tuple((tuple(x.shape), x.dtype) for x in leaves)
        own = getattr(self.function, "__qualname__", "function")
        names = itertools.chain((own,), (f"{own}~{n}" for n in itertools.count(2)))
        self.name = next(name for name in names if name not in _CALLS)
        _CALLS[self.name] = self
        return self

    def run(self, tensors: Sequence[Tensor]) -> Any:
        """What the function returns."""
        given = iter(tensors)
        leaves = [next(given) if leaf is _HOLE else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self.function(*args, **kwargs)

    def results(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors among that.

        Raises:
            AutoparError: they are not shaped as they were when the step was traced.
        """
        found: list[Tensor] = pytree.tree_leaves(self.run(tensors))
        likes = tuple((tuple(x.shape), x.dtype) for x in found)
        if likes != self.likes:
            raise AutoparError(
                f"{self.name} returned {_said(likes)}, and the step was planned for what it "
                f"returned when it was traced, {_said(self.likes)}: its shapes have to be the same "
                f"for all values of inputs of one shape. {self.remedy}"
            )
        return found


def _said(likes: tuple[tuple[tuple[int, ...], torch.dtype], ...]) -> str:
    return ", ".join(f"{list(shape)} of {str(dtype)[6:]}" for shape, dtype in likes)


def _eager_call(tensors: list[Tensor], name: str) -> list[Tensor]:
    with torch.no_grad():
        return _CALLS[name].results(tensors)


LIBRARY.impl("eager_call", _eager_call, KERNEL)


@fake_of("eager_call")
def _eager_call_fake(tensors: list[Tensor], name: str) -> list[Tensor]:
    return [tensors[0].new_empty(shape, dtype=dtype) for shape, dtype in _CALLS[name].likes]
