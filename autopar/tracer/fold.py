"""Folding: of many equal blocks a graph holds four periods, and one of them stands for the rest.

The blocks after the third period, up to the last, are skipped while the model is captured: each
returns the output of the block before it. What is captured this way is checked: equal blocks must
have equal nodes, only their neighbours may see inside them, and every skipped block must have been
called like the one that stands for it. A model that fails a check is traced whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from autopar.core.blocks import Block, Blocks
from autopar.core.graph import Repeat, TracedModel
from autopar.errors import TraceError
from autopar.tracer.repeats import SCALARS, is_nested

__all__ = ["folded", "in_chain"]


def folded(
    model: nn.Module, repeats: Sequence[Repeat], capture: Callable[..., TracedModel]
) -> TracedModel | None:
    """The folded graph, or None where the blocks turn out not to be alike.

    Args:
        model: whose blocks are left out meanwhile.
        repeats: those that are worth folding. Where those inside of numbered modules turn out to be
            no blocks, the others are folded without them.
        capture: traces the model; with `fold=True`, it may leave out what of it repeats.
    """
    outer = tuple(r for r in repeats if not is_nested(r.container))
    for some in dict.fromkeys((tuple(repeats), outer)):
        if not some:
            break
        with _shortened(model, some):
            try:
                traced = replace(capture(fold=False), repeats=some)
            except TraceError:
                continue  # tracing it whole tells whether the model is at fault
        if _is_sound(traced):
            return traced
    if not repeats:
        return None
    try:
        traced = capture(fold=True)
    except TraceError:
        return None
    return traced if _is_sound(traced) else None


def in_chain(traced: TracedModel, lists: Sequence[str]) -> tuple[str, ...]:
    """Those lists inside of numbered modules whose children read each other, as blocks do.

    Experts, heads of a pyramid and the like do not.
    """
    blocks = Blocks(replace(traced, nested=tuple(lists)))
    numbers: dict[str, list[int]] = {name: [] for name in lists}
    for block in blocks.members:
        if block.container in numbers:
            numbers[block.container].append(block.number)
    return tuple(
        name
        for name, found in numbers.items()
        if all(_reads(blocks, name, a, b) for a, b in itertools.pairwise(sorted(found)))
    )


def _reads(blocks: Blocks, container: str, before: int, number: int) -> bool:
    """True if a block works on what another one yields."""
    nodes = blocks.members[Block(container, number)]
    sources = (blocks.place.get(s.name) for node in nodes for s in node.all_input_nodes)
    return any(s is not None and s[0] == Block(container, before) for s in sources)


@dataclass(slots=True)
class _Call:
    """Leaves of one block's arguments and results."""

    inputs: list[Any]
    spec: Any
    output: Any = None

    def results(self) -> list[Any]:
        return pytree.tree_leaves(self.output)


@dataclass(slots=True)
class _Shortening:
    """What the blocks of folded containers were called with; raises where a call does not fit."""

    calls: dict[tuple[str, int], _Call] = field(default_factory=dict)
    latest: dict[str, _Call] = field(default_factory=dict)

    def enter(self, container: str, index: int, args: Any, kwargs: Any) -> _Call:
        """Note a call of a block that stands for others, or of one that it stands for."""
        inputs, spec = pytree.tree_flatten((args, kwargs))
        call = _Call(inputs, spec)
        if (container, index) in self.calls:
            raise TraceError(f"{container}.{index} is called twice")
        self.calls[container, index] = call
        return call

    def skip(self, repeat: Repeat, index: int, args: Any, kwargs: Any) -> Any:
        """Hand on what the block before returned, if the call is like that of the stand-in."""
        call = self.enter(repeat.container, index, args, kwargs)
        stand_in = repeat.first + (index - repeat.first) % repeat.period
        like = self.calls.get((repeat.container, stand_in))
        before = self.calls.get((repeat.container, stand_in - 1))
        latest = self.latest.get(repeat.container)
        if like is None or before is None or latest is None:
            raise TraceError(f"{repeat.container}.{index} runs before {stand_in}")
        if not _same_call(call, like, latest.results(), before.results()):
            raise TraceError(f"{repeat.container}.{index} is not called as {stand_in} is")
        return latest.output


def _same_call(call: _Call, like: _Call, handed: list[Any], handed_to_like: list[Any]) -> bool:
    """Leaf by leaf: the same tensor, the same result of the block before, or an equal constant."""
    if call.spec != like.spec:
        return False

    def source(leaf: Any, results: list[Any]) -> int:
        return next((k for k, r in enumerate(results) if r is leaf), -1)

    for mine, other in zip(call.inputs, like.inputs, strict=True):
        if not isinstance(mine, torch.Tensor):
            if isinstance(mine, SCALARS) and mine != other:
                return False
            continue
        came_from = source(other, handed_to_like)
        if mine is not other and (came_from < 0 or source(mine, handed) != came_from):
            return False
    return True


class _Skipped(nn.Module):
    """Stands where a block is that the capture leaves out; answers for its attributes."""

    def __init__(self, real: nn.Module, repeat: Repeat, index: int, notes: _Shortening) -> None:
        super().__init__()
        # past nn.Module's own setter, which would register the block
        self.__dict__.update(_real=real, _repeat=repeat, _index=index, _notes=notes)
        self.training = real.training

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_real"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._notes.skip(self._repeat, self._index, args, kwargs)


@contextmanager
def _shortened(model: nn.Module, repeats: Sequence[Repeat]) -> Iterator[None]:
    """Inside, the blocks that the repeats leave out hand on their input."""
    notes = _Shortening()
    undo: list[tuple[nn.Module, str, nn.Module]] = []
    hooks: list[RemovableHandle] = []
    try:
        for repeat in repeats:
            container = model.get_submodule(repeat.container)
            behind = repeat.first + repeat.period
            for index in range(repeat.first - repeat.period, behind):
                block = container.get_submodule(str(index))
                hooks += _watch(block, repeat.container, index, notes)
            for index in range(behind, behind + repeat.skipped):
                block = container.get_submodule(str(index))
                undo.append((container, str(index), block))
                container._modules[str(index)] = _Skipped(block, repeat, index, notes)
        yield
    finally:
        for container, name, block in undo:
            container._modules[name] = block
        for hook in hooks:
            hook.remove()


def _watch(
    block: nn.Module, container: str, index: int, notes: _Shortening
) -> tuple[RemovableHandle, ...]:
    """Note a block's calls, by hooks: in a model with shared modules, export runs its forward on a
    stand-in of the block, which knows its path.
    """

    # bound methods, as functions would be taken for the user's own (`scopes.py`)
    watch = _Watch(container, index, notes)
    return (
        block.register_forward_pre_hook(watch.enter, with_kwargs=True),
        block.register_forward_hook(watch.leave, with_kwargs=True),
    )


@dataclass(frozen=True, slots=True)
class _Watch:
    """Notes the calls of one block."""

    container: str
    index: int
    notes: _Shortening

    def enter(self, _block: nn.Module, args: Any, kwargs: Any) -> None:
        self.notes.enter(self.container, self.index, args, kwargs)

    def leave(self, _block: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call = self.notes.calls[self.container, self.index]
        call.output = output
        self.notes.latest[self.container] = call


def _is_sound(traced: TracedModel) -> bool:
    """True if the folded blocks have equal nodes and only their neighbours see inside them."""
    blocks = Blocks(traced)
    for repeat in traced.repeats:
        for index in range(repeat.first, repeat.first + repeat.period):
            if not _equal_nodes(blocks, repeat, index):
                return False
    results = {spec.node for spec in traced.outputs if spec.kind == "output"}
    for node in traced.graph.nodes:
        if node.name not in blocks.place:
            continue
        block = blocks.place[node.name][0]
        if block.container not in blocks.repeats:
            continue
        inside = _unit(blocks, block) in (-1, 0)
        if inside and node.name in results:
            return False
        for user in node.users:
            if user.op == "output":
                continue
            if not _may_see(blocks, block, inside, user.name):
                return False
    return True


def _equal_nodes(blocks: Blocks, repeat: Repeat, index: int) -> bool:
    mine = blocks.members.get(Block(repeat.container, index), [])
    before = blocks.members.get(Block(repeat.container, index - repeat.period), [])
    return len(mine) == len(before) > 0 and all(
        blocks.classes[a.name] == blocks.classes[b.name] for a, b in zip(mine, before, strict=True)
    )


def _unit(blocks: Blocks, block: Block) -> int:
    (repeat,) = blocks.repeats[block.container]
    return repeat.unit(block.number)


def _may_see(blocks: Blocks, block: Block, inside: bool, user: str) -> bool:
    if user not in blocks.place:
        return not inside
    other = blocks.place[user][0]
    if other.container != block.container:
        return not inside
    ours, theirs = _unit(blocks, block), _unit(blocks, other)
    if inside or (theirs in (-1, 0) and ours > 0):
        return abs(ours - theirs) <= 1
    return True
