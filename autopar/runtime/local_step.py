"""Elementwise optimizers step on each rank's shares as plain tensors, not on DTensors.

For such a step plain tensors stand in for the parameters in the optimizer's groups and states. They
share the memory of the parameters, so that nothing is copied; for offloaded parameters, they are
copies in host memory. Those come in buckets: while the host updates one, the next goes down and the
one before goes up again (ZeRO-Offload, Ren et al. 2021, arXiv 2101.06840):

    down    | 0 | 1 | 2 |
    update      | 0 | 1 | 2 |
    up              | 0 | 1 | 2 |

Torch's own `step` runs once, with its hooks: it is given more groups than there are, each with a
part of a group's parameters, and a bucket is made ready when the step reads its group. All of
torch's optimizers in `_ELEMENTWISE` step group by group in this way.

Other optimizers step on DTensors that reduce partial results at once: `summed`.

`foreach` stays off unless it is asked for, as it is for DTensors: on an accelerator it is torch's
default for plain tensors, and takes memory for temporary values of all parameters at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, TypeVar

from torch import Tensor, optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from autopar._dtensors import local_of
from autopar.errors import AutoparError
from autopar.runtime.loaded_states import settle_states
from autopar.runtime.offload import come_back, go_to_host, held_by, is_offloaded, link_for
from autopar.runtime.stand_ins import StandIns
from autopar.runtime.summed import dress, undress

__all__ = ["elementwise", "is_share", "own_parameters", "step_on_shares"]

_Kind = TypeVar("_Kind", bound=type[Optimizer])
_ELEMENTWISE: set[type[Optimizer]] = {
    optim.ASGD,
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
}
_BUCKET_BYTES = 32 * 2**20  # of parameters: a millisecond of a link, far above what a copy costs
_MARK, _INSIDE = "_autopar_share", "_autopar_inside"


def elementwise(kind: _Kind) -> _Kind:
    """Register an optimizer that reads `params` of one group after the other, each once a step."""
    _ELEMENTWISE.add(kind)
    return kind


def own_parameters(optimizer: Optimizer) -> list[Tensor]:
    """The parameters that an optimizer was made with, also while others stand for them."""
    inside: _LocalStep | None = optimizer.__dict__.get(_INSIDE)
    groups = inside.groups if inside is not None and inside.groups else optimizer.param_groups
    return held_by(optimizer) or [p for group in groups for p in group["params"]]


def step_on_shares(parameters: Iterable[Tensor]) -> None:
    """Let elementwise optimizers of these parameters step so, from the next step on."""
    _register()
    for parameter in parameters:
        setattr(parameter, _MARK, True)


def is_share(tensor: Tensor) -> bool:
    """True if it is a parameter of a parallel module."""
    return hasattr(tensor, _MARK)


@cache
def _register() -> None:
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    _clear(optimizer)  # the step before raised
    come_back(optimizer, update=False)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is not None and any(is_offloaded(p) for p in parameters):
        raise AutoparError(
            f"torch.optim.{type(optimizer).__name__}.step(closure) would compute gradients after "
            "they were copied to the host: compute them before, or plan with "
            'constraints={"offload": "none"}'
        )
    if not any(hasattr(p, _MARK) for p in parameters):
        return None
    settle_states(optimizer)
    if closure is None:
        setattr(optimizer, _INSIDE, _LocalStep(optimizer))
    elif type(optimizer) not in _ELEMENTWISE and not isinstance(optimizer, optim.LBFGS):
        return args[:1], {**kwargs, "closure": _dressing(optimizer, closure)}
    return None


def _dressing(optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
    """The closure, behind which the optimizer goes on with tensors that are `Summed`."""

    def call() -> Any:
        undress(optimizer)
        found = closure()
        dress(optimizer)
        return found

    return call


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    _clear(optimizer)
    come_back(optimizer, update=True)


def _clear(optimizer: Optimizer) -> None:
    undress(optimizer)
    inside: _LocalStep | None = optimizer.__dict__.pop(_INSIDE, None)
    if inside is not None:
        inside.stop()


class _Part(dict[str, Any]):
    """A group with some of its parameters, which are made ready when the step reads them."""

    def __init__(self, step: _LocalStep, number: int, group: dict[str, Any]) -> None:
        super().__init__(group, params=[])
        if group.get("foreach", False) is None and not group.get("fused"):
            self["foreach"] = False
        self._step, self._number = step, number

    def __getitem__(self, key: str) -> Any:
        if key != "capturable":  # torch reads that of all groups, before the update itself
            self._step.hand_over()
        return self._step.reach(self._number) if key == "params" else super().__getitem__(key)


class _LocalStep:
    """One step of an optimizer. It begins behind the user's pre-hooks, which see DTensors."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.groups: list[dict[str, Any]] = []
        self._parts: list[_Part] = []
        self._buckets: list[StandIns] = []
        self._reached = -1
        # hooks of the optimizer run behind those of all optimizers, the newest last
        self._hook = optimizer.register_step_pre_hook(self._begin)

    def _begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not _is_elementwise(optimizer):
            go_to_host(optimizer)
            if type(optimizer) not in _ELEMENTWISE:
                dress(optimizer)
            return
        self.groups = optimizer.param_groups
        for group in self.groups:
            for bucket in _buckets(group["params"]):
                self._parts.append(_Part(self, len(self._parts), group))
                self._buckets.append(bucket)
        # read when the last bucket is updated
        self._parts.append(_Part(self, len(self._parts), self.groups[-1]))
        self._buckets.append(StandIns([], None))
        optimizer.param_groups = list(self._parts)

    def hand_over(self) -> None:
        """The step goes through the parts: the optimizer has its groups again, should it raise."""
        self._optimizer.param_groups = self.groups

    def reach(self, number: int) -> list[Any]:
        """The parameters of a part; all parts before it are updated."""
        state = self._optimizer.state
        if self._reached < 0:
            for link in self._links():
                link.begin()
        while self._reached < number:
            if self._reached >= 0:
                self._buckets[self._reached].leave(state)
            self._reached += 1
            for bucket in self._buckets[self._reached : self._reached + 2]:
                bucket.send()
            self._buckets[self._reached].enter(state)
        if number == len(self._parts) - 1:
            self.stop()
        return self._buckets[number].tensors

    def stop(self) -> None:
        """Leave the optimizer as it is between steps."""
        self._hook.remove()
        if self.groups:
            self.hand_over()
        if 0 <= self._reached < len(self._buckets):
            # of a step that raised: what it had begun to update is not read back
            self._buckets[self._reached].leave(self._optimizer.state, update=False)
            self._reached = len(self._buckets)
            for link in self._links():
                link.end()

    def _links(self) -> set[Any]:
        offloaded = (b.parameters[0] for b in self._buckets if b.parameters)
        return {link_for(p) for p in offloaded if is_offloaded(p)}


def _buckets(parameters: Iterable[Tensor]) -> Iterator[StandIns]:
    """Those with gradients: what stays on the device, then the buckets of what goes to the host."""
    given = [p for p in parameters if p.grad is not None]
    here = [p for p in given if not is_offloaded(p)]
    if here:
        yield StandIns(here, None)
    bucket: list[Tensor] = []
    size = 0
    for parameter in (p for p in given if is_offloaded(p)):
        num_bytes = _local_bytes(parameter)
        if bucket and size + num_bytes > _BUCKET_BYTES:
            yield StandIns(bucket, link_for(bucket[0]))
            bucket, size = [], 0
        bucket.append(parameter)
        size += num_bytes
    if bucket:
        yield StandIns(bucket, link_for(bucket[0]))


def _local_bytes(parameter: Tensor) -> int:
    local = local_of(parameter)
    return local.numel() * local.element_size()


def _is_elementwise(optimizer: Optimizer) -> bool:
    """True if each parameter and its gradient are shares of one placement, and all else allows."""
    if type(optimizer) not in _ELEMENTWISE:
        return False
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            return False
        for parameter in group["params"]:
            if not hasattr(parameter, _MARK):
                return False
            gradient = parameter.grad
            if gradient is not None and not (
                isinstance(gradient, DTensor) and gradient.placements == parameter.placements
            ):
                return False
    return True
