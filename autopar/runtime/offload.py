"""Optimizer states in host memory, and the update there (Ren et al. 2021, arXiv 2101.06840).

While an optimizer steps, copies in host memory stand for parameters of plans with
`offload: "optimizer"`. So its states are made in host memory and stay there. The optimizer is
torch's own, made from the parallel module's parameters as ever. Optimizers that work element by
element take parameters bucket by bucket, beside the copies: `local_step`. Here is the way of all
others: everything goes down, the step is made on DTensors in host memory, new values come up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.optim import Optimizer

from autopar._dtensors import local_of
from autopar.core.host_link import HostLink, link_of
from autopar.runtime.stand_ins import StandIns

__all__ = ["come_back", "go_to_host", "held_by", "is_offloaded", "link_for", "offload", "on_host"]

_MARK = "_autopar_offloaded"
_AWAY = "_autopar_away"
_Groups = list[list[Tensor]]


def offload(parameters: Iterable[Tensor]) -> None:
    """Let optimizers of these parameters keep their states on the host, from the next step on."""
    for parameter in parameters:
        setattr(parameter, _MARK, True)


def is_offloaded(parameter: Tensor) -> bool:
    """True for a parameter whose optimizer states belong to the host."""
    return bool(getattr(parameter, _MARK, False))


def link_for(parameter: Tensor) -> HostLink:
    """The link between the host and the device of a parameter."""
    return link_of(local_of(parameter).device)


@contextmanager
def on_host(optimizer: Optimizer) -> Iterator[None]:
    """Inside, an optimizer holds host copies of its offloaded parameters; they are not read back.

    `Optimizer.load_state_dict` puts states where the parameters are.
    """
    go_to_host(optimizer, all_of_them=True)
    try:
        yield
    finally:
        come_back(optimizer, update=False)


def go_to_host(optimizer: Optimizer, all_of_them: bool = False) -> None:
    """Put host copies of offloaded parameters into the groups: of those with gradients, or all."""
    held: _Groups = [group["params"] for group in optimizer.param_groups]
    chosen = [
        p
        for group in held
        for p in group
        if is_offloaded(p) and (all_of_them or p.grad is not None)
    ]
    if not chosen:
        return
    link = link_for(chosen[0])
    link.begin()
    stand_ins = StandIns(chosen, link, local=False)
    new = dict(zip(map(id, chosen), stand_ins.enter(optimizer.state), strict=True))
    for group in optimizer.param_groups:
        group["params"] = [new.get(id(p), p) for p in group["params"]]
    setattr(optimizer, _AWAY, (held, stand_ins))


def held_by(optimizer: Optimizer) -> list[Tensor]:
    """The parameters that host copies stand for at the moment, with all others; else none."""
    held: _Groups = optimizer.__dict__.get(_AWAY, ([], None))[0]
    return [p for group in held for p in group]


def come_back(optimizer: Optimizer, update: bool) -> None:
    """Put the device's parameters back, with the new values if `update`."""
    if not hasattr(optimizer, _AWAY):
        return
    stand_ins: StandIns
    held, stand_ins = getattr(optimizer, _AWAY)
    delattr(optimizer, _AWAY)
    for group, parameters in zip(optimizer.param_groups, held, strict=True):
        group["params"] = parameters
    link = link_for(stand_ins.parameters[0])
    stand_ins.leave(optimizer.state, update)
    link.end()
