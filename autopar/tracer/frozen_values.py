"""What a forward changes besides tensors and buffers is undone after a trace, and warned of.

    self.step += 1
    return loss * min(1.0, self.step / 1000)

A buffer that is replaced, ``self.mean = 0.9 * self.mean + …``, is written to instead, which export
keeps. Numbers are constants of the traced graph, and so are Python's and NumPy's random numbers,
and tensors that are no buffers. What the trace has changed is put back, so that another trace of
the model finds what this one found.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from autopar.errors import FrozenValueWarning, TraceError

__all__ = ["Frozen", "putting_back", "warn_of_frozen"]

_NUMBERS = (bool, int, float, complex)
_OWN = vars(nn.Module())  # what torch keeps on a module: buffers, hooks


class Frozen:
    """What is said of numbers that a forward changes or draws, and the tensors that it replaces.

    Attributes:
        told: a text for each number.
        replaced: name and old value of each tensor; harmless where nothing reads the old one.
    """

    def __init__(self) -> None:
        self.told: list[str] = []
        self.replaced: list[tuple[str, Tensor]] = []


@contextmanager
def putting_back(model: nn.Module) -> Iterator[Frozen]:
    """While the forward of a model is traced.

    Raises:
        TraceError: the forward puts another parameter into the place of one.
    """
    modules = dict(model.named_modules())
    before = {name: dict(vars(module)) for name, module in modules.items()}
    inside = {name: _containers(module) for name, module in modules.items()}
    parameters = {name: dict(module._parameters) for name, module in modules.items()}
    buffers = {name: dict(module._buffers) for name, module in modules.items()}
    drawn = _states()
    frozen = Frozen()
    try:
        yield frozen
    finally:
        for name, module in modules.items():
            _compare_containers(module, inside[name], name, frozen)
        frozen.told += _put_back(model, before, frozen)
        new = _replaced_buffers(modules, buffers, frozen)
    _refuse_replaced(modules, parameters)
    _write_buffers(new)
    frozen.told += (_of_drawn(n) for n, state in _states().items() if state != drawn.get(n, state))


def warn_of_frozen(frozen: Frozen, constants: Iterable[Any]) -> None:
    """Warn of each number, and of each replaced tensor that the graph has as a constant."""
    read = {_memory(x) for x in constants if isinstance(x, Tensor)}
    told = [_of_replaced(name) for name, tensor in frozen.replaced if _memory(tensor) in read]
    for text in dict.fromkeys((*frozen.told, *told)):
        warnings.warn(text, FrozenValueWarning, stacklevel=2)


def _memory(tensor: Tensor) -> object:
    return tensor.untyped_storage()._cdata


def _containers(module: nn.Module) -> dict[str, list[tuple[Any, Any]]]:
    """What stands in lists and mappings of a module, by attribute."""
    found = {}
    for key, value in vars(module).items():
        if key not in _OWN and isinstance(value, (list, deque, dict)):
            found[key] = _pairs(value)
    return found


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    return list(value.items() if isinstance(value, dict) else enumerate(value))


def _compare_containers(
    module: nn.Module, before: dict[str, list[tuple[Any, Any]]], name: str, frozen: Frozen
) -> None:
    """Note what a forward has changed in lists and mappings."""
    for key, pairs in before.items():
        value = vars(module).get(key)
        if not isinstance(value, (list, deque, dict)):
            continue
        after = _pairs(value)
        if len(after) == len(pairs) and all(
            a[1] is b[1] for a, b in zip(after, pairs, strict=True)
        ):
            continue
        now = dict(after)
        path = f"{name}.{key}" if name else key
        for at, old in pairs:
            new = now.get(at)
            if type(old) in _NUMBERS and isinstance(new, _NUMBERS) and new != old:
                frozen.told.append(_of_changed(f"{path}[{at!r}]", old, new))
            elif isinstance(old, Tensor):
                frozen.replaced.append((path, old))


def _replaced_buffers(
    modules: dict[str, nn.Module], before: dict[str, dict[str, Tensor | None]], frozen: Frozen
) -> list[tuple[Tensor, Tensor]]:
    """Put buffers back; each that was replaced by one of its shape and dtype, with that one."""
    found = []
    for name, module in modules.items():
        for key, old in before[name].items():
            new = module._buffers.get(key)
            if new is old:
                continue
            module._buffers[key] = old
            if old is None:  # made at the first step, as a mask of a size is
                continue
            if isinstance(new, Tensor) and (new.shape, new.dtype) == (old.shape, old.dtype):
                found.append((old, new))
            else:
                frozen.told.append(_of_reshaped(f"{name}.{key}" if name else key, old, new))
    return found


def _write_buffers(replaced: list[tuple[Tensor, Tensor]]) -> None:
    # copies first: two buffers may have changed places
    with torch.no_grad():
        values = [new.detach().clone() for _, new in replaced]
        for (old, _), value in zip(replaced, values, strict=True):
            old.copy_(value)


def _refuse_replaced(
    modules: dict[str, nn.Module], before: dict[str, dict[str, nn.Parameter | None]]
) -> None:
    for name, module in modules.items():
        for key, parameter in before[name].items():
            if module._parameters.get(key) is not parameter:
                module._parameters[key] = parameter
                path = f"{name}.{key}" if name else key
                raise TraceError(
                    f"the forward puts another tensor into the place of its parameter {path}, "
                    "which an optimizer would not know. Compute with a tensor of another name "
                    "(torch.nn.utils.parametrize does), or replace it between steps."
                )


def _put_back(model: nn.Module, before: dict[str, dict[str, Any]], frozen: Frozen) -> Iterator[str]:
    """Restore attributes; yields what is said of each number."""
    for name, module in model.named_modules():
        known = before.get(name, {})
        for key, value in list(vars(module).items()):
            old = known.get(key)
            if isinstance(value, _NUMBERS) and type(old) in _NUMBERS and value != old:
                yield _of_changed(f"{name}.{key}" if name else key, old, value)
            elif not isinstance(value, FakeTensor) or value is old:
                continue
            elif isinstance(old, Tensor):
                frozen.replaced.append((f"{name}.{key}" if name else key, old))
            if key not in known:
                delattr(module, key)
            else:
                vars(module)[key] = old


def _states() -> dict[str, Any]:
    """Of the generators that torch knows nothing of."""
    found: dict[str, Any] = {"Python's random": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        found["numpy.random"] = (kind, keys.tobytes(), *rest)
    return found


def _of_changed(name: str, old: Any, new: Any) -> str:
    return (
        f"forward changes {name} ({old} to {new}), which a trace does not see: every step takes "
        "the value that it has now. Make it a buffer (register_buffer, and change it in place) for "
        "later steps to see it change"
    )


def _of_reshaped(name: str, old: Tensor, new: Any) -> str:
    text = f"shape {tuple(new.shape)}, {new.dtype}" if isinstance(new, Tensor) else repr(new)
    return (
        f"forward replaces buffer {name} (shape {tuple(old.shape)}, {old.dtype}) by another "
        f"({text}), and a program's tensors keep their sizes: every step begins with the one that "
        "is there now. Write to the buffer, or give the new tensor another name"
    )


def _of_replaced(name: str) -> str:
    return (
        f"forward reads {name} and puts another tensor there, which a trace does not see: every "
        "step reads the one that is there now. Make it a buffer (register_buffer) for later steps "
        "to see it change"
    )


def _of_drawn(name: str) -> str:
    return (
        f"forward draws random numbers of {name}, which are constants of the traced program: every "
        "step takes those of now. Draw them with torch.rand, or pass them as an input"
    )
