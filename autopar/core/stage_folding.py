"""Stages of a folded graph: of equal stages one is made, and of its equal blocks four periods.

A folded graph holds four periods of a run of equal blocks, numbered here -2, -1, 0 and `times`,
where period 0 stands for all from 0 to `times - 1`; of the first and last of them it may hold a
part. An `Outline` says which stages of a pipeline are equal, and which periods are kept of the
others; `extended_fold.extended` writes the graph that holds these. Cut between its blocks, it gives
stages that are folded again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.core.blocks import Block, block_of
from autopar.core.cells import Cells
from autopar.core.graph import Repeat, TracedModel
from autopar.errors import ConstraintError

__all__ = ["Outline", "block_names", "outline", "period_of"]

_KEPT = 4  # periods of a stage that is folded


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """Which stages are made of a pipeline's.

    Attributes:
        kinds: of each stage, the index of the made stage that it equals.
        shifts: of each stage, by how much its block numbers exceed those of the made one.
        starts: FQN of the block that each made stage but the first begins with.
        repeats: of each made stage.
        periods: by container, the periods that are kept.
        idle: of blocks that no stage runs, as the loss does not need them.
    """

    kinds: tuple[int, ...]
    shifts: tuple[int, ...]
    starts: tuple[str, ...]
    repeats: tuple[tuple[Repeat, ...], ...]
    periods: Mapping[str, tuple[int, ...]]
    idle: tuple[Repeat, ...]


def block_names(traced: TracedModel, cells: Cells) -> list[tuple[str, str]]:
    """Every cell of the model in forward order, with the cell of the graph that it is like.

    Raises:
        ConstraintError: blocks that repeat together do not follow each other.
    """
    repeats = {r.container: r for r in traced.repeats}
    order = [block_of(name, traced.nested) for name in cells.names]
    found: list[tuple[str, str]] = []
    position = 0
    while position < len(order):
        block = order[position]
        repeat = repeats.get(block.container) if block is not None else None
        if block is None or repeat is None or not repeat.holds(block.number):
            found.append((cells.names[position],) * 2)
            position += 1
            continue
        period = order[position : position + repeat.period]
        if period != [Block(block.container, repeat.first + i) for i in range(repeat.period)]:
            raise ConstraintError(
                f"the blocks of {block.container} that repeat do not run one after the other: a "
                "pipeline is not offered"
            )
        found += [
            (
                f"{block.container}.{repeat.first + i + turn * repeat.period}",
                cells.names[position + i],
            )
            for turn in range(repeat.times)
            for i in range(repeat.period)
        ]
        position += repeat.period
    return found


def period_of(name: str, repeats: Mapping[str, Repeat]) -> tuple[str, int] | None:
    """The list of a folded block, and its period; None of all else.

    Args:
        name: FQN of a cell.
        repeats: of the folded graph, by list.
    """
    block = block_of(name, repeats)
    repeat = repeats.get(block.container) if block is not None else None
    if block is None or repeat is None:
        return None
    period = (block.number - repeat.first) // repeat.period
    return (block.container, period) if -2 <= period <= repeat.times else None


def outline(traced: TracedModel, cuts: Sequence[str]) -> Outline:
    """Which stages the cuts of a folded graph make.

    Args:
        traced: folded.
        cuts: FQN of the block that each stage but the first begins with, as in `stages.cut`.

    Raises:
        ConstraintError: a cut is no block, or lies inside a period of blocks that repeat together.
    """
    repeats = {r.container: r for r in traced.repeats}
    cells = Cells(traced)
    names = [name for name, _ in block_names(traced, cells)]
    whole = Counter(period_of(name, repeats) for name in names)
    found = [_Stage.of(blocks, repeats, whole) for blocks in _stages(names, cuts, cells)]
    made: list[_Stage] = []
    kinds: list[int] = []
    shifts: list[int] = []
    for stage in found:
        twin = next((i for i, s in enumerate(made) if s.equals(stage)), None)
        if twin is None:
            twin = len(made)
            made.append(stage)
        kinds.append(twin)
        shifts.append(stage.number - made[twin].number)
    periods: dict[str, set[int]] = {name: {-2, -1, 0, r.times} for name, r in repeats.items()}
    for stage in made:
        for name, kept in stage.kept().items():
            periods[name] |= kept
    return Outline(
        kinds=tuple(kinds),
        shifts=tuple(shifts),
        starts=tuple(s.first for s in made[1:]),
        repeats=tuple(s.repeats(repeats) for s in made),
        periods={name: tuple(sorted(kept)) for name, kept in periods.items()},
        idle=tuple(r for r in traced.repeats if not any(r.container in s.runs for s in made)),
    )


def _stages(names: list[str], cuts: Sequence[str], cells: Cells) -> list[list[str]]:
    begun = [cut if cut in names else cells.of_cut(cut) for cut in cuts]
    for cut, cell in zip(cuts, begun, strict=True):
        if cell not in names:
            raise cells.no_cut(cut, names)
    starts = [names.index(cell) for cell in begun]
    if starts != sorted(set(starts)) or (starts and starts[0] == 0):
        raise ConstraintError(
            f"pipeline cuts {list(cuts)} must be in forward order, behind the first block "
            f"{names[0]}"
        )
    ends = [*starts, len(names)]
    return [names[a:b] for a, b in zip([0, *starts], ends, strict=True)]


@dataclass(frozen=True, slots=True)
class _Stage:
    """Cells of a stage; `runs` are the periods of each folded container, `inner` as below.

    `number` is that of the first block; 0 if there is none.
    """

    first: str
    number: int
    runs: dict[str, tuple[int, int]]
    inner: bool  # it holds nothing but periods that the folded one stands for

    @classmethod
    def of(
        cls,
        names: list[str],
        repeats: Mapping[str, Repeat],
        whole: Mapping[tuple[str, int] | None, int],
    ) -> _Stage:
        """The stage of some cells.

        Args:
            names: of the cells.
            repeats: by list.
            whole: how many cells of the model each period has.
        """
        runs: dict[str, tuple[int, int]] = {}
        first = names[0] if names else ""  # all blocks may run before the microbatches
        begins = block_of(first, repeats)
        counts = Counter(period_of(name, repeats) for name in names)
        inner = all(p is not None and 0 <= p[1] < repeats[p[0]].times for p in counts)
        for found, count in counts.items():
            if found is None:
                continue
            name, period = found
            if count != whole[found]:
                start = max(0, repeats[name].first + period * repeats[name].period)
                raise ConstraintError(
                    f"{name}.{start} and the {whole[found] - 1} blocks behind it repeat "
                    "together: a pipeline cannot be cut between them"
                )
            low, high = runs.get(name, (period, period))
            runs[name] = min(low, period), max(high, period)
        number = begins.number if begins is not None else 0
        return cls(first, number, runs, inner and len(runs) == 1)

    def equals(self, other: _Stage) -> bool:
        if not (self.inner and other.inner and self.runs.keys() == other.runs.keys()):
            return False
        return all(b - a == d - c for (a, b), (c, d) in self._with(other))

    def _with(self, other: _Stage) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        return ((run, other.runs[name]) for name, run in self.runs.items())

    def kept(self) -> dict[str, set[int]]:
        """Periods of the stage that its graph holds, by container."""
        return {
            name: set(range(low, high + 1)) if high - low < _KEPT else {low, low + 1, low + 2, high}
            for name, (low, high) in self.runs.items()
        }

    def repeats(self, whole: Mapping[str, Repeat]) -> tuple[Repeat, ...]:
        """Of the stage's own graph."""
        found = []
        for name, (low, high) in self.runs.items():
            if high - low >= _KEPT:
                given = whole[name]
                first = given.first + (low + 2) * given.period
                times = high - low - 2
                found.append(Repeat(container=name, first=first, period=given.period, times=times))
        return tuple(found)
