"""Initial values of a model on the meta device, a few modules at a time.

The values depend on the seed and on a module's place in the model, not on the plan, so every mesh
starts from the same weights. Most modules write their own tensors only, and then one module at a
time is held in memory. Where an initialiser also writes its children's tensors (GPT-2 scales the
projections of each block), a dry run on meta finds out, and these modules are initialised together.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.errors import AutoparError

__all__ = ["InitWeights", "initial_values"]

InitWeights = Callable[[nn.Module], Any]
Place = tuple[nn.Module, str]


@dataclass(frozen=True, slots=True)
class _Unit:
    """One module with what initialises it; `seed` is its own."""

    path: str
    module: nn.Module
    run: Callable[[], None] | None
    seed: int


@dataclass(slots=True)
class _Slot:
    """One tensor: its first FQN, the places that hold it, and the units that write it."""

    name: str
    kind: str
    value: Tensor
    places: list[Place]
    writers: set[int]


def initial_values(
    model: nn.Module, init_weights: InitWeights | None, seed: int, held: Container[str]
) -> Iterator[tuple[str, Tensor, str]]:
    """`(FQN, value, "parameter" or "buffer")` of each tensor, on the CPU; tied ones once.

    Each module runs its `reset_parameters`, then the model's `_init_weights`, then
    `init_weights`, children first, as a constructor would. The model itself stays on meta. Left out
    are modules without a buffer and without a parameter out of `held`, and such that go with them.

    Raises:
        AutoparError: nothing initialises a tensor.
    """
    units = _units(model, init_weights, seed)
    slots = _slots(model, units)
    for unit_index, written in enumerate(map(_dry_run, units)):
        for key in written & slots.keys():
            slots[key].writers.add(unit_index)
    needed = {
        writer
        for slot in slots.values()
        for writer in slot.writers
        if slot.kind == "buffer" or slot.name in held
    }
    for together in _components(len(units), slots):
        if needed.isdisjoint(together):
            continue
        yield from _initialise([units[i] for i in together], slots, set(together))


def _units(model: nn.Module, init_weights: InitWeights | None, seed: int) -> list[_Unit]:
    """Modules in the order of `Module.apply`: children first."""
    order = {path: index for index, (path, _) in enumerate(model.named_modules())}
    units: list[_Unit] = []

    def visit(module: nn.Module, path: str, inherited: InitWeights | None) -> None:
        inherited = getattr(module, "_init_weights", None) or inherited
        for name, child in module.named_children():
            visit(child, f"{path}.{name}" if path else name, inherited)
        if path in order:
            run = _initialiser(module, inherited, init_weights)
            units.append(_Unit(path, module, run, seed + order[path]))

    visit(model, "", None)
    return units


def _initialiser(
    module: nn.Module, inherited: InitWeights | None, init_weights: InitWeights | None
) -> Callable[[], None] | None:
    own = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    given = [f for f in (inherited, init_weights) if f is not None]
    if own is None and not given:
        return None

    def run() -> None:
        with torch.no_grad():
            if own is not None:
                own()
            for function in given:
                function(module)

    return run


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _slots(model: nn.Module, units: list[_Unit]) -> dict[int, _Slot]:
    owner = {id(unit.module): index for index, unit in enumerate(units)}
    slots: dict[int, _Slot] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        own = [
            *((n, p, "parameter") for n, p in module._parameters.items()),
            *((n, b, "buffer") for n, b in module._buffers.items()),
        ]
        for name, tensor, kind in own:
            if tensor is None:
                continue
            full_name = f"{path}.{name}" if path else name
            slot = slots.setdefault(_key(tensor), _Slot(full_name, kind, tensor, [], set()))
            if (module, name) not in slot.places:
                slot.places.append((module, name))
            slot.writers.add(owner[id(module)])
    return slots


class _Writes(TorchDispatchMode):
    """Records the storages that ops write to."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[index] if index < len(args) else kwargs.get(argument.name)
                if isinstance(value, Tensor):
                    self.keys.add(_key(value))
        return func(*args, **kwargs)


def _dry_run(unit: _Unit) -> set[int]:
    """Storages that a unit's initialiser writes on meta; what fails there writes its own only."""
    if unit.run is None:
        return set()
    writes = _Writes()
    try:
        with torch.random.fork_rng(devices=[]), writes:
            unit.run()
    except Exception:  # user code that meta tensors cannot run, such as .item()
        return set()
    return writes.keys


def _components(num_units: int, slots: Mapping[int, _Slot]) -> list[list[int]]:
    """Units that write a common tensor, directly or not, in order."""
    root = list(range(num_units))

    def find(i: int) -> int:
        while root[i] != i:
            root[i] = root[root[i]]
            i = root[i]
        return i

    for slot in slots.values():
        first, *others = sorted(slot.writers)
        for other in others:
            low, high = sorted((find(first), find(other)))
            root[high] = low
    groups: dict[int, list[int]] = {}
    for i in range(num_units):
        groups.setdefault(find(i), []).append(i)
    return list(groups.values())


def _initialise(
    units: list[_Unit], slots: Mapping[int, _Slot], members: set[int]
) -> list[tuple[str, Tensor, str]]:
    """Run some units with their tensors on the CPU; the modules are back on meta afterwards."""
    held = [slot for slot in slots.values() if slot.writers & members]
    real: dict[int, Tensor] = {}
    writes = _Writes()
    try:
        for slot in held:
            value: Tensor = torch.zeros_like(slot.value, device="cpu")
            if slot.kind == "parameter":
                value = nn.Parameter(value, requires_grad=slot.value.requires_grad)
            real[id(slot)] = value
            for place in slot.places:
                _put(place, value)
        for unit in units:
            if unit.run is not None:
                with torch.random.fork_rng(devices=[]), writes:
                    torch.manual_seed(unit.seed)
                    unit.run()
        return [(s.name, _read(s, real[id(s)], writes.keys), s.kind) for s in held]
    finally:
        for slot in held:
            for place in slot.places:
                _put(place, slot.value)


def _put(place: Place, value: Tensor) -> None:
    module, name = place
    if isinstance(value, nn.Parameter):
        module._parameters[name] = value
    else:
        module._buffers[name] = value


def _read(slot: _Slot, given: Tensor, written: set[int]) -> Tensor:
    module, name = slot.places[0]
    value = module._parameters.get(name, module._buffers.get(name))
    assert value is not None
    if value is given and _key(given) not in written and given.numel():
        raise AutoparError(
            f"{slot.name} is on meta and nothing initialises it: {type(module).__name__} has no "
            "reset_parameters that writes it. Pass init_weights=, or build the model with values"
        )
    return value.detach()
