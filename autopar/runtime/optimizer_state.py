"""Optimizer states by FQN: what a checkpoint keeps of an optimizer, whatever the plan.

Torch numbers parameters by their place in the groups; names hold on any rank and mesh. A state is
sharded as the parameter, but on dims that it has summed to size 1; tensors that are not DTensors
(step counters) are the same on every rank that holds the parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar.core.host_link import HOST
from autopar.core.placement import local_shape
from autopar.errors import CheckpointError
from autopar.runtime.offload import is_offloaded, on_host
from autopar.runtime.pieces import evened
from autopar.runtime.state import to_dtensor
from autopar.runtime.summed import layout_of_sums

__all__ = ["check", "collect", "merged", "restore", "targets"]

_SHARDED, _PLAIN = "optimizer", "optimizer-plain"


def _named(optimizer: Optimizer, names: Mapping[int, str]) -> list[tuple[str, Tensor]]:
    found = []
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise CheckpointError(
                    f"group {number} of the optimizer has a parameter of shape "
                    f"{tuple(parameter.shape)} that is not the module's: make the optimizer from "
                    "the parallel module's parameters"
                )
            found.append((names[id(parameter)], parameter))
    return found


def collect(
    optimizer: Optimizer, names: Mapping[int, str]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors of an optimizer's states by key, and its options and other values.

    Args:
        optimizer: of the module's parameters.
        names: FQN of each parameter by id.
    """
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for name, parameter in _named(optimizer, names):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, DTensor):
                tensors[f"{_SHARDED}/{name}/{key}"] = evened(value)
            elif isinstance(value, Tensor):
                tensors[f"{_PLAIN}/{name}/{key}"] = value
            else:
                values.setdefault(name, {})[key] = value
    groups = [
        {
            "params": [names[id(p)] for p in group["params"]],
            "options": {key: value for key, value in group.items() if key != "params"},
        }
        for group in optimizer.param_groups
    ]
    return tensors, {"class": type(optimizer).__name__, "groups": groups, "values": values}


def merged(mine: dict[str, Any]) -> dict[str, Any]:
    """The second part of `collect` for the parameters of all ranks. Collective.

    Raises:
        CheckpointError: an option, such as a learning rate, differs between ranks.
    """
    everyone: list[Any] = [mine]
    if dist.is_initialized() and dist.get_world_size() > 1:
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
    groups = [dict(group) for group in everyone[0]["groups"]]
    values = dict(everyone[0]["values"])
    for rank, other in enumerate(everyone):
        _check_same_options(groups, other["groups"], rank)
        values.update(other["values"])
        for group, same in zip(groups, other["groups"], strict=True):
            group["params"] = list(dict.fromkeys([*group["params"], *same["params"]]))
    return {**mine, "groups": groups, "values": values}


def _check_same_options(
    first: list[dict[str, Any]], other: list[dict[str, Any]], rank: int
) -> None:
    """A rank with another learning rate has moved its shares of the parameters by another step."""
    if len(first) != len(other):
        raise CheckpointError(
            f"the optimizer has {len(first)} parameter groups on rank 0 and {len(other)} on rank "
            f"{rank}: make the same groups on every rank"
        )
    for number, (group, same) in enumerate(zip(first, other, strict=True)):
        for key, value in group["options"].items():
            ours, theirs = _numbers(value), _numbers(same["options"].get(key))
            if ours is not None and ours == ours and theirs != ours:
                raise CheckpointError(
                    f"{key} of group {number} of the optimizer is {ours} on rank 0 and {theirs} "
                    f"on rank {rank}: each rank has updated its shares of the parameters with its "
                    "own. Set the same options on every rank"
                )


def _numbers(option: Any) -> Any:
    """An option that ranks compare, as numbers: also a pair of betas, or a rate in a tensor."""
    if isinstance(option, Tensor):
        return option.item() if option.numel() == 1 else None
    if isinstance(option, tuple | list):
        found = tuple(_numbers(part) for part in option)
        return None if None in found else found
    return option if isinstance(option, int | float) else None


def targets(
    optimizer: Optimizer,
    names: Mapping[int, str],
    stored: Mapping[str, TensorStorageMetadata],
) -> dict[str, Tensor]:
    """Empty tensors for the states that a checkpoint has of this rank's parameters, by key."""
    parameters = dict(_named(optimizer, names))
    known = set(names.values())
    found: dict[str, Tensor] = {}
    for key, entry in stored.items():
        kind, name, _ = _split(key)
        if kind not in (_SHARDED, _PLAIN):
            continue
        if name in parameters:
            found[key] = _empty(parameters[name], entry, kind == _PLAIN)
        elif name in known:
            raise CheckpointError(
                f"the checkpoint has an optimizer state of {name}, which this optimizer does not "
                "hold: give it the same parameters as when it was saved"
            )
    return found


def _split(key: str) -> tuple[str, str, str]:
    kind, _, rest = key.partition("/")
    name, _, state = rest.rpartition("/")
    return kind, name, state


def _empty(parameter: Tensor, entry: TensorStorageMetadata, plain: bool) -> Tensor:
    shape, dtype = tuple(entry.size), entry.properties.dtype
    if plain or not isinstance(parameter, DTensor):
        return torch.zeros(shape, dtype=dtype)
    mesh, layout = parameter.device_mesh, layout_of_sums(shape, parameter)
    here = local_shape(shape, layout, tuple(mesh.shape))
    device = HOST if is_offloaded(parameter) else parameter.to_local().device
    return to_dtensor(torch.empty(here, dtype=dtype, device=device), shape, layout, mesh)


def restore(
    optimizer: Optimizer,
    names: Mapping[int, str],
    saved: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
) -> None:
    """Give an optimizer the options, values and (filled) tensors of a checkpoint that fits it."""
    states: dict[str, dict[str, Any]] = {n: dict(v) for n, v in saved["values"].items()}
    for key, tensor in tensors.items():
        _, name, state = _split(key)
        states.setdefault(name, {})[state] = tensor
    numbers: dict[str, int] = {}
    groups = []
    for group, before in zip(optimizer.param_groups, saved["groups"], strict=True):
        held = [names[id(p)] for p in group["params"]]
        for name in held:
            numbers[name] = len(numbers)
        groups.append({**before["options"], "params": [numbers[name] for name in held]})
    numbered = {numbers[name]: entry for name, entry in states.items() if name in numbers}
    with on_host(optimizer):
        optimizer.load_state_dict({"state": numbered, "param_groups": groups})


def check(optimizer: Optimizer, names: Mapping[int, str], saved: Mapping[str, Any]) -> None:
    """Refuse what was saved of another kind of optimizer, or of other groups.

    Raises:
        CheckpointError: says which of the two.
    """
    groups, mine = saved["groups"], type(optimizer).__name__
    theirs = saved.get("class", mine)
    if theirs != mine:  # it would take over options that make it the other one, or lack some
        raise CheckpointError(
            f"the checkpoint is of {theirs}, and the optimizer is {mine}: make an optimizer of "
            "that class, or leave optimizer= and scheduler= out"
        )
    if len(groups) != len(optimizer.param_groups):
        raise CheckpointError(
            f"the optimizer has {len(optimizer.param_groups)} parameter groups, the checkpoint "
            f"{len(groups)}: make the same groups in the same order"
        )
    for number, (group, before) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        strange = {names[id(p)] for p in group["params"]} - set(before["params"])
        if strange:
            more = f" and {len(strange) - 1} more" if len(strange) > 1 else ""
            raise CheckpointError(
                f"group {number} of the optimizer holds {min(strange)}{more} that it did not hold "
                "when it was saved: make the same groups in the same order"
            )
