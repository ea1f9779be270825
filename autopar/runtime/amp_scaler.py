"""What `torch.amp.GradScaler` does not know of the steps of a plan.

It looks through the gradients that this rank holds, and asks only the ranks over which the first of
them is sharded (torch 2.13). So where another gradient is sharded, or held by one stage of a
pipeline alone, some ranks would skip a step that others make: the parts of the model would be of
different steps from then on, and the scales of different sizes. All ranks are asked here.

It scales a loss that is there. A step in microbatches computes its gradients with its loss, so it
must know the scale before: that of the scaler which scaled the loss of the step before.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from autopar.runtime.local_step import is_share
from autopar.runtime.lost import naming_lost_ranks

__all__ = ["go_with_amp"]

_NEAR = 100  # functions behind a loss that is scaled


@cache
def go_with_amp() -> None:
    """Let modules know their scaler, and all ranks what it found, from now on."""
    _agree_on_overflows()
    own = GradScaler.scale

    @wraps(own)
    def scaled(self: GradScaler, outputs: Any) -> Any:
        if self.is_enabled():
            for leaf in pytree.tree_leaves(outputs):
                for module in _modules_behind(leaf):
                    module.torch_scaler = self
        return own(self, outputs)

    GradScaler.scale = scaled  # type: ignore[method-assign]


def _modules_behind(loss: Any) -> Iterator[Any]:
    """Those whose steps in microbatches a loss is made of, without much in between."""
    found = [loss.grad_fn] if isinstance(loss, Tensor) and loss.grad_fn is not None else []
    for function in found:
        module = getattr(function, "scaled_module", None)
        if module is not None:
            yield module
        elif len(found) < _NEAR:
            found += [f for f, _ in function.next_functions if f is not None and f not in found]


def _agree_on_overflows() -> None:
    own = GradScaler._unscale_grads_

    # what unscale_ and step both come through, with optimizers that unscale by themselves too
    @wraps(own)
    def unscaled(
        self: GradScaler, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, fp16: bool
    ) -> Any:
        found = own(self, optimizer, inv_scale, found_inf, fp16)
        _of_all_ranks(optimizer, found, found_inf)
        return found

    GradScaler._unscale_grads_ = unscaled  # type: ignore[assignment,method-assign]


@torch.no_grad()
def _of_all_ranks(optimizer: Optimizer, found: dict[torch.device, Tensor], zero: Tensor) -> None:
    """Put what any rank found in place of what this one did: an all-reduce of two numbers.

    A rank of a pipeline that has no gradients takes part, and skips the step with the others.

    Args:
        optimizer: whose gradients were unscaled.
        found: 1 where there is an overflow, by the device of the gradients.
        zero: what the scaler started from.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    if not any(is_share(p) for group in optimizer.param_groups for p in group["params"]):
        return
    mine = torch.stack([x.to(zero.device) for x in found.values()]).amax() if found else zero
    told = torch.stack([mine, torch.full_like(zero, float(bool(found)))])
    with naming_lost_ranks("where all ranks look for an overflow"):
        dist.all_reduce(told, dist.ReduceOp.MAX)
    if not found and bool(told[1]):
        found[zero.device] = zero.clone()
    for value in found.values():
        value.copy_(told[0])
