"""Functions of integers alone, called in each step as they are, where they cannot be traced.

    def positions(self, input_ids, attention_mask):     # a method of the model, or a function
        for row, kept in zip(input_ids, attention_mask):
            for kind, group in itertools.groupby(row[kept.bool()].tolist()): …

Where a capture fails for want of values, the functions on the way to the line that asks for one are
tried on the real values, the outermost first. One that is given integers, reads no parameter or
buffer, changes nothing and returns tensors only becomes one op (`core/eager_calls.py`).

So does, if nothing else helps, what finds the places that a mask of inputs selects, where their
number seems to be one of the model's settings: `x[~masked].reshape(batch, -1, width)`.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.core.eager_calls import EAGER_CALL, EagerCall
from autopar.tracer.diagnose import innermost_line, is_outside
from autopar.tracer.frozen_values import generator_states, kept_generators
from autopar.tracer.known_values import KnownValues, plainly

__all__ = ["EagerFunctions"]

_PLAIN = (bool, int, float, str, torch.dtype, torch.device, type(None))
_AS_MANY = "Give masks that select as many in each step."
_Place = tuple[Any, str]  # a class or a namespace, and the name in it


class EagerFunctions:
    """Those of one model that may be called as they are, and the calls that were."""

    def __init__(self) -> None:
        self.calls: list[EagerCall] = []
        self.told: list[str] = []  # of masks
        self._places: dict[CodeType, _Place] = {}

    def __bool__(self) -> bool:
        return bool(self._places)

    def add(self, error: BaseException) -> bool:
        """Take the functions that an error came through; True if some are new."""
        before, trace = len(self._places), error.__traceback__
        while trace is not None:
            code = trace.tb_frame.f_code
            # a forward has parameters in general
            if is_outside(code.co_filename) and code.co_name != "forward":
                place = _place(trace.tb_frame)
                if place is not None:
                    self._places.setdefault(code, place)
            trace = trace.tb_next
        return len(self._places) > before

    @contextmanager
    def called(self, known: KnownValues) -> Iterator[None]:
        """While a model is captured: its calls of them become ops where they can."""
        self.told.clear()
        self.calls.clear()  # an attempt before this one may have failed
        originals: list[tuple[Any, str, FunctionType]] = []
        for place in self._places.values():
            function, watched = _at(*place), self._watched(_at(*place), known)
            for holder in _holders(*place):
                originals.append((holder, place[1], function))
                _put(holder, place[1], watched)
        try:
            yield
        finally:
            for holder, name, function in originals:
                _put(holder, name, function)

    def places(self, mask: Tensor, value: Tensor) -> list[Tensor] | None:
        """Where a mask selects, if its number seems to be no accident of the batch.

        A mask (B, …) selects as many, and not all, in each of B rows, as the settings of the model
        say. One of a single dim, as of the edges of a graph that are no loops, has no rows.
        """
        with plainly():
            counts = value.flatten(1).sum(1).tolist() if value.dim() > 1 else [int(value.sum())]
            rows = value.dim() > 1
            if rows and (len(counts) < 2 or len(set(counts)) > 1):
                return None
            if counts[0] == 0 or (rows and counts[0] == value[0].numel()):
                return None
            leaves, spec = pytree.tree_flatten(((mask,), {}))
            call = EagerCall(selected_places, tuple(leaves), spec, _AS_MANY)
            call.named(selected_places(value))
        self.calls.append(call)
        self.told.append(
            f"{innermost_line(traceback.extract_stack())}\n    what follows needs to know how many "
            f"rows the mask selects: this step is for masks that select {sum(counts)} of "
            f"{mask.numel()}, and others are an error"
        )
        return list(EAGER_CALL([mask], call.name))

    def _watched(self, function: FunctionType, known: KnownValues) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            made = self._made(function, known, (args, kwargs))
            return function(*args, **kwargs) if made is None else made[0]

        return call

    def _made(self, function: FunctionType, known: KnownValues, given: Any) -> Any:
        """The results as those of an op, in a tuple; None where the function has to be traced."""
        leaves, spec = pytree.tree_flatten(given)
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        values = [known.value_of(x) for x in tensors]
        if not tensors or any(v is None or v.is_floating_point() or v.is_complex() for v in values):
            return None
        if not all(isinstance(x, (*_PLAIN, Tensor, nn.Module)) for x in leaves):
            return None
        with plainly():
            call = _tried(function, leaves, spec, [v.clone() for v in values if v is not None])
        if call is None:
            return None
        self.calls.append(call)
        return (pytree.tree_unflatten(EAGER_CALL(tensors, call.name), call.out_spec),)


def _tried(
    function: FunctionType, leaves: list[Any], spec: Any, values: list[Tensor]
) -> EagerCall | None:
    """The call, if it does nothing but to compute tensors of these."""
    generators = generator_states()
    versions = [value._version for value in values]
    try:
        call = EagerCall(function, tuple(_without_state(leaves)), spec)
        before = _attributes(call.leaves)
        with kept_generators(), _Watch():
            results = call.run(values)
            drew = generators != generator_states()
        same = _same(before, _attributes(call.leaves))
    except Exception:  # it reads a parameter, draws, or fails in the trace too
        return None
    found = pytree.tree_leaves(results)
    memory = {value.untyped_storage()._cdata for value in values}
    if not found or not all(isinstance(x, Tensor) and not x.is_meta for x in found):
        return None  # a number would be one of this step
    if any(x.untyped_storage()._cdata in memory for x in found):
        return None  # a write to it would be one to what it was given
    written = versions != [value._version for value in values]
    return None if written or drew or not same else call.named(results)


def selected_places(mask: Tensor) -> tuple[Tensor, ...]:
    return mask.nonzero(as_tuple=True)


class _Watch(TorchDispatchMode):
    """Raises where a parameter is read or a random number drawn: steps on ranks would differ."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        reads = any(isinstance(x, nn.Parameter) for x in pytree.tree_leaves((args, kwargs)))
        if reads or torch.Tag.nondeterministic_seeded in func.tags:
            raise RuntimeError(f"{func} in a function of integers")
        return func(*args, **(kwargs or {}))


def _without_state(leaves: list[Any]) -> list[Any]:
    """Copies of modules that have no parameters and buffers: a function that reads one fails."""
    modules = [x for x in leaves if isinstance(x, nn.Module)]
    memo: dict[int, Any] = {}
    for module in modules:
        memo |= {id(x): None for x in (*module.parameters(), *module.buffers())}
    copies = iter(copy.deepcopy(modules, memo))
    return [next(copies) if isinstance(x, nn.Module) else x for x in leaves]


def _attributes(leaves: tuple[Any, ...]) -> list[tuple[str, Any, Any]]:
    """What modules hold: names, values, and what stands in lists and mappings."""
    modules = [m for x in leaves if isinstance(x, nn.Module) for m in x.modules()]
    return [
        (name, value, value.copy() if isinstance(value, (list, dict, set)) else None)
        for module in modules
        for name, value in vars(module).items()
    ]


def _same(before: list[tuple[str, Any, Any]], after: list[tuple[str, Any, Any]]) -> bool:
    if len(before) != len(after):
        return False
    for (name, value, parts), (other, new, inside) in zip(before, after, strict=True):
        if name != other or value is not new or not _same_parts(parts, inside):
            return False
    return True


def _same_parts(parts: Any, others: Any) -> bool:
    if parts is None or isinstance(parts, set):
        return bool(parts == others)
    if isinstance(parts, dict):
        parts, others = [*parts, *parts.values()], [*others, *others.values()]
    return len(parts) == len(others) and all(a is b for a, b in zip(parts, others, strict=True))


# --- where functions are found --------------------------------------------------------------------
def _place(frame: FrameType) -> _Place | None:
    """Where the function that runs in a frame is looked up: its class, or the globals."""
    code = frame.f_code
    holders: list[Any] = [frame.f_globals]
    if code.co_argcount and isinstance(own := frame.f_locals.get(code.co_varnames[0]), nn.Module):
        holders = [*type(own).__mro__, *holders]
    for holder in holders:
        function = _at(holder, code.co_name)
        if isinstance(function, FunctionType) and inspect.unwrap(function).__code__ is code:
            return holder, code.co_name
    return None


def _holders(holder: Any, name: str) -> list[Any]:
    """Where a function is found: of one that is no method, all modules that have imported it."""
    if not isinstance(holder, dict):
        return [holder]
    spaces = [getattr(module, "__dict__", {}) for module in list(sys.modules.values())]
    function = holder[name]
    return [holder, *(x for x in spaces if x is not holder and x.get(name) is function)]


def _at(holder: Any, name: str) -> Any:
    return (holder if isinstance(holder, dict) else vars(holder)).get(name)


def _put(holder: Any, name: str, function: Any) -> None:
    if isinstance(holder, dict):
        holder[name] = function
    else:
        setattr(holder, name, function)
