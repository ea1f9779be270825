"""AdamW whose step clips and unscales in the pass that updates, on each rank's shards.

`torch.optim.AdamW` with clipping and loss scaling in front reads and writes gradients twice more.
Here each shard is read and written once, by the kernel `adamw_` (`autopar/kernels/optimizer.py`):

    g = grad · factor        factor = min(1, max_norm / (‖grad‖ / scale + 1e-6)) / scale

where ‖grad‖ is the norm of all gradients of all groups, over all ranks (`gradients.py`). So a step
takes one pass over the gradients for the norm, where they are clipped, and one pass for the update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar import kernels as _kernels  # noqa: F401  (registers the op)
from autopar._dtensors import local_of
from autopar.errors import AutoparError
from autopar.runtime.gradients import total_norm
from autopar.runtime.local_step import elementwise, own_parameters

__all__ = ["AdamW"]

_SETTINGS = ("lr", "betas", "eps", "weight_decay", "maximize")
_OWN = ("max_norm", "norm", "_step_supports_amp_scaling")


@elementwise
class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` with clipping and unscaling folded into one pass over each shard.

        optimizer = autopar.AdamW(model.parameters(), lr=1e-3, max_norm=1.0)
        loss = model.train_step(**batch)
        optimizer.step()        # or scaler.step(optimizer), with an `autopar.LossScaler`

    Gradients themselves are not changed: they are clipped and unscaled as they are read. Groups,
    schedulers and the state dict are those of `torch.optim.AdamW`; either loads what the other
    saved. On a parallel module every rank calls `step`, as the norm is taken over all ranks.

    Args:
        params, lr, betas, eps, weight_decay, maximize: as for `torch.optim.AdamW`.
        max_norm: gradients of all groups together are clipped to this norm; None for no clipping.
        foreach, fused: accepted for compatibility with torch, and ignored.
        amsgrad, capturable, differentiable: must be False.

    Attributes:
        norm: of the unscaled gradients of the last step, before clipping; None without `max_norm`.

    Raises:
        AutoparError: an option that the kernel does not have, or `max_norm` is not positive.
    """

    # torch's protocol: a scaler sets these for one step instead of unscaling gradients
    grad_scale: Tensor | None
    found_inf: Tensor | None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        max_norm: float | None = None,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        if max_norm is not None and not max_norm > 0:
            raise AutoparError(f"max_norm is {max_norm}: give a positive norm, or None")
        _refuse({"amsgrad": amsgrad, "capturable": capturable, "differentiable": differentiable})
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, foreach=foreach,
            capturable=capturable, differentiable=differentiable, fused=fused,
        )  # fmt: skip
        self.max_norm = max_norm
        self.norm: Tensor | None = None
        self._step_supports_amp_scaling = True

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles take over: torch's, and what clips."""
        own = {name: self.__dict__[name] for name in _OWN}
        return {**super().__getstate__(), **own}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have gradients.

        A scaler that sets `grad_scale` has the gradients divided by it; where `found_inf` is not 0,
        nothing is written.

        Args:
            closure: computes the loss and the gradients anew.

        Returns:
            What the closure returns.

        Raises:
            AutoparError: a group or a gradient that the kernel does not take.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        factor, found = self._factor(), getattr(self, "found_inf", None)
        for group in self.param_groups:
            _refuse(group)
            settings = {key: group[key] for key in _SETTINGS}
            numbers = _Numbers(settings, factor, found)
            # the last that is read of a group: it may be given bucket by bucket
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, numbers, settings)
        return loss

    def _factor(self) -> Tensor | None:
        """What gradients are multiplied by, the same on all ranks; None for 1."""
        scale: Tensor | None = getattr(self, "grad_scale", None)
        inverse = None if scale is None else scale.to(torch.float64).reciprocal()
        if self.max_norm is None:
            self.norm = None
            return inverse
        norm = total_norm(own_parameters(self))
        norm = norm if inverse is None else norm * inverse.to(norm.device)
        self.norm = norm
        clipped = torch.clamp(self.max_norm / (norm + 1e-6), max=1.0)
        return clipped if inverse is None else clipped * inverse.to(norm.device)

    def _update(self, parameter: Tensor, numbers: _Numbers, settings: dict[str, Any]) -> None:
        """One pass over this rank's part of a parameter, its gradient and its states."""
        state = self._state_of(parameter)
        shard, gradient, step = local_of(parameter).detach(), _gradient(parameter), state["step"]
        lr, factor, found = numbers.on(shard.device)
        step += (found == 0).to(step.dtype)
        beta1, beta2 = (float(beta) for beta in settings["betas"])
        torch.ops.autopar_kernels.adamw_(
            shard, gradient, local_of(state["exp_avg"]), local_of(state["exp_avg_sq"]), step, lr,
            factor, found, beta1, beta2, settings["eps"], settings["weight_decay"],
        )  # fmt: skip

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        """States of a parameter, made at its first step; the counter is where the shard is."""
        state: dict[str, Any] = self.state[parameter]
        device = local_of(parameter).device
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        if state["step"].device != device:  # torch keeps it on the host
            state["step"] = state["step"].to(device)
        return state


class _Numbers:
    """Learning rate, factor of the gradients and `found_inf` of a group, where shards are."""

    def __init__(
        self, settings: dict[str, Any], factor: Tensor | None, found: Tensor | None
    ) -> None:
        self._given = (
            settings["lr"],
            1.0 if factor is None else factor,
            0.0 if found is None else found,
        )
        self._sign = -1.0 if settings["maximize"] else 1.0
        self._known: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}

    def on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """The three, without a dim, on a device."""
        if device not in self._known:
            lr, factor, found = (_number(x, device) for x in self._given)
            self._known[device] = lr, factor * self._sign, found
        return self._known[device]


def _number(value: Tensor | float, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return local_of(value).to(device).reshape(())
    return torch.full((), value, dtype=torch.float64, device=device)


def _refuse(options: dict[str, Any]) -> None:
    for name in ("amsgrad", "capturable", "differentiable"):
        if options.get(name):
            raise AutoparError(
                f"autopar.AdamW has no {name}: set it to False in every group, or use "
                "torch.optim.AdamW with model.clip_grad_norm_"
            )


def _gradient(parameter: Tensor) -> Tensor:
    """This rank's part of a gradient, as its parameter is placed."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse or parameter.is_complex():
        kind = "sparse gradients" if gradient.is_sparse else "complex parameters"
        raise AutoparError(f"autopar.AdamW takes no {kind}: use an optimizer of torch for these")
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        if gradient.placements != parameter.placements:
            gradient = gradient.redistribute(placements=parameter.placements)
    return local_of(gradient)
