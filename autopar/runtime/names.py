"""Names of a model's state, and where a parallel module keeps the tensors."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

__all__ = ["StateName", "names_of", "owner_of", "register"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateName:
    """One FQN of the model's state: the FQN that owns its tensor, and whether it is saved."""

    name: str
    owner: str
    persistent: bool


def names_of(model: nn.Module) -> tuple[StateName, ...]:
    """Every FQN of the model's state in its order, tied ones too."""
    transient = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
    owners: dict[int, str] = {}
    return tuple(
        StateName(
            name=name, owner=owners.setdefault(id(tensor), name), persistent=name not in transient
        )
        for name, tensor in (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        )
    )


def owner_of(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds a parameter or buffer, and its name there."""
    # not by attributes: a model may have a child of the name of something that `root` has
    *parents, leaf = name.split(".")
    owner = root
    for parent in parents:
        child = owner._modules[parent]
        assert child is not None
        owner = child
    return owner, leaf


def register(root: nn.Module, path: str, value: Tensor, persistent: bool) -> None:
    """Put a parameter or buffer at a dotted path, making plain modules on the way."""
    *parents, leaf = path.split(".")
    module = root
    for name in parents:
        child = module._modules.get(name)
        if child is None:
            child = nn.Module()
            module._modules[name] = child
        module = child
    # not by torch's functions, which refuse a name that `ParallelModule` has an attribute of
    if isinstance(value, nn.Parameter):
        module._parameters[leaf] = value
        return
    module._buffers[leaf] = value
    if not persistent:
        module._non_persistent_buffers_set.add(leaf)
