"""Passes over an emitted program, in the order in which they run.

==========  ==================================================================  ==============
pass        what it does                                                        file
==========  ==================================================================  ==============
decompose   a matmul and the collective next to it are cut into pieces          `decompose.py`
bucket      small collectives of one group, kind and dtype become one           `bucket.py`
prefetch    parameters of a block are gathered, and its activations in host     `overlap.py`
            memory are fetched, while the block before it runs
early       other collectives are issued as soon as their operand is there      `overlap.py`
late        waits are moved in front of the first reader, and waits for what    `overlap.py`
            only the caller reads behind the backward
in_place    an all-reduce works in the memory of its operand                    `in_place.py`
==========  ==================================================================  ==============

One more runs in front of these where it is asked for by name: `symmetric_memory` puts one call in
place of a collective and the matmuls next to it (`symmetric.py`).

Each pass works on the joint graph, alone or together with others. It preserves the values that the
graph computes, and raises its peak memory by no more than it is allowed to. `in_place` runs after
everything else that is done to a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence

from torch import fx

from autopar.codegen.passes.bucket import bucket
from autopar.codegen.passes.decompose import decompose
from autopar.codegen.passes.in_place import mark_in_place, reduce_in_place
from autopar.codegen.passes.lifetimes import LITTLE, Lifetimes
from autopar.codegen.passes.order import reorder
from autopar.codegen.passes.overlap import (
    fetch_ahead,
    fetched_bytes,
    follow_later,
    issue_early,
    prefetch,
    tell_last,
    wait_late,
)
from autopar.codegen.passes.sites import Key
from autopar.codegen.passes.symmetric import symmetric_memory
from autopar.errors import AutoparError

__all__ = ["OPTIONAL_PASSES", "PASSES", "check_passes", "phase_of", "run_last_passes", "run_passes"]

PASSES = ("decompose", "bucket", "prefetch", "early", "late", "in_place")
"""The passes that run by default, in order."""

OPTIONAL_PASSES = ("symmetric_memory",)
"""Passes that run only where their names are given, in front of the others."""

# scratch inside ops is not counted as live, so a moment may hold more than it seems to
_SCRATCH = 0.1


def phase_of(node: fx.Node) -> Hashable:
    """The phase of a node."""
    return node.meta.get("phase")


def check_passes(names: Collection[str] | None) -> tuple[str, ...]:
    """The passes of these names in their order; `PASSES` for None.

    Raises:
        AutoparError: there is no such pass.
    """
    if names is None:
        return PASSES
    unknown = [repr(n) for n in names if n not in PASSES and n not in OPTIONAL_PASSES]
    if isinstance(names, str) or unknown:
        given = repr(names) if isinstance(names, str) else ", ".join(unknown)
        known = ", ".join((*PASSES, *OPTIONAL_PASSES))
        raise AutoparError(f"passes={given}: give a list of names out of {known}")
    return tuple(name for name in (*OPTIONAL_PASSES, *PASSES) if name in names)


def run_passes(
    graph: fx.Graph,
    names: Collection[str] | None,
    *,
    sizes: Mapping[tuple[int, str], int],
    block_of: Callable[[str], Hashable],
    links: Sequence[str],
    spare: int = 0,
    resident: Mapping[str, int] | None = None,
    pieces: Mapping[Key, int] | None = None,
    calls: Collection[Key] = (),
) -> fx.Graph:
    """Run passes over a joint graph, all but those of `run_last_passes`.

    Args:
        graph: with fake values; it may be changed.
        names: out of `PASSES` and `OPTIONAL_PASSES`; None for `PASSES`.
        sizes: bytes that close a bucket, by axis and kind.
        block_of: block of a node of the traced graph, by name; None outside of blocks.
        links: that collectives of each mesh axis use.
        spare: bytes by which the peak may grow.
        resident: bytes that live beside the graph's own, by phase.
        pieces: of collectives that are cut, by origin, axis and kind.
        calls: of collectives that become one call with their products, where that pass runs.

    Returns:
        The graph that the passes made of it.
    """
    chosen = check_passes(names)
    in_place = "in_place" in chosen
    if in_place:
        mark_in_place(graph, phase_of)
    given, lifetimes = graph, Lifetimes(graph, resident)
    budget = lifetimes.peak_bytes + spare

    def block(node: fx.Node) -> Hashable:
        return block_of(str(node.meta.get("origin", "")))

    if "symmetric_memory" in chosen and calls:
        graph = symmetric_memory(graph, calls, budget, resident)
    if "decompose" in chosen and pieces:
        graph = decompose(graph, pieces, budget, resident)
    if "bucket" in chosen:
        known = lifetimes if graph is given else None
        graph = bucket(graph, sizes, block, budget, resident, known)
        if in_place:
            mark_in_place(graph, phase_of)
    moves: dict[str, Callable[[Lifetimes], None]] = {
        "prefetch": lambda now: _prefetch(graph, now, block, budget, room, resident, links),
        "early": lambda now: _early(graph, now, budget, resident),
        "late": lambda now: wait_late(graph, now, budget),
    }
    joined = Lifetimes(graph, resident)
    if joined.peak_bytes <= budget * (1 + LITTLE):  # as buckets may, which no move makes less
        budget = max(budget, joined.peak_bytes)
    room = budget + fetched_bytes(joined, block)
    now: Lifetimes | None = joined
    for name, move in moves.items():
        if name in chosen:
            most = room if name == "prefetch" else budget
            now = _moved_within(graph, move, now or Lifetimes(graph, resident), most, resident)
            budget = budget if now is None else max(budget, now.peak_bytes)
    if "late" in chosen and resident is None:  # parts in microbatches end with their own waits
        tell_last(graph, budget)
    return graph


def _moved_within(
    graph: fx.Graph,
    move: Callable[[Lifetimes], None],
    now: Lifetimes,
    budget: int,
    resident: Mapping[str, int] | None,
) -> Lifetimes | None:
    """Let a pass move nodes, and put them back where more than `budget` is live then.

    Args:
        graph, budget, resident: as for `run_passes`.
        move: notes in what it is given what it does.
        now: what is live.

    Returns:
        What is live then, where that is known.
    """
    before = {node: float(i) for i, node in enumerate(graph.nodes)}
    move(now)
    if list(graph.nodes) == list(before):
        return None
    # a pass does not see all that another one, or a sum over microbatches, holds longer
    after = Lifetimes(graph, resident)
    if after.peak_bytes <= budget:
        return after
    reorder(graph, before)
    return None


def _prefetch(
    graph: fx.Graph,
    now: Lifetimes,
    block_of: Callable[[fx.Node], Hashable],
    budget: int,
    room: int,
    resident: Mapping[str, int] | None,
    links: Sequence[str],
) -> None:
    prefetch(graph, now, block_of, int((1 - _SCRATCH) * budget), links)
    fetch_ahead(graph, block_of, room, resident)


def _early(
    graph: fx.Graph, now: Lifetimes, budget: int, resident: Mapping[str, int] | None
) -> None:
    issue_early(graph, now, budget)
    follow_later(graph, budget, resident)


def run_last_passes(
    graph: fx.Graph,
    names: Collection[str] | None,
    part_of: Callable[[fx.Node], Hashable] = phase_of,
) -> None:
    """Run, in place, the passes behind which nothing may move a node.

    Args:
        graph: joint graph behind all other passes, fusion and passes of other packages.
        names: out of `PASSES`; None for all.
        part_of: what runs in one go; default: the phases.
    """
    if "in_place" in check_passes(names):
        reduce_in_place(graph, part_of)
