"""Ranks of a pipeline that have no gradients at the moment take part in torch's norm of all.

A script may freeze all parameters of a stage after `parallelize`. `torch.nn.utils.clip_grad_norm_`
then finds nothing there to take a norm of, while the other ranks wait for this one
(`stage_gradients`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from autopar.runtime.stage_gradients import Line, line_of, lines_without_gradients, of_all_stages

__all__ = ["join_norms"]


@cache
def join_norms() -> None:
    """Let them do so from now on."""
    own_norm, own_clip = clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_
    asked: list[tuple[Tensor, float, bool]] = []  # norms of nothing, until it is known of what

    @wraps(own_norm)
    def noted(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, *args: Any
    ) -> Tensor:
        found = own_norm(tensors, norm_type, error_if_nonfinite, *args)
        asked[:] = [] if len(tensors) else [(found, float(norm_type), error_if_nonfinite)]
        return found

    @wraps(own_clip)
    def joined(parameters: Any, max_norm: float, total_norm: Tensor, *args: Any) -> None:
        if asked and asked[0][0] is total_norm:
            _join(_line_of(parameters), *asked.pop())
        own_clip(parameters, max_norm, total_norm, *args)

    clip_grad._get_total_norm = noted  # type: ignore[assignment]
    clip_grad._clip_grads_with_norm_ = joined  # type: ignore[assignment]


def _line_of(parameters: Sequence[Tensor]) -> Line | None:
    """The ranks that hold the other stages; None where no parameter is of a pipeline."""
    if parameters:
        return next((line for p in parameters if (line := line_of(p)) is not None), None)
    lines = lines_without_gradients()  # of the trainable ones, of which there are none here
    return lines[0] if len(lines) == 1 else None


def _join(line: Line | None, norm: Tensor, order: float, error_if_nonfinite: bool) -> None:
    """Put the norm of all stages in place of that of this rank's, which is 0."""
    if line is None or line.without:
        return
    norm.copy_(of_all_stages(norm, order, line))
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"The total norm of order {order} for gradients of other pipeline stages is "
            "non-finite, so it cannot be clipped"
        )
