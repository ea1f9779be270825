"""Custom autograd functions keep their backward.

`torch.export` records the ops of a `torch.autograd.Function`'s forward and forgets its backward:
gradients would be those of the forward's ops. So while a model is exported, a call of a user's
function becomes one op, `autopar::custom_function`, and the replay makes the call itself.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import has_side_effect
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from autopar.errors import TraceError
from autopar.tracer.diagnose import innermost_line

__all__ = ["FunctionCalls", "custom_function"]

_library = torch.library.Library("autopar", "FRAGMENT")
_library.define("custom_function(Tensor[] tensors, int call) -> Tensor[]")
custom_function = torch.ops.autopar.custom_function.default
has_side_effect(custom_function)  # it may write to what it was given, and nothing read its result


@dataclass(slots=True)
class _Call:
    """One call: the function, its arguments with holes for tensors, and what it returned."""

    function: Any
    leaves: list[Any]
    spec: Any
    results: list[Any] = field(default_factory=list)
    out_spec: Any = None

    def run(self, tensors: list[Tensor]) -> list[Tensor]:
        """Call the function on `tensors`; its tensor results."""
        feed = iter(tensors)
        leaves = [next(feed) if leaf is _HOLE else leaf for leaf in self.leaves]
        args = pytree.tree_unflatten(leaves, self.spec)
        results, self.out_spec = pytree.tree_flatten(self.function(*args))
        self.results = [_HOLE if isinstance(x, Tensor) else x for x in results]
        return [x for x in results if isinstance(x, Tensor)]

    def restore(self, tensors: list[Tensor]) -> Any:
        """The function's own return value from its tensor results."""
        feed = iter(tensors)
        leaves = [next(feed) if x is _HOLE else x for x in self.results]
        return pytree.tree_unflatten(leaves, self.out_spec)


_HOLE = object()
_calls: ContextVar[FunctionCalls] = ContextVar("autopar_function_calls")


class FunctionCalls:
    """The custom calls of one export."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        # what each replayed call was given from outside of the graph, with its version
        self.given: list[tuple[_Call, Tensor, int]] = []
        self.cut: list[str] = []  # lines of checkpoints that pass no gradient on

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record calls of user functions instead of making them."""
        base: Any = torch.autograd.Function
        original = base.__dict__["apply"]

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            real = original.__get__(None, cls)
            if cls is CheckpointFunction:
                run, _, *operands = args  # what is computed again is the plan's choice
                return self._checkpointed(run, operands)
            leaves, spec = pytree.tree_flatten(args)
            if cls.__module__.startswith("torch.") or kwargs:
                return real(*args, **kwargs)
            if any(map(callable, leaves)):
                raise TraceError(
                    f"cannot trace {innermost_line(traceback.extract_stack())}\n  The autograd "
                    f"function {cls.__qualname__} takes code as an argument, whose parameters its "
                    "backward may use unseen. Call the code in the forward, and give the function "
                    "tensors only."
                )
            tensors = [x for x in leaves if isinstance(x, Tensor)]
            holes = [_HOLE if isinstance(x, Tensor) else x for x in leaves]
            call = _Call(real, holes, spec)
            self.calls.append(call)
            return call.restore(custom_function(tensors, len(self.calls) - 1))

        token = _calls.set(self)
        base.apply = classmethod(apply)
        try:
            yield
        finally:
            base.apply = original
            _calls.reset(token)

    def _checkpointed(self, run: Any, operands: list[Any]) -> Any:
        """What torch's reentrant checkpoints do: no gradients where no operand has one."""
        tensors = [x for x in operands if isinstance(x, Tensor)]
        if not torch.is_grad_enabled() or any(x.requires_grad for x in tensors):
            return run(*operands)
        self.cut.append(innermost_line(traceback.extract_stack()))
        with torch.no_grad():
            return run(*operands)

    def warn_of_cut(self) -> None:
        """Say which checkpoints cut gradients off, as torch does when it runs one."""
        for line in dict.fromkeys(self.cut):
            warnings.warn(
                f"{line}\n  No input of this checkpoint has a gradient, so with use_reentrant=True "
                "its parameters get none. Pass use_reentrant=False.",
                stacklevel=2,
            )

    def run(self, tensors: list[Tensor], call: int) -> list[Tensor]:
        """Make a recorded call.

        Raises:
            TraceError: it writes to a tensor that is no result of an op.
        """
        made = self.calls[call]
        leaves = [(made, x, x._version) for x in tensors if x.is_leaf]
        results = made.run(tensors)
        _refuse_writes(leaves, "forward")
        self.given += leaves
        return results

    def check_backward(self) -> None:
        """Once the backward has run.

        Raises:
            TraceError: that of a call has written to a tensor that the call was given.
        """
        _refuse_writes(self.given, "backward")


def _refuse_writes(given: list[tuple[_Call, Tensor, int]], phase: str) -> None:
    for call, tensor, version in given:
        if tensor._version != version:
            function = call.function.__self__.__qualname__
            remedy = {
                "forward": "Return the new value, and write it to the buffer where it is called.",
                "backward": "Keep what a backward measures outside the model, or leave it out.",
            }
            raise TraceError(
                f"the {phase} of the autograd function {function} writes to a tensor of shape "
                f"{tuple(tensor.shape)} that it was given, which would be lost. {remedy[phase]}"
            )


@torch.library.register_fake("autopar::custom_function", lib=_library)
def _fake(tensors: list[Tensor], call: int) -> list[Tensor]:
    with torch.no_grad():
        return [x.clone() for x in _calls.get().run(tensors, call)]
