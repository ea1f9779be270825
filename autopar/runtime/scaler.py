"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018, arXiv 1710.03740).

    scale ← max(scale · backoff_factor, min_scale)   after `hysteresis` overflows
    scale ← min(scale · growth_factor, max_scale)    after `growth_interval` steps without one

Both counters start anew when the scale grows; an overflow starts the growth's anew. The interface
is that of `torch.amp.GradScaler`, which has no bounds and no hysteresis, and does not scale what
`train_step` computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import AutoparError
from autopar.runtime.adamw import AdamW
from autopar.runtime.gradients import collective_device, local_gradients
from autopar.runtime.lost import naming_lost_ranks
from autopar.runtime.state_module import check_parallel

if TYPE_CHECKING:
    from autopar.runtime.module import ParallelModule

__all__ = ["LossScaler"]

_STATE = ("scale", "growth_tracker", "overflows")


class LossScaler:
    """Scales the loss of a parallel module's `train_step`, and unscales its gradients.

        scaler = autopar.LossScaler(model)
        loss = model.train_step(**batch)    # the loss comes back unscaled
        scaler.unscale_(optimizer)          # only where gradients are looked at, as by clipping
        scaler.step(optimizer)              # skipped on all ranks where one rank found an overflow
        scaler.update()

    An `autopar.AdamW` unscales and clips in its own pass: leave `unscale_` out.

    Args:
        module: its `train_step` scales the loss from now on; None where only `scale` is used.
        initial_scale, min_scale, max_scale: of the loss.
        growth_factor, growth_interval: the scale is multiplied by `growth_factor` after
            `growth_interval` steps without overflow.
        backoff_factor, hysteresis: the scale is multiplied by `backoff_factor` at the overflow
            number `hysteresis` since it last grew, and at each one after that.
        enabled: False makes every method do what it would do without scaling.

    Raises:
        AutoparError: a setting is out of range, or the module is not a parallel one.
    """

    def __init__(
        self,
        module: ParallelModule | None = None,
        *,
        initial_scale: float = 2.0**16,
        min_scale: float = 1.0,
        max_scale: float = 2.0**32,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        enabled: bool = True,
    ) -> None:
        if not 0 < min_scale <= initial_scale <= max_scale:
            raise AutoparError(
                f"a loss scale needs 0 < min_scale <= initial_scale <= max_scale, got {min_scale}, "
                f"{initial_scale}, {max_scale}"
            )
        if growth_factor <= 1 or not 0 < backoff_factor < 1:
            raise AutoparError(
                "a loss scale needs growth_factor > 1 and 0 < backoff_factor < 1, got "
                f"{growth_factor} and {backoff_factor}"
            )
        if growth_interval < 1 or hysteresis < 1:
            raise AutoparError(
                f"growth_interval and hysteresis count steps, got {growth_interval}, {hysteresis}"
            )
        self.min_scale, self.max_scale = float(min_scale), float(max_scale)
        self.growth_factor, self.backoff_factor = float(growth_factor), float(backoff_factor)
        self.growth_interval, self.hysteresis = growth_interval, hysteresis
        self.enabled = enabled
        self._scale = float(initial_scale)
        self._growth_tracker = 0
        self._overflows = 0
        self._found: dict[int, bool | Tensor] = {}
        self._stepped: set[int] = set()
        if module is not None:
            check_parallel(module)  # another one would not scale, and `step` unscale all the same
            module.loss_scaler = self

    def is_enabled(self) -> bool:
        """False where it does nothing."""
        return self.enabled

    def get_scale(self) -> float:
        """What a loss is multiplied by."""
        return self._scale if self.enabled else 1.0

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call `backward` on; `train_step` does both."""
        return loss * self._scale if self.enabled else loss

    @torch.no_grad()
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of an optimizer by the scale, and look for what is not finite.

        Every rank calls this: an all-reduce of one number lets all of them know what one found.

        Raises:
            AutoparError: called twice before `update`.
        """
        if not self.enabled:
            return
        if id(optimizer) in self._found:
            raise AutoparError(
                "the gradients of this optimizer are unscaled already; call update()"
            )
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = local_gradients(parameters)
        for gradient in gradients:
            gradient.mul_(1.0 / self._scale)
        self._found[id(optimizer)] = bool(_overflow(gradients).item())

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's step on unscaled gradients, or none after an overflow.

        Returns:
            What `optimizer.step` returns; None where it is skipped.

        Raises:
            AutoparError: called twice before `update`.
        """
        if not self.enabled:
            return optimizer.step(*args, **kwargs)
        key = id(optimizer)
        if key in self._stepped:
            raise AutoparError("step() was called twice on this optimizer; call update() between")
        if key not in self._found and isinstance(optimizer, AdamW) and not (args or kwargs):
            self._stepped.add(key)
            return self._step_folded(optimizer)
        if key not in self._found:
            self.unscale_(optimizer)
        self._stepped.add(key)
        return None if self._found[key] else optimizer.step(*args, **kwargs)

    @torch.no_grad()
    def _step_folded(self, optimizer: AdamW) -> None:
        """A step that divides by the scale where it reads gradients, which stay as they are.

        The host does not wait for what was found: `update` does.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        found = _overflow(local_gradients(parameters))
        scale = torch.full((), self._scale, dtype=torch.float64, device=found.device)
        optimizer.grad_scale, optimizer.found_inf = scale, found
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf
        self._found[id(optimizer)] = found

    def update(self) -> None:
        """Adapt the scale, once per step, after the steps of all optimizers.

        Raises:
            AutoparError: no optimizer has stepped.
        """
        if not self.enabled:
            return
        if not self._found:
            raise AutoparError("update() without a step(optimizer) before it")
        if any(bool(found) for found in self._found.values()):
            self._growth_tracker = 0
            self._overflows += 1
            if self._overflows >= self.hysteresis:
                self._scale = max(self._scale * self.backoff_factor, self.min_scale)
        else:
            self._growth_tracker += 1
            if self._growth_tracker == self.growth_interval:
                self._growth_tracker = self._overflows = 0
                self._scale = min(self._scale * self.growth_factor, self.max_scale)
        self._found.clear()
        self._stepped.clear()

    def state_dict(self) -> dict[str, float | int]:
        """The scale and both counters; the settings are the constructor's."""
        return {name: getattr(self, f"_{name}") for name in _STATE}

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Take up where `state_dict` left off.

        Raises:
            AutoparError: an entry is missing.
        """
        missing = [name for name in _STATE if name not in state]
        if missing:
            raise AutoparError(f"the state of a loss scaler has no {', '.join(missing)}")
        for name in _STATE:
            setattr(self, f"_{name}", state[name])


def _overflow(gradients: Sequence[Tensor]) -> Tensor:
    """1 where a gradient of any rank is not finite, else 0: an all-reduce of one number."""
    device = gradients[0].device if gradients else collective_device()
    found = torch.zeros((), device=device)
    for gradient in gradients:
        found = torch.maximum(found, (~torch.isfinite(gradient).all()).to(found))
    if dist.is_initialized() and dist.get_world_size() > 1:
        with naming_lost_ranks("where all ranks look for an overflow"):
            dist.all_reduce(found, dist.ReduceOp.MAX)
    return found
