"""Stops optimizers that would compute wrong numbers, or fail in torch, before their first step.

`torch.optim.LBFGS` takes products over all parameters, of which a rank of a pipeline has only some,
and uses plain zeros for the gradient of a frozen parameter, which do not mix with DTensors. Neither
do the plain states of `transformers.Adafactor`. An optimizer that was made from the plain module's
parameters would train nothing.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import MutableMapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from autopar.errors import AutoparError
from autopar.runtime.stage_gradients import is_of_a_stage

__all__ = ["guard_optimizers"]

_READS_ALL_PARAMETERS = (torch.optim.LBFGS,)
_MAKES_PLAIN_STATES = {"transformers.optimization.Adafactor"}  # by name: it may not be installed
_plain: MutableMapping[Tensor, str] = WeakIdKeyDictionary()
_owners: MutableMapping[Tensor, weakref.ref[nn.Module]] = WeakIdKeyDictionary()
_WORKING = "torch.optim.AdamW, SGD or another one that works element by element, or autopar.AdamW"


def guard_optimizers(model: nn.Module) -> None:
    """Check every optimizer of this process before its steps; warn of parameters of two modules.

    Args:
        model: the plain module, whose parameters get no gradients from the parallel one.
    """
    _register()
    named = dict(model.named_parameters())
    before = [(name, _owners[p]()) for name, p in named.items() if p in _owners]
    shared = [(name, other) for name, other in before if other is not None and other is not model]
    if shared:
        name, other = shared[0]
        more = f" and {len(shared) - 1} more" if len(shared) > 1 else ""
        warnings.warn(
            f"{name}{more} of {type(model).__name__} belong to {type(other).__name__} too, which "
            "was parallelized before. Each parallel module has parameters of its own, so that "
            "these are trained apart: put both into one module, and parallelize that.",
            stacklevel=3,
        )
    for name, parameter in named.items():
        _plain[parameter] = name
        _owners[parameter] = weakref.ref(model)


@cache
def _register() -> None:
    register_optimizer_step_pre_hook(_check)


def _check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    name = type(optimizer).__name__
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    has_closure = len(args) > 1 or kwargs.get("closure") is not None  # which makes gradients
    if not has_closure and all(p.grad is None for p in parameters):
        plain = next((_plain[p] for p in parameters if p in _plain), None)
        if plain is not None:
            raise AutoparError(
                f"torch.optim.{name} has no gradients, and was made from the plain module, of "
                f"whose parameters {plain} is one. The parallel module has parameters of its own: "
                "make the optimizer from those, module.parameters() of what autopar.parallelize "
                "returns."
            )
    if isinstance(optimizer, _READS_ALL_PARAMETERS):
        if any(is_of_a_stage(p) for p in parameters):
            raise AutoparError(
                f"torch.optim.{name} takes products over all parameters, and a rank of a pipeline "
                "has those of its stages only. Plan without one, with "
                f"constraints={{'pipeline': 'none'}}, or use {_WORKING}."
            )
        frozen = sum(not p.requires_grad for p in parameters)
        if frozen and any(isinstance(p, DTensor) for p in parameters):
            raise AutoparError(
                f"torch.optim.{name} has {frozen} frozen parameters among {len(parameters)}, for "
                "whose gradients it puts zeros that are no DTensors: make it from "
                "[p for p in module.parameters() if p.requires_grad]."
            )
    if any(
        f"{k.__module__}.{k.__qualname__}" in _MAKES_PLAIN_STATES for k in type(optimizer).mro()
    ):
        if any(isinstance(p, DTensor) for p in parameters):
            raise AutoparError(
                f"{type(optimizer).__module__}.{name} makes states that are no DTensors, as the "
                f"parameters are. Use torch.optim.Adafactor, {_WORKING}."
            )
