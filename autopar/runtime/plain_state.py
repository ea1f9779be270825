"""Loads a single device's state dict: ranks keep their shares of the full tensors."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar._dtensors import layout_of
from autopar.errors import CheckpointError
from autopar.runtime.agree import agreed
from autopar.runtime.shards import take_shard

if TYPE_CHECKING:
    from autopar.runtime.state_module import StateModule

__all__ = ["has_plain", "load_plain"]

_SHOWN = 5


def has_plain(state: Mapping[str, Any]) -> bool:
    """True if a state has a tensor that is no DTensor."""
    return any(isinstance(v, Tensor) and not isinstance(v, DTensor) for v in state.values())


def load_plain(
    module: StateModule, state: Mapping[str, Any], strict: bool, prefix: str = ""
) -> tuple[list[str], list[str]]:
    """Fill parameters and persistent buffers in place; nothing is changed where something is wrong.

    In a pipeline, whose ranks look for different names, they compare notes first.

    Args:
        module: with its plan.
        state: full tensors (or DTensors placed as the module's are), by FQN. Of names that share a
            tensor, one is enough. What other stages of a pipeline hold may be there or not.
        strict: missing and unexpected names are errors.
        prefix: of the names in question, where a part of the module is loaded.

    Returns:
        Missing and unexpected names.

    Raises:
        CheckpointError: names, shapes or kinds do not fit; says which. On every rank.
    """
    held = module.saved_tensors()
    if module.plan.pipeline is None:  # else ranks look for different names
        state = {name: _without_other_places(held.get(name), v) for name, v in state.items()}
    fit: _Fit | None = None
    failure: Exception | None = None
    try:
        fit = _fit(module, held, state, strict, prefix)
    except Exception as error:  # whatever it is, the other ranks must hear of it
        failure = error
    if module.plan.pipeline is not None:
        agreed(failure, {})
    elif failure is not None:
        raise failure
    assert fit is not None
    with torch.no_grad():
        for owner, name in fit.given.items():
            _fill(held[owner], state[name])
    return fit.missing, fit.strange


class _Fit(NamedTuple):
    """Name in a state of each tensor of a module, and the names that have no partner."""

    given: dict[str, str]
    missing: list[str]
    strange: list[str]


def _fit(
    module: StateModule,
    held: Mapping[str, Tensor],
    state: Mapping[str, Any],
    strict: bool,
    prefix: str,
) -> _Fit:
    saved = {entry.owner for entry in module.names if entry.persistent}
    asked = (entry for entry in module.names if entry.name.startswith(prefix))
    names = {entry.name: entry.owner for entry in asked if entry.owner in saved}
    owners = {name: owner for name, owner in names.items() if owner in held}
    given: dict[str, str] = {}
    for name in state:
        if name in owners:
            first = given.setdefault(owners[name], name)
            _check_alike(first, name, state)
    owned = {*names.values()}
    missing = [name for name in held if name in owned and name not in given]
    strange = [name for name in state if name not in names]
    faults = [
        fault
        for owner, name in given.items()
        if (fault := _fault(name, state[name], held[owner])) is not None
    ]
    if strict:
        faults += _named("it lacks", missing, list(state))
        faults += _named("the module does not have", strange, list(names))
    if faults:
        raise CheckpointError(
            f"the state dict does not fit the module: {'; '.join(faults)}. Nothing was loaded."
        )
    return _Fit(given, missing, strange)


def _check_alike(first: str, name: str, state: Mapping[str, Any]) -> None:
    one, other = state[first], state[name]
    if one is other or not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return
    same = one.shape == other.shape and one.untyped_storage() is other.untyped_storage()
    if not same and not (one.shape == other.shape and torch.equal(one, other)):
        raise CheckpointError(
            f"the module has one tensor for {first} and {name}, the state dict two different ones: "
            "leave one of them out"
        )


def _fault(name: str, value: Any, mine: Tensor) -> str | None:
    if not isinstance(value, Tensor) or value.is_meta:
        found = "a tensor on meta" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        return f"{name} is {found}, not a tensor with values"
    if value.shape != mine.shape:
        return f"{name} has shape {tuple(value.shape)}, in the module {tuple(mine.shape)}"
    if isinstance(value, DTensor) and not _is_placed_as(mine, value):
        return f"{name} is a DTensor placed otherwise than the module's: give full tensors"
    return None


def _is_placed_as(mine: Tensor | None, value: DTensor) -> bool:
    return isinstance(mine, DTensor) and (
        value.placements == mine.placements and value.device_mesh == mine.device_mesh
    )


def _without_other_places(mine: Tensor | None, value: Any) -> Any:
    """The whole of a DTensor that another plan has placed."""
    if isinstance(value, DTensor) and not value.is_meta and not _is_placed_as(mine, value):
        return value.full_tensor()
    return value


def _named(what: str, names: Sequence[str], others: Sequence[str]) -> list[str]:
    if not names:
        return []
    shown = ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
    near = difflib.get_close_matches(names[0], others, n=1)
    hint = f" (nearest to the first: {near[0]})" if near else ""
    return [f"{what} {len(names)} name{'s' * (len(names) > 1)}: {shown}{hint}"]


def _fill(mine: Tensor, value: Tensor) -> None:
    if isinstance(mine, DTensor) and not isinstance(value, DTensor):
        mesh = mine.device_mesh
        coords = mesh.get_coordinate()
        assert coords is not None
        shard = take_shard(value, layout_of(mine.placements), tuple(mesh.shape), tuple(coords))
        mine._local_tensor.copy_(shard)
    else:
        mine.copy_(value)
