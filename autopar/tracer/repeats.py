"""Which blocks of a model look alike: children of a list that are equal in modules and settings.

Where the children of a list all differ, as the stages of a vision model do, or are too few to fold,
the lists inside of them are looked at instead.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from autopar.core.graph import Repeat

__all__ = [
    "LONGEST_PERIOD",
    "SCALARS",
    "find_repeats",
    "is_nested",
    "longest_run",
    "repeat_within",
    "run_around",
]

_KEPT = 4  # blocks of a run of equal ones: the first two, one that stands for others, and the last
LONGEST_PERIOD = 8
SCALARS = (int, float, bool, str, type(None), torch.dtype)


def find_repeats(model: nn.Module) -> tuple[Repeat, ...]:
    """Runs of equal blocks that are worth folding, at most one per list."""
    found: list[Repeat] = []
    unlike: set[str] = set()  # numbered modules that may hold lists of blocks
    for path, module in model.named_modules():
        if any(number not in unlike for number in _numbered(path)):
            continue
        names = list(module._modules)
        blocks = [b for b in module._modules.values() if b is not None]
        if names != [str(i) for i in range(len(blocks))]:
            continue
        kinds = _kinds(blocks)
        if len(set(kinds)) == len(kinds) or len(kinds) <= _KEPT:
            unlike |= {f"{path}.{name}" for name in names}
        elif (repeat := longest_run(path, kinds)) is not None and _separate(model, blocks):
            found.append(repeat)
    return tuple(found)


def is_nested(container: str) -> bool:
    """True for a list inside of a numbered module."""
    return bool(_numbered(container))


def _numbered(path: str) -> list[str]:
    """The numbered modules that a module is in, or is."""
    parts = path.split(".")
    return [".".join(parts[: i + 1]) for i, part in enumerate(parts) if part.isdigit()]


def _separate(model: nn.Module, blocks: Sequence[nn.Module]) -> bool:
    """True where no parameter of a block is another's, or is used elsewhere in the model."""
    owned = [id(p) for block in blocks for p in block.parameters()]
    everywhere = [id(p) for _, p in model.named_parameters(remove_duplicate=False)]
    names = sum(1 for b in blocks for _ in b.named_parameters(remove_duplicate=False))
    inside = set(owned)
    return len(inside) == len(owned) and sum(p in inside for p in everywhere) == names


def _kinds(blocks: Sequence[nn.Module]) -> list[int]:
    """A number for each block, the same for blocks of the same structure and settings."""
    seen: list[dict[Any, Any]] = []
    kinds: list[int] = []
    indices: list[int] = []
    owners = Counter(id(part) for block in blocks for part in set(_parts(block).values()))
    for index, block in enumerate(blocks):
        described = _described(block)
        # what one block shares with some others, and not with all, tells it apart
        described |= {(n, "one"): id(p) for n, p in _parts(block).items() if owners[id(p)] > 1}
        alike = [k for k, d in enumerate(seen) if _alike(described, index, d, indices[k])]
        # a number that is the block's own by chance tells nothing where another is equal
        alike.sort(key=lambda k: described != seen[k])
        kinds.append(alike[0] if alike else len(seen))
        if not alike:
            seen.append(described)
            indices.append(index)
    return kinds


def _described(block: nn.Module) -> dict[Any, Any]:
    out: dict[Any, Any] = {}
    for path, module in block.named_modules():
        out[path] = type(module)
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        # those of each block may be closures of one function
        out[path, "hooks"] = tuple(getattr(hook, "__code__", type(hook)) for hook in hooks)
        for name, value in vars(module).items():
            simple = isinstance(value, SCALARS) or (
                isinstance(value, (list, tuple)) and all(isinstance(v, SCALARS) for v in value)
            )
            if simple and not name.startswith("_"):
                # rates and scales may differ from block to block, where all have one
                out[path, name] = (float, value == 0.0) if type(value) is float else value
    for name, parameter in block.named_parameters():
        out["parameter", name] = (parameter.shape, parameter.dtype, parameter.requires_grad)
    for name, buffer in block.named_buffers():
        out["buffer", name] = (buffer.shape, buffer.dtype)
    return out


def _parts(block: nn.Module) -> dict[str, Any]:
    """The modules in a block, but itself, and its buffers."""
    modules = dict(block.named_modules(remove_duplicate=False))
    del modules[""]
    return {**modules, **dict(block.named_buffers(remove_duplicate=False))}


def _alike(one: dict[Any, Any], i: int, other: dict[Any, Any], j: int) -> bool:
    """Equal settings; an attribute that holds the block's own number may differ.

    So may one that counts on with the blocks, as from 1, and a text that the number stands in.
    """
    if one.keys() != other.keys():
        return False
    return all(
        a == other[key] or _numbers(a, i) == _numbers(other[key], j) for key, a in one.items()
    )


def _numbers(value: Any, index: int) -> Any:
    """A setting without the number of the block in it."""
    if type(value) is int and value >= index:
        return ("number", value - index)
    if isinstance(value, str):
        return re.sub(rf"(?<!\d){index}(?!\d)", "#", value)
    return value


def longest_run(path: str, kinds: Sequence[int]) -> Repeat | None:
    """The run of periods that leaves out most blocks, if one leaves out any.

    Args:
        path: the list.
        kinds: of its blocks, in order.
    """
    best: Repeat | None = None
    for period in range(1, LONGEST_PERIOD + 1):
        start = 0
        while start < len(kinds):
            end = start + period
            while end < len(kinds) and kinds[end] == kinds[end - period]:
                end += 1
            run = repeat_within(path, range(start, end), period)
            if run is not None and (best is None or run.skipped > best.skipped):
                best = run
            start = max(end - period + 1, start + 1)
    return best


def run_around(repeat: Repeat, kinds: Sequence[int]) -> range:
    """The blocks of the run that a repeat is found in, given the kinds of all."""
    start, end, period = repeat.first, repeat.first + repeat.period, repeat.period
    while start > 0 and kinds[start - 1] == kinds[start - 1 + period]:
        start -= 1
    while end < len(kinds) and kinds[end] == kinds[end - period]:
        end += 1
    return range(start, end)


def repeat_within(path: str, run: range, period: int) -> Repeat | None:
    """What may be left out of a run of equal periods; None where that is nothing.

    The graph holds the first block, which reads something else than the others do, the period
    behind it, the one that stands for others, and the last block. Where periods fill the run, they
    begin with it, as pipelines are cut between them.
    """
    ends = period if len(run) % period == 0 else 1
    times = (len(run) - 2 * ends) // period - 1
    if times < 2:
        return None
    return Repeat(container=path, first=run.start + ends + period, period=period, times=times)
