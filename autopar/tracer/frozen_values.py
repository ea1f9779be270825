"""What a forward changes besides tensors and buffers is undone after a trace, and warned of.

    self.step += 1
    return loss * min(1.0, self.step / 1000)

A buffer that is replaced, ``self.mean = 0.9 * self.mean + …``, is written to instead, which export
keeps. Numbers are constants of the traced graph, and so are Python's and NumPy's random numbers,
and tensors that are no buffers; a place that is empty before the first step stays empty. What the
trace has changed is put back, so that another trace of
the model finds what this one found.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar.errors import FrozenValueWarning, TraceError
from autopar.tracer.containers import (
    OWN,
    REFILLED,
    Containers,
    containers_of,
    is_unchanged,
    pairs_of,
    refill,
)
from autopar.tracer.kept import Reads, depend_on_step, fakes_in, holders, made_by, tensors_in
from autopar.tracer.scopes import Names, scopes_of

__all__ = [
    "Frozen",
    "generator_states",
    "kept_generators",
    "putting_back",
    "warn_of_frozen",
]

_NUMBERS = (bool, int, float, complex)


class Frozen:
    """What is said of numbers that a forward changes or draws, and the tensors that it replaces.

    Attributes:
        told: a text for each number, and for each place that the next step would find filled.
        replaced: name and old value of each tensor; harmless where nothing reads the old one.
    """

    def __init__(self) -> None:
        self.told: list[str] = []
        self.replaced: list[tuple[str, Tensor]] = []


@contextmanager
def putting_back(model: nn.Module) -> Iterator[Frozen]:
    """While the forward of a model is traced.

    Raises:
        TraceError: the forward makes a parameter, or puts another one into the place of one.
    """
    modules, scopes = dict(model.named_modules()), scopes_of(model)
    kept = [*holders(model).items(), *((scope.name, scope.found) for scope in scopes)]
    kept += [pair for scope in scopes for pair in scope.objects.items()]
    before = [(dict(vars(holder)), containers_of(holder)) for _, holder in kept]
    parameters = {name: dict(module._parameters) for name, module in modules.items()}
    buffers = {name: dict(module._buffers) for name, module in modules.items()}
    children = {name: dict(module._modules) for name, module in modules.items()}
    state = made_by(model.buffers())
    drawn = generator_states()
    frozen, reads = Frozen(), Reads()
    for scope in scopes:
        reads.add(scope.found, scope.lines)
    try:
        with reads.noted():
            yield frozen
    finally:
        for scope in scopes:
            scope.refresh()
        after = _After(frozen, reads, state)
        for (name, holder), (known, inside) in zip(kept, before, strict=True):
            after.compare_containers(holder, inside, name)
            after.put_back(holder, known, name)
        for scope in scopes:
            scope.put_back()
        new = after.replaced_buffers(modules, buffers)
        made = after.replaced_modules(modules, children)
    if made:
        raise TraceError(_of_made(made[0]))
    _refuse_replaced(modules, parameters)
    _write_buffers(new)
    frozen.told += (
        _of_drawn(n) for n, state in generator_states().items() if state != drawn.get(n, state)
    )


def warn_of_frozen(frozen: Frozen, constants: Iterable[Any]) -> None:
    """Warn of each number, and of each replaced tensor that the graph has as a constant."""
    read = {_memory(x) for x in constants if isinstance(x, Tensor)}
    told = [_of_replaced(name) for name, tensor in frozen.replaced if _memory(tensor) in read]
    for text in dict.fromkeys((*frozen.told, *told)):
        warnings.warn(text, FrozenValueWarning, stacklevel=2)


def _memory(tensor: Tensor) -> object:
    return tensor.untyped_storage()._cdata


class _After:
    """Compares what a forward leaves with what it found, and puts that back.

    Args:
        frozen: filled with what is said.
        reads: the forward's.
        state: nodes of buffers; what is made of them alone is the same in the next step.
    """

    def __init__(self, frozen: Frozen, reads: Reads, state: set[fx.Node]) -> None:
        self.frozen, self.reads, self.state = frozen, reads, state

    def compare_containers(self, holder: Any, before: Containers, name: str) -> None:
        """Note what is changed in lists and mappings, and put it back."""
        for key, (old_value, pairs) in before.items():
            value = vars(holder).get(key)
            if not isinstance(value, REFILLED):
                continue
            if is_unchanged(value, pairs):
                continue
            after = pairs_of(value)
            path = f"{name}.{key}" if name else key
            self._compare_pairs(dict(pairs), dict(after), path)
            known = {id(x) for _, x in pairs}
            added = fakes_in([x for _, x in after if id(x) not in known])
            added = [] if tensors_in([x for _, x in pairs]) else added  # which is said already
            line = self.reads.line_besides_filling(holder, key)
            if value is old_value and line and depend_on_step(added, self.state):
                self.frozen.told.append(_of_found(path, "as it is now", line))
            refill(old_value, pairs)

    def _compare_pairs(self, before: dict[Any, Any], after: dict[Any, Any], path: str) -> None:
        for at, old in before.items():
            new = after.get(at)
            if type(old) in _NUMBERS and isinstance(new, _NUMBERS) and new != old:
                self.frozen.told.append(_of_changed(f"{path}[{at!r}]", old, new))
            elif isinstance(old, Tensor):
                self.frozen.replaced.append((path, old))

    def put_back(self, holder: Any, known: dict[str, Any], name: str) -> None:
        """Restore attributes that are numbers, or are made of tensors of the trace."""
        for key, value in list(vars(holder).items()):
            old = known.get(key)
            path = f"{name}.{key}" if name else key
            number = isinstance(value, _NUMBERS) and type(old) in _NUMBERS and value != old
            if number:
                self.frozen.told.append(_of_changed(path, old, value))
            elif value is old or key in OWN or not (made := fakes_in(value)):
                continue
            elif found := tensors_in(old):
                self.frozen.replaced += ((path, x) for x in found)
            else:
                was = repr(old) if key in known else "missing"
                self._say_found(holder, key, path, was, made)
            if key not in known:
                delattr(holder, key)
            else:
                vars(holder)[key] = old

    def _say_found(self, holder: Any, key: str, path: str, was: str, made: list[Tensor]) -> None:
        """Of an attribute without tensors that gets some, if the next step would see them."""
        line = self.reads.line(holder, key)
        plain = not isinstance(holder, (nn.Module, Names))  # whose reads are not known
        plain |= isinstance(getattr(type(holder), key, None), cached_property)
        if (line or plain) and depend_on_step(made, self.state):
            self.frozen.told.append(_of_found(path, was, line))

    def replaced_buffers(
        self, modules: dict[str, nn.Module], before: dict[str, dict[str, Tensor | None]]
    ) -> list[tuple[Tensor, Tensor]]:
        """Put buffers back; each that was replaced by one of its shape and dtype, with that one."""
        found = []
        for name, module in modules.items():
            for key in [key for key in module._buffers if key not in before[name]]:
                made = fakes_in(module._buffers.pop(key))
                self._say_found(module, key, f"{name}.{key}" if name else key, "missing", made)
            for key, old in before[name].items():
                new = module._buffers.get(key)
                if new is old:
                    continue
                module._buffers[key] = old
                path = f"{name}.{key}" if name else key
                if old is None:
                    self._say_found(module, key, path, "None", fakes_in(new))
                elif isinstance(new, Tensor) and (new.shape, new.dtype) == (old.shape, old.dtype):
                    found.append((old, new))
                else:
                    self.frozen.told.append(_of_reshaped(path, old, new))
        return found

    def replaced_modules(
        self, modules: dict[str, nn.Module], before: dict[str, dict[str, nn.Module | None]]
    ) -> list[str]:
        """Put modules back where others are, or none were; names of parameters of the others."""
        found: list[str] = []
        known = {id(p) for module in modules.values() for p in module._parameters.values()}
        for name, module in modules.items():
            changed = {k: x for k, x in module._modules.items() if before[name].get(k) is not x}
            if not changed and len(module._modules) == len(before[name]):
                continue
            module._modules.clear()
            module._modules.update(before[name])
            for key, child in changed.items():
                path = f"{name}.{key}" if name else key
                if child is None:
                    continue
                found += [f"{path}.{n}" for n, p in child.named_parameters() if id(p) not in known]
                if depend_on_step(fakes_in([*child.buffers()]), self.state):
                    was = "as it is now" if key in before[name] else "missing"
                    self.frozen.told.append(_of_found(path, was, None))
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
        made = {key: None for key in module._parameters if key not in before[name]}
        for key, parameter in (*before[name].items(), *made.items()):
            if module._parameters.get(key) is not parameter:
                module._parameters[key] = parameter
                path = f"{name}.{key}" if name else key
                if parameter is None:
                    raise TraceError(_of_made(path))
                raise TraceError(
                    f"the forward puts another tensor into the place of its parameter {path}, "
                    "which an optimizer would not know. Compute with a tensor of another name "
                    "(torch.nn.utils.parametrize does), or replace it between steps."
                )


def generator_states() -> dict[str, Any]:
    """Of the generators that torch knows nothing of."""
    found: dict[str, Any] = {"Python's random": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        found["numpy.random"] = (kind, keys.tobytes(), *rest)
    return found


@contextmanager
def kept_generators() -> Iterator[None]:
    """Afterwards they go on as if nothing had been drawn."""
    numpy = sys.modules.get("numpy")
    state, other = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(other)


def _of_made(path: str) -> str:
    return (
        f"the forward makes the parameter {path}, which an optimizer that is made before the first "
        "step does not know. Make it in __init__, or call the model once before autopar.parallelize"
    )


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


def _of_found(name: str, was: str, line: str | None) -> str:
    where = f" at {line}" if line else ""
    return (
        f"forward looks at {name}{where} and leaves tensors there for the next step, which a trace "
        f"does not see: every step finds it {was}. Make it a buffer (register_buffer) that the "
        "first step fills too, or pass it from step to step as an input and an output"
    )


def _of_drawn(name: str) -> str:
    return (
        f"forward draws random numbers of {name}, which are constants of the traced program: every "
        "step takes those of now. Draw them with torch.rand, or pass them as an input"
    )
