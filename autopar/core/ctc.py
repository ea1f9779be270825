"""`autopar::ctc`: connectionist temporal classification (Graves et al. 2006), a loss per sample.

ATen's op also returns its forward variables, whose shape depends on the longest target. This one
keeps nothing but the losses: the backward computes those variables again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.core.library import KERNEL, LIBRARY, fake_of, wide

aten = torch.ops.aten

_OPERANDS = "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths"
LIBRARY.define(f"ctc({_OPERANDS}, int blank, bool zero_infinity) -> Tensor")
LIBRARY.define(f"ctc_backward(Tensor grad, {_OPERANDS}, int blank, bool zero_infinity) -> Tensor")


def _ctc(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    """-log p(target) of each sample.

    Args:
        log_probs: (steps, batch, classes).
        targets: (batch, longest), or all of them one behind the other.
        input_lengths, target_lengths: (batch,).
        blank: the class that stands for none.
        zero_infinity: 0 for a target that does not fit into the steps, instead of infinity.
    """
    given = _given(log_probs, targets, input_lengths, target_lengths)
    losses = aten._ctc_loss.Tensor(*given, blank, zero_infinity)[0]
    if zero_infinity:
        losses = losses.masked_fill(losses.isinf(), 0.0)
    return losses.to(log_probs.dtype)


def _given(log_probs: Tensor, targets: Tensor, *lengths: Tensor) -> tuple[Tensor, ...]:
    """What ATen's kernels take: they read targets as if they were dense, and no half precision."""
    return wide(log_probs), targets.contiguous(), *lengths


def _ctc_backward(grad: Tensor, log_probs: Tensor, *others: Any) -> Tensor:
    """Of `_ctc` with the same operands behind `grad`, (batch,): as `log_probs`."""
    *tensors, blank, zero_infinity = others
    given = _given(log_probs, *tensors)
    losses, forward = aten._ctc_loss.Tensor(*given, blank, zero_infinity)
    grad = grad.to(losses.dtype)
    found = aten._ctc_loss_backward.Tensor(grad, *given, losses, forward, blank, zero_infinity)
    return found.to(log_probs.dtype)


LIBRARY.impl("ctc", _ctc, KERNEL)
LIBRARY.impl("ctc_backward", _ctc_backward, KERNEL)


@fake_of("ctc")
def _ctc_fake(log_probs: Tensor, *rest: object) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1])


@fake_of("ctc_backward")
def _ctc_backward_fake(grad: Tensor, log_probs: Tensor, *rest: object) -> Tensor:
    return log_probs.new_empty(log_probs.shape)


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, ctx.blank, ctx.zero_infinity = inputs
    ctx.save_for_backward(*tensors)


def _autograd(ctx, grad):  # type: ignore[no-untyped-def]
    found = torch.ops.autopar.ctc_backward(grad, *ctx.saved_tensors, ctx.blank, ctx.zero_infinity)
    return found, None, None, None, None, None


torch.library.register_autograd("autopar::ctc", _autograd, setup_context=_setup, lib=LIBRARY)
