"""A derivative that the forward takes, as in a gradient penalty or a physics-informed loss.

    x.requires_grad_(True)
    (slope,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)

`torch.export` records ops before autograd, so it does not see where the derivative's ops get what
earlier ones have saved. While a model is exported, such a call becomes one op,
`autopar::derivative`; the replay, which runs under autograd, makes the call itself. There an input
that needs a gradient for this alone becomes a leaf where it is made, before anything reads it.
"""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils import _pytree as pytree

from autopar.errors import TraceError
from autopar.tracer.diagnose import innermost_line

__all__ = [
    "DERIVING",
    "Derivatives",
    "as_leaf",
    "derivative",
    "derived",
    "no_silent_ends",
    "take_derivative",
]

_library = torch.library.Library("autopar", "FRAGMENT")
_library.define(
    "derivative(Tensor[] outputs, Tensor[] inputs, Tensor[] seeds, bool create_graph) -> Tensor[]"
)
derivative = torch.ops.autopar.derivative.default
DERIVING = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)
_REQUIRING = (
    torch.Tensor.requires_grad_,
    torch.Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
)
_WITH_PARTS = {
    torch.ops.higher_order.wrap_with_set_grad_enabled: 1,
    torch.ops.higher_order.wrap_with_autocast: 4,
}
"""Ops that run a part of the graph, and where among their arguments it stands."""

_ENDS = r".*an autograd kernel was not registered"


class Derivatives:
    """The derivatives of one export."""

    def __init__(self) -> None:
        # tensors that were read before they were told to need a gradient, by id
        self.late: dict[int, Tensor] = {}

    def note(self, func: Any, args: tuple[Any, ...]) -> None:
        """Keep which tensors get a gradient after an op has read them."""
        if func in _REQUIRING and not args[0].requires_grad and _is_read(args[0]):
            self.late[id(args[0])] = args[0]

    def take(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What stands in the graph for a call of one of `DERIVING`.

        Raises:
            TraceError: the call is none that a replay can make.
        """
        if func is not torch.autograd.grad:
            _refuse(
                "The forward calls backward, which writes .grad, and a step writes that itself. "
                "Take torch.autograd.grad(outputs, inputs, create_graph=True) there."
            )
        return self._grad(*args, **kwargs)

    def _grad(
        self,
        outputs: Any,
        inputs: Any,
        grad_outputs: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        only_inputs: bool = True,
        allow_unused: bool | None = None,
        is_grads_batched: bool = False,
        materialize_grads: bool = False,
    ) -> tuple[Tensor, ...]:
        if is_grads_batched or materialize_grads:
            _refuse(
                "torch.autograd.grad is called with is_grads_batched or materialize_grads, which "
                "is not traced. Leave it out, and take one derivative for each."
            )
        outputs, inputs = _listed(outputs), _listed(inputs)
        if any(id(x) in self.late for x in inputs):
            _refuse(
                "The derivative is by a tensor that was read before requires_grad_ was called for "
                "it. Call that first, or take x = x.detach().requires_grad_(True)."
            )
        seeds = [None] * len(outputs) if grad_outputs is None else _listed(grad_outputs)
        pairs = zip(outputs, seeds, strict=True)
        # not `ones_like`, which would read a sum over the batch for nothing
        ones = [
            torch.ones(y.shape, dtype=y.dtype, device=y.device) if seed is None else seed
            for y, seed in pairs
        ]
        return tuple(derivative(outputs, inputs, ones, create_graph))


def derived(gm: fx.GraphModule) -> set[fx.Node]:
    """Nodes by which the graph takes a derivative, in its parts too."""
    found: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if node.target is derivative:
            found.update(node.args[1])
        elif (at := _WITH_PARTS.get(node.target)) is not None:
            part = getattr(gm, node.args[at].target)
            inner = derived(part)
            inside = part.graph.find_nodes(op="placeholder")
            operands = zip(node.args[at + 1 :], inside, strict=True)
            found.update(operand for operand, name in operands if name in inner)
    return found


def as_leaf(value: Any) -> Any:
    """A tensor by which a derivative is taken, with a gradient if it has none yet."""
    if not isinstance(value, Tensor) or value.requires_grad:
        return value
    return value.detach().requires_grad_(True)


def take_derivative(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], seeds: Sequence[Tensor], graph: bool
) -> list[Tensor]:
    """The derivative, under autograd."""
    found = torch.autograd.grad(
        outputs, inputs, seeds, retain_graph=True, create_graph=graph, allow_unused=True
    )
    if None in found:
        shape = tuple(inputs[found.index(None)].shape)
        raise RuntimeError(
            f"The derivative by a tensor of shape {shape} is None, as nothing that is derived "
            "depends on it. Leave it out of the inputs of torch.autograd.grad."
        )
    return list(found)


@contextmanager
def no_silent_ends() -> Iterator[None]:
    """An op that has no second derivative raises, where torch would warn and leave it out."""
    before = torch._C._get_autograd_fallback_mode()
    torch._C._set_autograd_fallback_mode("warn")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=_ENDS)
            yield
    except UserWarning as warning:
        if not re.match(_ENDS, str(warning)):
            raise
        raise TraceError(
            f"cannot trace the backward: the forward takes a derivative through the op behind "
            f"{str(warning).split(': ')[0]}, which has no second derivative. Write that op out, "
            "such as attention with matmul and softmax."
        ) from warning
    finally:
        torch._C._set_autograd_fallback_mode(before)


def _listed(value: Any) -> list[Any]:
    return [value] if isinstance(value, Tensor) else list(value)


def _is_read(x: Tensor) -> bool:
    mode = get_proxy_mode()
    slot = None if mode is None else get_proxy_slot(x, mode.tracer, None)
    return slot is not None and bool(pytree.tree_leaves(slot)[0].proxy.node.users)


def _refuse(reason: str) -> NoReturn:
    where = innermost_line(traceback.extract_stack())
    raise TraceError(f"cannot trace {where}\n  {reason}")


@torch.library.register_fake("autopar::derivative", lib=_library)
def _fake(
    outputs: list[Tensor], inputs: list[Tensor], seeds: list[Tensor], create_graph: bool
) -> list[Tensor]:
    return [torch.empty_like(x) for x in inputs]
