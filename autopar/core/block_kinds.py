"""Which blocks are recomputed, and how: one kind for all of them, or one for each run of blocks.

A plan holds `"full"`, or `{"model.layers.0-10": "full", "model.layers.11-31": "none"}`, which names
every block. Runs of one kind that follow each other are placed apart: the second begins a section.
A pin may name some of them, by FQN, by such a run or by a glob; the first key that matches a block
counts, and blocks that no key matches are free. What each kind computes again is said in
`recompute.py`; "host" is "full" with what a block keeps for it in host memory.
"""

from __future__ import annotations

import difflib
import fnmatch
import itertools
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from autopar.core.blocks import Block, names_of, number_in, section_of
from autopar.errors import ConstraintError

__all__ = [
    "RECOMPUTATIONS",
    "Checkpoint",
    "Recomputation",
    "as_checkpoint",
    "checkpoint_text",
    "kinds_of",
    "labels_of",
    "moved_checkpoint",
    "parse_checkpoint",
    "pinned_kinds",
    "pins_among",
    "read_checkpoint",
    "sections_of",
]

Recomputation = Literal["none", "selective", "full", "host"]
RECOMPUTATIONS: tuple[Recomputation, ...] = ("none", "selective", "full", "host")
"""Each saves more memory on the device than the one before, and takes more time."""
Checkpoint: TypeAlias = str | Mapping[str, str]

_RUN = re.compile(r"^(.+)\.(\d+)(?:-(\d+))?$")


def _run(key: str) -> tuple[str, int, int] | None:
    """Container, first and last block of `container.first-last` or `container.number`."""
    match = _RUN.match(key)
    if match is None:
        return None
    first = int(match.group(2))
    return match.group(1), first, int(match.group(3) or first)


def _name(container: str, first: int, last: int) -> str:
    return f"{container}.{first}" if first == last else f"{container}.{first}-{last}"


def kinds_of(checkpoint: Checkpoint, blocks: Iterable[Block]) -> dict[Block, str]:
    """The kind of each block, as a plan says it; "none" where it names a block nowhere."""
    if isinstance(checkpoint, str):
        return dict.fromkeys(blocks, checkpoint)
    runs = [(run, kind) for key, kind in checkpoint.items() if (run := _run(key)) is not None]
    return {
        block: next(
            (
                kind
                for (container, first, last), kind in runs
                if container == block.container and first <= block.number <= last
            ),
            "none",
        )
        for block in blocks
    }


def as_checkpoint(
    kinds: Mapping[Block, str],
    sections: Mapping[Block, Hashable] | None = None,
    by_run: bool = False,
) -> Checkpoint:
    """How a plan says the kinds of all blocks, given in order.

    Args:
        kinds: of the blocks.
        sections: what blocks that are placed alike have in common; default: all are.
        by_run: name each run of blocks, though all may be of one kind and in one section.
    """
    runs: list[tuple[str, int, int, str]] = []
    apart = False
    last: Block | None = None
    for block, kind in kinds.items():
        follows = last is not None and last == Block(block.container, block.number - 1)
        if last is not None and follows and runs[-1][3] == kind:
            if sections is None or sections[last] == sections[block]:
                runs[-1] = (*runs[-1][:2], block.number, kind)
                last = block
                continue
            apart = True
        runs.append((block.container, block.number, block.number, kind))
        last = block
    if len(set(kinds.values())) <= 1 and not apart and not by_run:
        return next(iter(kinds.values()), "none")
    return {_name(container, first, end): kind for container, first, end, kind in runs}


def sections_of(checkpoint: Checkpoint) -> tuple[Block, ...]:
    """The blocks that sections begin with, but for the first one of each container."""
    if isinstance(checkpoint, str):
        return ()
    runs = sorted((run, kind) for key, kind in checkpoint.items() if (run := _run(key)))
    return tuple(
        Block(container, first)
        for (before, known), ((container, first, _), kind) in itertools.pairwise(runs)
        if before[0] == container and before[2] + 1 == first and known == kind
    )


def labels_of(checkpoint: Checkpoint, blocks: Iterable[Block]) -> dict[Block, tuple[str, int]]:
    """The kind of each block, and how many sections of its container have begun before it."""
    starts = sections_of(checkpoint)
    return {
        block: (kind, section_of(block, starts))
        for block, kind in kinds_of(checkpoint, blocks).items()
    }


def moved_checkpoint(checkpoint: Checkpoint, container: str, by: int) -> Checkpoint:
    """Of blocks whose numbers are larger by so much."""
    if isinstance(checkpoint, str):
        return checkpoint
    moved = {}
    for key, kind in checkpoint.items():
        run = _run(key)
        if run is not None and run[0] == container:
            key = _name(container, run[1] + by, run[2] + by)
        moved[key] = kind
    return moved


def parse_checkpoint(value: Any) -> Checkpoint:
    """What a plan or a pin says, in plain JSON types.

    Raises:
        ConstraintError: a kind that there is not, or a key that is no text.
    """
    if isinstance(value, str) and value in RECOMPUTATIONS:
        return value
    known = ", ".join(RECOMPUTATIONS)
    if not isinstance(value, Mapping):
        raise ConstraintError(
            f"checkpoint={value!r}: known are {known}, or a mapping of blocks to these"
        )
    if not value:
        raise ConstraintError("checkpoint={}: it names no block; leave it out to let it be chosen")
    for key, kind in value.items():
        if not isinstance(key, str):
            raise ConstraintError(f"checkpoint of {key!r}: a block is named by its FQN or a glob")
        if kind not in RECOMPUTATIONS:
            raise ConstraintError(f"checkpoint of {key!r} is {kind!r}: known are {known}")
    return dict(value)


def pinned_kinds(pins: Mapping[str, str], blocks: Sequence[Block]) -> dict[Block, str]:
    """The kinds of those blocks that a pin names; the first key that matches one counts.

    Raises:
        ConstraintError: a key matches no block.
    """
    found: dict[Block, str] = {}
    for key, kind in pins.items():
        matched = _matched(key, blocks)
        if not matched:
            raise ConstraintError(_unknown(key, blocks))
        for block in matched:
            found.setdefault(block, kind)
    return found


def pins_among(pins: Mapping[str, str], blocks: Sequence[Block]) -> dict[str, str]:
    """The pins that speak of some of the blocks."""
    return {key: kind for key, kind in pins.items() if _matched(key, blocks)}


def _matched(key: str, blocks: Sequence[Block]) -> list[Block]:
    run = _run(key)

    def matches(name: str) -> bool:
        # a stage of a network is a run of the blocks in it
        number = number_in(name, run[0]) if run is not None else None
        inside = run is not None and number is not None and run[1] <= number <= run[2]
        return inside or fnmatch.fnmatchcase(name, key)

    return [block for block in blocks if any(map(matches, names_of(block)))]


def _unknown(key: str, blocks: Sequence[Block]) -> str:
    """What there is, where a key matches nothing."""
    numbers: dict[str, list[int]] = {}
    for block in blocks:
        numbers.setdefault(block.container, []).append(block.number)
    if not numbers:
        return f"checkpoint of {key!r}: the model has no numbered blocks"
    runs = ", ".join(_name(name, min(found), max(found)) for name, found in numbers.items())
    near = difflib.get_close_matches(key, numbers, n=1)
    hint = f". Did you mean '{near[0]}.*'?" if near else ""
    return f"checkpoint of {key!r}: there is no such block; the blocks are {runs}{hint}"


def read_checkpoint(value: Any) -> Checkpoint:
    """What a saved plan says.

    Raises:
        ValueError: a kind that there is not, or a key that names no run of blocks.
    """
    try:
        found = parse_checkpoint(value)
    except ConstraintError as error:
        raise ValueError(str(error)) from error
    for key in () if isinstance(found, str) else found:
        if _run(key) is None:
            raise ValueError(f"checkpoint of {key!r}: a plan names runs of blocks")
    return found


def checkpoint_text(checkpoint: Checkpoint) -> str:
    """`full`, or `full: model.layers.0-10; none: model.layers.11-31`."""
    if isinstance(checkpoint, str):
        return checkpoint
    by_kind: dict[str, list[str]] = {}
    for key, kind in checkpoint.items():
        by_kind.setdefault(kind, []).append(key)
    order: tuple[str, ...] = tuple(reversed(RECOMPUTATIONS))
    kinds = sorted(by_kind, key=order.index)
    return "; ".join(f"{kind}: {', '.join(by_kind[kind])}" for kind in kinds)
