"""Calls of blocks that a capture leaves out: each becomes one op, whose results nothing computes.

Of many equal blocks the first and last ones run, and so does one period that stands for the others.
A block that runs hands on its results through the same op, so that the captured forward shows what
each one was called with, and what is computed between them (`between_blocks.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar._tracing import proxies_of, put_proxies
from autopar.core.graph import Repeat
from autopar.errors import TraceError
from autopar.tracer.kept import is_plain_object

__all__ = ["Calls", "LastUnlike", "Unlike", "block_call", "shortened", "skipping"]


class Unlike(TraceError):
    """Blocks that are left out turn out to be unlike those that stand for them."""


class LastUnlike(Unlike):
    """Only the last ones are, behind which there is nothing of what stands in front of a block."""


_library = torch.library.Library("autopar", "FRAGMENT")
_library.define("block_call(Tensor[] given, Tensor[] results, str path, bool skipped) -> Tensor[]")
block_call = torch.ops.autopar.block_call.default


@torch.library.register_fake("autopar::block_call", lib=_library)
def _fake(given: list[Tensor], results: list[Tensor], path: str, skipped: bool) -> list[Tensor]:
    return [torch.empty_like(x) for x in results]


def shortened(repeats: Iterable[Repeat]) -> tuple[Repeat, ...]:
    """The repeats that leave out more than a period, each without its last one.

    What is done in front of a block is not there behind the last block.
    """
    return tuple(replace(r, times=r.times - 1) for r in repeats if r.times > 2)


@dataclass(slots=True)
class _Call:
    """Leaves of a module's arguments and results."""

    inputs: list[Any]
    spec: Any
    out_spec: Any = None
    results: list[Any] = field(default_factory=list)
    proxies: list[Any] = field(default_factory=list)

    @property
    def given(self) -> list[Tensor]:
        return [x for x in self.inputs if isinstance(x, Tensor)]

    def handed_on(self, path: str, given: list[Tensor], skipped: bool) -> Any:
        """The results, of which the tensors are those of an op."""
        tensors = [x for x in self.results if isinstance(x, Tensor)]
        others = iter(block_call(given, tensors, path, skipped))
        leaves = [next(others) if isinstance(x, Tensor) else x for x in self.results]
        return pytree.tree_unflatten(leaves, self.out_spec)


class Calls:
    """What modules of blocks were called with, by path.

    Attributes:
        made: in the latest call of the model.
        like: by path of a module that is left out, that of the one that stands for it.
    """

    def __init__(self) -> None:
        self.made: dict[str, list[_Call]] = {}
        self.like: dict[str, str] = {}

    def begin(self, _model: nn.Module, _args: Any) -> None:
        """Forget the calls of an earlier attempt to capture the model."""
        self.made.clear()

    def all_made(self) -> bool:
        """True if what is left out was called as often as what stands for it."""
        counts = {path: len(calls) for path, calls in self.made.items()}
        return all(counts.get(path, 0) == counts.get(like, 0) for path, like in self.like.items())

    def enter(self, path: str, args: Any, kwargs: Any) -> _Call:
        call = _Call(*pytree.tree_flatten((args, kwargs)))
        self.made.setdefault(path, []).append(call)
        return call


@dataclass(frozen=True, slots=True)
class _Watch:
    """Notes the calls of a module that runs. By hooks: in a model with shared modules, export runs
    a module's forward on a stand-in of it, which knows its path.
    """

    path: str
    calls: Calls

    # bound methods, as functions would be taken for the user's own (`scopes.py`)
    def enter(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        call = self.calls.enter(self.path, args, kwargs)
        call.proxies = proxies_of(call.given)

    def leave(self, _module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        call = self.calls.made[self.path][-1]
        # an op inside that returns its operand, as `.to()` may, is not what made that
        put_proxies(call.given, call.proxies)
        call.results, call.out_spec = pytree.tree_flatten(output)
        return call.handed_on(self.path, call.given, skipped=False)


class _Skipped(nn.Module):
    """Stands where a module is that the capture leaves out, and has its attributes to read."""

    def __init__(self, real: nn.Module, path: str, calls: Calls) -> None:
        super().__init__()
        # past nn.Module's own setter, which would register the module
        self.__dict__.update(_real=real, _path=path, _calls=calls)
        self.training = real.training

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_real"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = self._calls.enter(self._path, args, kwargs)
        like = self._calls.like[self._path]
        made = self._calls.made.get(like, [])
        turn = len(self._calls.made[self._path]) - 1
        if turn >= len(made) or made[turn].out_spec is None or not _alike(call, made[turn]):
            raise Unlike(f"{self._path} is not called as {like} is")
        return made[turn].handed_on(self._path, call.given, skipped=True)


def _alike(call: _Call, other: _Call) -> bool:
    """True for the same arguments but for what is in their tensors, modules and other objects."""
    return call.spec == other.spec and all(
        _described(mine) == _described(its)
        for mine, its in zip(call.inputs, other.inputs, strict=True)
    )


def _described(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return (tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
    if type(leaf) is float:  # rates and scales, which no placement depends on
        return (float, leaf == 0.0)
    has_state = isinstance(leaf, nn.Module) or is_plain_object(leaf)
    return type(leaf) if has_state and not isinstance(leaf, Enum) else leaf


@contextmanager
def skipping(model: nn.Module, repeats: Sequence[Repeat]) -> Iterator[Calls]:
    """Inside, modules of the blocks that others stand for are not called, though they seem to be.

    Args:
        model: any; afterwards it is as it was.
        repeats: blocks that look alike.
    """
    calls = Calls()
    owners = Counter(id(part) for _, part in model.named_modules(remove_duplicate=False))
    with ExitStack() as undo:
        undo.callback(model.register_forward_pre_hook(calls.begin).remove)
        for repeat in repeats:
            behind = range(repeat.first + repeat.period, repeat.instances().stop)
            for index in range(repeat.first - 2 * repeat.period, behind.stop + repeat.period):
                like = repeat.first + (index - repeat.first) % repeat.period
                for path, module in _called(model.get_submodule(repeat.container), str(index)):
                    name = f"{repeat.container}.{index}{path}"
                    if owners[id(module)] > 1:
                        continue  # several blocks call it
                    if index in behind:
                        calls.like[name] = f"{repeat.container}.{like}{path}"
                        _replace(model, name, _Skipped(module, name, calls), undo)
                    else:
                        _watch(module, name, calls, undo)
        yield calls


def _called(owner: nn.Module, name: str, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """What of a block is called: itself or, of a list, what is in it; by path in the block."""
    module = owner._modules.get(name)
    if module is None:
        return
    if type(module).forward is not nn.Module.forward:
        yield path, module
        return
    for inner in module._modules:
        yield from _called(module, inner, f"{path}.{inner}")


def _replace(model: nn.Module, path: str, module: nn.Module, undo: ExitStack) -> None:
    parent, _, name = path.rpartition(".")
    modules = model.get_submodule(parent)._modules
    undo.callback(modules.__setitem__, name, modules[name])
    modules[name] = module


def _watch(module: nn.Module, path: str, calls: Calls, undo: ExitStack) -> None:
    watch = _Watch(path, calls)
    for hook in (
        module.register_forward_pre_hook(watch.enter, with_kwargs=True, prepend=True),
        module.register_forward_hook(watch.leave, with_kwargs=True),
    ):
        undo.callback(hook.remove)
