"""`in_step`: a context to run a step in, whose errors say what is wrong, to other ranks too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from autopar.errors import AutoparError
from autopar.runtime.compiled_step import CompiledStep, tensors_in_order
from autopar.runtime.index_ranges import check_indices, naming_indices, watch_indices
from autopar.runtime.lost import tell_failure, tell_reason
from autopar.runtime.pipeline import PipelinedStep

if TYPE_CHECKING:
    from autopar.runtime.module import ParallelModule

__all__ = ["check_first_batch", "in_step"]


@contextmanager
def in_step(
    module: ParallelModule, step: CompiledStep | PipelinedStep, args: Any, kwargs: Any
) -> Iterator[None]:
    """Run a step inside: counts it, and explains errors by the batch where that is their cause.

    Raises:
        AutoparError: other ranks run other steps, or an input holds an index out of range; any
            other error is raised as it is.
    """
    try:
        if step.communicates:
            module._turns.begin(step.plan.fingerprint, step.plan.num_devices)
    except AutoparError as error:
        tell_reason(error)
        raise
    try:
        if step.shared:
            watch_indices(step.traced, step.shared, _tensors(step, args, kwargs))
        with naming_indices(step.traced, lambda: _tensors(step, args, kwargs), module.device):
            yield
    except Exception as error:
        if step.communicates:
            tell_failure(error, step.plan.num_devices)
        else:
            tell_reason(error)
        raise


def check_first_batch(step: CompiledStep | PipelinedStep, args: Any, kwargs: Any) -> None:
    """Look for indices out of range before the first step of a kind runs.

    Raises:
        AutoparError: an input holds one.
    """
    try:
        check_indices(step.traced, _tensors(step, args, kwargs))
    except Exception as error:
        tell_reason(error)
        raise


def _tensors(step: CompiledStep | PipelinedStep, args: Any, kwargs: Any) -> list[torch.Tensor]:
    return tensors_in_order(step.keywords, step.traced.training, args, kwargs)
