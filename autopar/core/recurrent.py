"""`autopar::recurrent`: one direction of one layer of an LSTM, a GRU or an Elman RNN.

ATen unrolls a recurrent layer into ops of each step, unless it has a kernel for all of them, whose
results differ from device to device. This op is the layer as a whole, calls that kernel, and keeps
nothing but the layer's operands: the backward runs the forward again. (Hochreiter and Schmidhuber
1997; Sak, Senior and Beaufays 2014, arXiv 1402.1128, for projections; Cho et al. 2014, arXiv
1406.1078; Elman 1990.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar._compat import with_autograd
from autopar.core.library import KERNEL, LIBRARY, fake_of
from autopar.errors import AutoparError

__all__ = ["CELLS", "OPERANDS", "RECURRENT", "RECURRENT_BACKWARD"]

CELLS = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
"""Names of ATen's ops, and how many gates, of rows of the weights, each has."""

OPERANDS = ("x", "h", "c", "w_ih", "w_hh", "b_ih", "b_hh", "w_hr", "lengths")
"""Tensors that the op takes behind the cell's name, in order; some are None."""

_SCHEMA = (
    "str cell, Tensor x, Tensor h, Tensor? c, Tensor w_ih, Tensor w_hh, Tensor? b_ih, Tensor? b_hh,"
    " Tensor? w_hr, Tensor? lengths, bool reverse"
)
LIBRARY.define(f"recurrent({_SCHEMA}) -> (Tensor, Tensor, Tensor)")
LIBRARY.define(
    f"recurrent_backward(Tensor grad, Tensor grad_h, Tensor? grad_c, {_SCHEMA}) -> Tensor[]"
)
LIBRARY.define("longest(Tensor lengths, int steps) -> Tensor")
RECURRENT = torch.ops.autopar.recurrent.default
RECURRENT_BACKWARD = torch.ops.autopar.recurrent_backward.default


def _recurrent(cell: str, *operands: Any) -> tuple[Tensor, Tensor, Tensor]:
    """All steps of a layer in one direction.

    Args:
        cell: one of `CELLS`; G gates.
        x: (steps, batch, inputs).
        h: the state before the first step, (batch, P); P is H without a projection.
        c: an LSTM's cell state, (batch, H); else None.
        w_ih, w_hh: (G·H, inputs), (G·H, P).
        b_ih, b_hh: (G·H,), or both None.
        w_hr: the projection of an LSTM's state, (P, H), or None.
        lengths: steps of each sample, (batch,): states and outputs (0) behind do not count.
            None: all have all steps.
        reverse: from each sample's last step to its first.

    Returns:
        Outputs of each step (steps, batch, P), the last state (batch, P), and an LSTM's last cell
        state (batch, H); else an empty tensor.
    """
    with torch.no_grad():
        out, h, *c = _run(cell, *operands, train=False)
    return out, h, c[0] if c else h.new_empty(0)


def _run(cell: str, *operands: Any, train: bool) -> Sequence[Tensor]:
    x, h, c, w_ih, w_hh, b_ih, b_hh, w_hr, lengths, reverse = operands
    weights = [w for w in (w_ih, w_hh, b_ih, b_hh, w_hr) if w is not None]
    state = h.unsqueeze(0) if c is None else (h.unsqueeze(0), c.unsqueeze(0))
    tail = (state, weights, b_ih is not None, 1, 0.0, train, False)
    function = getattr(torch, cell)
    if reverse:
        x = _reversed(x, lengths)
    if lengths is None:
        out, *last = function(x, *tail, False)
    else:
        out, *last = _of_lengths(function, x, tail, lengths)
    return (_reversed(out, lengths) if reverse else out), *(s.squeeze(0) for s in last)


def _of_lengths(
    function: Any, x: Tensor, tail: tuple[Any, ...], lengths: Tensor
) -> tuple[Tensor, ...]:
    """`function` of samples that are as long as they are; ATen takes them by falling length."""
    steps = lengths.to("cpu")
    low, high = int(steps.min()), int(steps.max())
    if low < 1 or high > x.shape[0]:
        raise AutoparError(
            f"a recurrent layer got packed sequences of {low} to {high} steps in a batch of "
            f"{x.shape[0]} steps: each must have at least 1, and no more than the batch."
        )
    order = torch.argsort(steps, descending=True, stable=True)
    back = torch.argsort(order).to(x.device)
    there = order.to(x.device)
    state, *others = tail
    states = state if isinstance(state, tuple) else (state,)
    states = tuple(s.index_select(1, there) for s in states)
    data, sizes = torch._VF._pack_padded_sequence(x.index_select(1, there), steps[order], False)
    given = states if isinstance(state, tuple) else states[0]
    found, *last = function(data, sizes, given, *others)
    out, _ = torch._VF._pad_packed_sequence(found, sizes, False, 0.0, x.shape[0])
    return out.index_select(1, back), *(s.index_select(1, back) for s in last)


def _reversed(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Each sample's steps from its last one; what is behind stays there."""
    if lengths is None:
        return x.flip(0)
    step = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
    long = lengths.to(x.device).unsqueeze(0)
    places = torch.where(step < long, long - 1 - step, step)
    return x.gather(0, places.unsqueeze(-1).expand(x.shape))


def _recurrent_backward(
    grad: Tensor, grad_h: Tensor, grad_c: Tensor | None, cell: str, *operands: Any
) -> list[Tensor]:
    """Gradients of the operands of `_recurrent` that are given, but for `lengths`."""
    *tensors, lengths, reverse = operands
    with with_autograd():
        own = [None if x is None else x.detach().requires_grad_() for x in tensors]
        results = _run(cell, *own, lengths, reverse, train=True)
        grads = [grad, grad_h] if grad_c is None else [grad, grad_h, grad_c]
        wanted = [x for x in own if x is not None]
        found = torch.autograd.grad(results, wanted, grads)
    return list(found)


def _longest(lengths: Tensor, steps: int) -> Tensor:
    """`lengths`, of which the longest must have all steps, as the result has in the program."""
    longest = int(lengths.max())
    if longest != steps:
        raise AutoparError(
            f"pad_packed_sequence got sequences of at most {longest} steps, and the parallel "
            f"program was traced with a batch of {steps}: its result would have {longest} steps, "
            "and shapes of a program do not change. Give it the length of the batch, "
            f"total_length={steps}."
        )
    return lengths.clone()


LIBRARY.impl("longest", _longest, KERNEL)
LIBRARY.impl("recurrent", _recurrent, KERNEL)
LIBRARY.impl("recurrent_backward", _recurrent_backward, KERNEL)


@fake_of("longest")
def _longest_fake(lengths: Tensor, steps: int) -> Tensor:
    return lengths.new_empty(lengths.shape)


@fake_of("recurrent")
def _recurrent_fake(cell, x, h, c, w_ih, *others):  # type: ignore[no-untyped-def]
    if w_ih.dtype != x.dtype:
        raise RuntimeError(
            f"a recurrent layer has inputs of {x.dtype} and weights of {w_ih.dtype}: cast them"
        )
    if h.dtype != x.dtype:
        raise RuntimeError(
            f"a recurrent layer has inputs of {x.dtype} and a first state of {h.dtype}: cast it, "
            "as in `state.to(x.dtype)`"
        )
    state = h.new_empty(0) if c is None else c.new_empty(c.shape)
    return x.new_empty(*x.shape[:2], h.shape[1]), h.new_empty(h.shape), state


@fake_of("recurrent_backward")
def _recurrent_backward_fake(grad, grad_h, grad_c, cell, *operands):  # type: ignore[no-untyped-def]
    return [x.new_empty(x.shape) for x in operands[:-2] if x is not None]


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.cell, *tensors, ctx.reverse = inputs
    ctx.save_for_backward(*tensors)


def _autograd(ctx, grad, grad_h, grad_c):  # type: ignore[no-untyped-def]
    tensors = ctx.saved_tensors
    cell_state = grad_c if tensors[2] is not None else None
    found = iter(
        torch.ops.autopar.recurrent_backward(
            grad, grad_h, cell_state, ctx.cell, *tensors, ctx.reverse
        )
    )
    grads = [None if x is None else next(found) for x in tensors[:-1]]
    return None, *grads, None, None


torch.library.register_autograd("autopar::recurrent", _autograd, setup_context=_setup, lib=LIBRARY)
