"""The state of a parallel module: its tensors by name, and state dicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _IncompatibleKeys

from autopar.core.plan import Plan
from autopar.errors import AutoparError
from autopar.runtime.children import BatchNormChild, Mirror, refuse_assigned
from autopar.runtime.names import StateName, names_of, owner_of
from autopar.runtime.plain_state import has_plain, load_plain
from autopar.runtime.saved_shares import check_own_shares, is_from_a_file

__all__ = ["StateModule", "check_installed", "check_parallel"]


class StateModule(Mirror):
    """A module whose parameters are shares of those of `model`, under the same names."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = names_of(model)
        self._plan: Plan | None = None
        self._owners: dict[str, tuple[nn.Module, str]] = {}

    @property
    def plan(self) -> Plan:
        """The plan of the first input signature."""
        if self._plan is None:
            raise AutoparError("there is no plan before the first call; pass example_inputs")
        return self._plan

    def parameter(self, name: str) -> DTensor:
        """`get_parameter`, without walking the path each time."""
        owner, leaf = self._owner(name)
        found = owner._parameters[leaf]
        assert isinstance(found, DTensor)
        return found

    def buffer(self, name: str) -> Tensor:
        """`get_buffer`, without walking the path each time."""
        owner, leaf = self._owner(name)
        found = owner._buffers[leaf]
        assert found is not None
        return found

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        if name not in self._owners:
            self._owners[name] = owner_of(self, name)
        return self._owners[name]

    def saved_tensors(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers that this rank holds, each tied one once, by FQN."""
        held = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        kept = {entry.owner for entry in self._names if entry.persistent}
        return {name: held[name] for name in held if name in kept}

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As `nn.Module.state_dict`; parameters are DTensors.

        Raises:
            AutoparError: there are no values before the first call.
        """
        if self._plan is None:
            raise AutoparError(
                "there are no values to save before the first call; pass example_inputs to "
                "autopar.parallelize"
            )
        return super().state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As `nn.Module.load_state_dict`; full tensors, as one device has them, are sharded.

        Every rank passes the same full tensors, on any device; a rank of a pipeline may leave out
        what other stages hold.

        Returns:
            Missing and unexpected names, as torch does.

        Raises:
            CheckpointError: names or shapes of full tensors do not fit; nothing is changed then.
            AutoparError: there are no parameters to fill before the first call.
        """
        refuse_assigned(assign)
        check_installed(self)
        if is_from_a_file(state_dict.values()):
            check_own_shares(state_dict)
        if not has_plain(state_dict):
            return super().load_state_dict(state_dict, strict)
        return _IncompatibleKeys(*load_plain(self, state_dict, strict))

    @property
    def names(self) -> tuple[StateName, ...]:
        """Every FQN of the model's state, of all stages; a tied tensor has several."""
        return self._names

    def _set_buffer(self, name: str, value: Tensor) -> None:
        owner, leaf = self._owner(name)
        with torch.no_grad():
            if type(owner) is BatchNormChild:
                value = owner.averaged(leaf, value)
            self.buffer(name).copy_(value)


def check_parallel(module: object) -> None:
    """Refuse a plain module, or a part, where the parallel one is wanted.

    Raises:
        AutoparError: it is none that `autopar.parallelize` returned.
    """
    if not isinstance(module, StateModule):
        raise AutoparError(
            f"the module is a {type(module).__name__}; pass the one that autopar.parallelize "
            "returned"
        )


def check_installed(module: StateModule) -> None:
    """Refuse to fill parameters that have no storage yet: the first plan would replace the values.

    Raises:
        AutoparError: the module has no plan.
    """
    if module._plan is None:
        raise AutoparError(
            "there is nothing to load into before the first call; pass example_inputs to "
            "autopar.parallelize"
        )
