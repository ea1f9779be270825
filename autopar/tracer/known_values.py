"""Values of small tensors in a forward whose sizes depend on them.

    for t, h, w in image_sizes.tolist():     # an input
        …
    kernel = int(self.kernel_size)           # a buffer

`torch.export` knows no values of inputs and buffers. Where a forward cannot be captured without
them, it is captured again, and what is computed of small integer inputs and of buffers is computed
beside the capture with their values. What asked for a value then holds for that value alone, and is
noted: the step of an input that has other values is another one.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from autopar.core.graph import KnownValue
from autopar.errors import FrozenValueWarning
from autopar.tracer.randomness import draws

__all__ = ["KnownValues", "Sources", "may_be_sizes", "plainly", "warn_of_known"]

Places = Callable[[Tensor, Tensor], list[Tensor] | None]
Origins = frozenset[tuple[str, str]]
"""Kind and name of each input and buffer that a value is computed from."""

_MOST_ROWS, _MOST_COLUMNS = 1024, 4  # of a table of sizes, unlike tokens or masks
_MOST = 1 << 16
_ASKING = frozenset("item tolist __int__ __float__ __index__ __contains__".split())
_MAKING = frozenset("tensor as_tensor arange zeros ones full eye linspace".split())
_UNSET = frozenset("empty empty_like empty_strided new_empty new_empty_strided".split())
# take sizes, or places, as numbers
_SIZED = frozenset(
    "arange zeros ones full empty rand randn new_zeros new_ones new_full new_empty linspace eye "
    "view reshape expand repeat split split_with_sizes tensor_split narrow chunk unflatten unfold "
    "roll pad interpolate one_hot topk select flatten".split()
)
_PICKING = frozenset(
    "nonzero argwhere where unique unique_consecutive masked_select repeat_interleave".split()
)


@dataclass(frozen=True)
class _Known:
    """A tensor of the capture, its version when its value was computed, and that value."""

    tensor: Tensor
    version: int
    value: Tensor
    origins: Origins


class Sources:
    """Real values of what a forward is given.

    Args:
        model, args, kwargs: that are captured.
        whole: know integers that are no sizes too, such as tokens, which nothing may ask for.
    """

    def __init__(
        self, model: nn.Module, args: Any, kwargs: Mapping[str, Any], whole: bool = False
    ) -> None:
        self.buffers = {
            name: buffer
            for name, buffer in model.named_buffers(remove_duplicate=False)
            if _has_value(buffer) and buffer.numel() <= _MOST
        }
        self.inputs: dict[tuple[Any, int], tuple[str, Tensor]] = {}
        self.untold: dict[tuple[Any, int], tuple[str, Tensor]] = {}
        place = 0
        for key, given in (*enumerate(args), *kwargs.items()):
            for i, leaf in enumerate(pytree.tree_leaves(given)):
                if isinstance(leaf, Tensor):
                    if may_be_sizes(leaf) and _has_value(leaf):
                        self.inputs[key, i] = (str(place), leaf)
                    elif whole and not _is_inexact(leaf) and _has_value(leaf):
                        self.untold[key, i] = (str(place), leaf)
                    place += 1

    def pairs(
        self, model: nn.Module, args: Any, kwargs: Mapping[str, Any]
    ) -> Iterator[tuple[Tensor, Tensor, tuple[str, str]]]:
        """Each tensor of the capture that stands for one whose value is known, and its origin."""
        for name, buffer in model.named_buffers(remove_duplicate=False):
            if name in self.buffers:
                yield buffer, self.buffers[name], ("buffer", name)
        for key, given in (*enumerate(args), *kwargs.items()):
            for i, leaf in enumerate(pytree.tree_leaves(given)):
                if (key, i) in self.inputs:
                    place, value = self.inputs[key, i]
                    yield leaf, value, ("input", place)
                elif (key, i) in self.untold:
                    place, value = self.untold[key, i]
                    yield leaf, value, ("untold", place)


def may_be_sizes(tensor: Tensor) -> bool:
    """True for an input whose values a forward may take sizes from: a number, a list, or tables.

    One for each sample is a stack of them, such as sizes of several images.
    """
    if _is_inexact(tensor) or tensor.dim() > 3:
        return False
    columns = tensor.shape[-1] if tensor.dim() > 1 else 1
    return columns <= _MOST_COLUMNS and tensor.numel() <= _MOST_ROWS * columns


def _is_inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _has_value(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter, nn.Buffer) and not tensor.is_meta


class KnownValues(TorchFunctionMode):
    """Computes values beside a capture, and answers what asks for one.

    Args:
        sources: of the forward that is captured.
        places: finds what a mask selects, given its value too, where their number has to be known;
            returns None where it may not be, and is None where it has not.
    """

    def __init__(self, sources: Sources, places: Places | None = None) -> None:
        super().__init__()
        self.sources, self._places = sources, places
        self.asked: dict[tuple[str, str], None] = {}
        self._known: dict[int, _Known] = {}

    @contextmanager
    def of(self, model: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Iterator[None]:
        """While the forward runs, on tensors of the capture."""
        self.asked.clear()  # an attempt before this one may have failed
        self._known.clear()
        for tensor, value, origin in self.sources.pairs(model, args, kwargs):
            with plainly():  # a copy, as the forward may write to it
                value = value.detach().clone()
            self._keep(tensor, value, frozenset((origin,)))
        with self:
            yield

    def values(self) -> tuple[KnownValue, ...]:
        """What was asked for, directly or by what was computed of it."""
        found = {("buffer", name): buffer for name, buffer in self.sources.buffers.items()}
        found |= {("input", place): value for place, value in self.sources.inputs.values()}
        return tuple(KnownValue(*origin, repr(found[origin].tolist())) for origin in self.asked)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func is torch.Tensor.__bool__:  # which has another name while checks are passed
            known_bool = self._find(args[0])
            if known_bool is not None and not _of_inputs(known_bool.origins):
                return bool(self._told(known_bool.value.item, known_bool.origins))
        known = self._of((args, kwargs)) if name in _ASKING else None
        if known is not None:
            return self._told(lambda: func(*known[0][0], **known[0][1]), known[1])
        if name == "__iter__" and self._find(args[0]) is not None:
            return iter(self._noted(torch.unbind, "unbind", args, {}))
        if name in _SIZED:
            first = () if name in _MAKING or not args else args[:1]
            args = (*first, *self._as_numbers(args[len(first) :]))
            kwargs = self._as_numbers(kwargs)
        if name in ("__getitem__", "__setitem__"):
            index = self._as_index(args[1], places=name == "__getitem__")
            args = (args[0], index, *args[2:])
        if name in _PICKING and (picked := self._picked(func, name, args, kwargs)) is not None:
            return picked
        return self._noted(func, name, args, kwargs)

    # --- what is known -------------------------------------------------------------------------
    def value_of(self, tensor: Tensor) -> Tensor | None:
        """For what only computes with it in each step, and does not put it into the graph."""
        known = self._known.get(id(tensor))
        return known.value if known is not None and known.version == tensor._version else None

    def _find(self, tensor: Any, untold: bool = False) -> _Known | None:
        known = self._known.get(id(tensor))
        if known is None or known.version != tensor._version:
            return None
        return known if untold or all(kind != "untold" for kind, _ in known.origins) else None

    def _keep(self, tensor: Tensor, value: Tensor, origins: Origins) -> None:
        self._known[id(tensor)] = _Known(tensor, tensor._version, value, origins)

    def _of(self, arguments: Any, untold: bool = False) -> tuple[Any, Origins] | None:
        """Arguments with values in place of tensors, if all are known; what they come from."""
        leaves, spec = pytree.tree_flatten(arguments)
        found = [self._find(x, untold) if isinstance(x, Tensor) else None for x in leaves]
        if any(isinstance(x, Tensor) and f is None for x, f in zip(leaves, found, strict=True)):
            return None
        plain = [x if f is None else f.value for x, f in zip(leaves, found, strict=True)]
        origins = frozenset[tuple[str, str]]().union(*(f.origins for f in found if f is not None))
        return pytree.tree_unflatten(plain, spec), origins

    def _told(self, compute: Callable[[], Any], origins: Origins) -> Any:
        """A value that goes into the graph as a number."""
        self.asked.update(dict.fromkeys(sorted(origins)))
        with plainly():
            return compute()

    def _noted(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Run the capture's call; where all it reads is known, its results are."""
        known = None
        has_tensors = any(isinstance(x, Tensor) for x in pytree.tree_leaves((args, kwargs)))
        if (has_tensors or name in _MAKING) and name not in _UNSET and not draws(name):
            known = self._of((args, kwargs), untold=True)
        result = func(*args, **kwargs)
        if known is not None:
            self._compute(func, known, result)
        return result

    def _compute(self, func: Any, known: tuple[Any, Origins], result: Any) -> None:
        made = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
        if not made or any(x.requires_grad or x.numel() > _MOST for x in made):
            return
        (args, kwargs), origins = known
        try:
            with plainly():
                values = func(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError):
            return  # it runs in the capture alone, so no value is known
        values = [x for x in pytree.tree_leaves(values) if isinstance(x, Tensor)]
        for tensor, value in zip(made, values, strict=False):
            if tensor.shape == value.shape and tensor.dtype == value.dtype and not value.is_meta:
                self._keep(tensor, value, origins)

    # --- what needs numbers --------------------------------------------------------------------
    def _as_numbers(self, arguments: Any) -> Any:
        """Arguments with Python's numbers in place of whole ones that are tensors."""

        def number(x: Any) -> Any:
            known = self._find(x) if isinstance(x, Tensor) and x.dim() == 0 else None
            if known is None or known.value.is_floating_point():
                return x
            return self._told(known.value.item, known.origins)

        return pytree.tree_map(number, arguments)

    def _as_index(self, index: Any, places: bool = True) -> Any:
        """An index with numbers as ends of slices, and places instead of masks if these pick."""
        parts: list[Any] = []
        for part in index if isinstance(index, tuple) else (index,):
            known = self._find(part) if isinstance(part, Tensor) else None
            if isinstance(part, slice):
                ends = self._as_numbers((part.start, part.stop, part.step))
                parts.append(slice(*ends))
            elif places and known is not None and _is_mask(known):
                where = partial(torch.nonzero, known.value, as_tuple=True)
                columns = self._told(where, known.origins)
                parts += [self._constant(column, part) for column in columns]
            elif places and (found := self._places_of(part)) is not None:
                parts += found
            else:
                parts.append(part)
        return tuple(parts) if isinstance(index, tuple) or len(parts) != 1 else parts[0]

    def _places_of(self, mask: Any) -> list[Tensor] | None:
        """The places that a mask of inputs selects, one tensor for each dim of it."""
        if self._places is None or not isinstance(mask, Tensor) or mask.dtype is not torch.bool:
            return None
        value = self.value_of(mask)
        if value is None or (value.dim() == 1 and self._one_a_sample(mask)):
            return None
        return self._places(mask, value)

    def _one_a_sample(self, flags: Tensor) -> bool:
        """True for flags that come of an input with as many rows, such as the labels of a batch.

        Rows of its first dims joined, too.
        """
        given = dict((*self.sources.inputs.values(), *self.sources.untold.values()))
        origins = [given[name] for kind, name in self._known[id(flags)].origins if name in given]
        rows = (math.prod(x.shape[:dims]) for x in origins for dims in range(1, x.dim() + 1))
        return len(flags) in rows

    def _picked(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Results whose shapes depend on values, as constants or by places that are constants."""
        if name == "where" and len(args) + len(kwargs) > 1:
            return None
        known = self._of((args, kwargs))
        if known is not None and (name == "repeat_interleave" or not _of_inputs(known[1])):
            (plain, named), origins = known
            like = next(x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor))
            values = self._told(lambda: func(*plain, **named), origins)
            return pytree.tree_map_only(Tensor, lambda v: self._constant(v, like, origins), values)
        if name == "repeat_interleave" and len(args) > 1 and isinstance(args[1], Tensor):
            return self._repeated(*args, **kwargs)
        mask = self._find(args[1]) if name == "masked_select" and len(args) > 1 else None
        if mask is not None and _is_mask(mask):
            x, wide = torch.broadcast_tensors(args[0], args[1])
            with plainly():
                value = mask.value.expand(wide.shape).clone()
            self._keep(wide, value, mask.origins)
            return x[self._as_index(wide)]
        return None

    def _repeated(self, x: Tensor, repeats: Tensor, dim: int | None = None, **_: Any) -> Any:
        known = self._find(repeats)
        if known is None:
            return None
        x, dim = (x.flatten(), 0) if dim is None else (x, dim)
        size = x.shape[dim]

        def places() -> Tensor:
            each = known.value.expand(size) if known.value.dim() else known.value.repeat(size)
            return torch.arange(size).repeat_interleave(each)

        return x.index_select(dim, self._constant(self._told(places, known.origins), x))

    def _constant(self, value: Tensor, like: Tensor, origins: Origins = frozenset()) -> Tensor:
        """A tensor of the capture with a value."""
        with plainly():
            numbers = value.tolist()
        made = torch.tensor(numbers, dtype=value.dtype, device=like.device).reshape(value.shape)
        self._keep(made, value, origins)
        return made


def _of_inputs(origins: Origins) -> bool:
    """Branches on inputs, and rows that they pick, are no sizes but change with each batch."""
    return any(kind == "input" for kind, _ in origins)


def _is_mask(known: _Known) -> bool:
    """True for a mask whose places may be constants."""
    return (
        known.value.dtype is torch.bool and known.value.dim() > 0 and not _of_inputs(known.origins)
    )


@contextmanager
def plainly() -> Iterator[None]:
    """While values are computed: nothing is captured."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


def warn_of_known(model: nn.Module, values: Iterable[KnownValue]) -> None:
    """Say which values a step was traced for."""
    for known in values:
        shown = known.value if len(known.value) <= 60 else f"{known.value[:60]} …"
        what = f"buffer {known.name!r}" if known.kind == "buffer" else f"tensor {known.name}"
        instead = (
            "It must keep that value."
            if known.kind == "buffer"
            else "Another step is traced and planned for each other value. Pass what does not "
            "change as Python's numbers."
        )
        source = "" if known.kind == "buffer" else " of the inputs"
        warnings.warn(
            f"{type(model).__name__}: sizes in the forward depend on the values of {what}{source}, "
            f"and this step is the one for {shown}. {instead}",
            FrozenValueWarning,
            stacklevel=2,
        )
