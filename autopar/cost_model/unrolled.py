"""A folded program in the order in which the whole one runs, block by block.

In a folded program one block stands for k, and its nodes count k times. What is in flight when the
second of these blocks begins is not what was in flight when the first one did: where a block sends
more than it computes, the queue of collectives grows with each. So the block is run k times. Where
its ops take P seconds, what begins u seconds behind its first op begins at::

    i·P + u,    i = 0 … k - 1

also where it stands among the ops of a neighbour: gathers that are prefetched, with u < 0, and
reductions that are sent late, with u ≥ P. This is a modulo schedule, as loops are pipelined by (Rau
1994, doi:10.1145/192724.192731).
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from torch import fx

from autopar.core.block_counts import block_counts

__all__ = ["Turn", "blocks_of", "unrolled"]

_BETWEEN = 0.1  # of a block: what else may be computed in the midst of it
_AT_ONCE_S = 1e-10  # what is due within is due at once: sums over blocks differ by rounding


class Turn(NamedTuple):
    """Nodes that run one behind the other, for the block of this number, out of `times` equal."""

    nodes: tuple[fx.Node, ...]
    number: int = 0
    times: int = 1


@dataclass(slots=True)
class _Run:
    """Ops of a block that stands for others, within one phase.

    Attributes:
        begin, first, last: positions behind the op in front of it, of its first and its last op.
        times: how many blocks there are.
        seconds: of its ops.
        begin_s: of ops in front of it, blocks before included.
        before: how many blocks of earlier runs are behind their first ones.
    """

    begin: int
    first: int
    last: int
    times: int
    phase: object
    seconds: float = 0.0
    begin_s: float = 0.0
    before: int = 0

    def distance(self, position: int) -> int:
        return max(self.first - position, position - self.last, 0)


class _Event(NamedTuple):
    """Nodes and when they are due.

    Of what is due at once, an op of the model comes last, and what has more nodes between itself
    and the next such op comes first, as these stand around the same op of another block.
    """

    due: int
    computes: bool
    place: int
    block: int
    position: int
    turn: Turn


def unrolled(
    nodes: Sequence[fx.Node], seconds: Mapping[fx.Node, float], times: Mapping[fx.Node, int]
) -> list[Turn]:
    """Every execution of every node, in order.

    Ops of one block that nothing stands between are one turn, but those of the first of the blocks.

    Args:
        nodes: calls of a program in order.
        seconds: of those that compute.
        times: as of `blocks_of`.
    """
    runs = _runs(nodes, seconds, times)
    if not runs:
        return [Turn((node,)) for node in nodes]
    events = _Unrolling(nodes, seconds, times, runs).events()
    return [event.turn for event in sorted(events, key=itemgetter(slice(5)))]


def blocks_of(nodes: Iterable[fx.Node], seconds: Mapping[fx.Node, float]) -> dict[fx.Node, int]:
    """`block_counts` of calls of a program, with the seconds of those that compute."""
    calls = list(nodes)
    return block_counts(calls, {node for node in calls if _computes(node, seconds)})


def _computes(node: fx.Node, seconds: Mapping[fx.Node, float]) -> bool:
    """True for an op of the model; what packs belongs to a collective."""
    return seconds.get(node, 0.0) > 0 and "packs" not in node.meta


def _runs(
    nodes: Sequence[fx.Node], seconds: Mapping[fx.Node, float], times: Mapping[fx.Node, int]
) -> list[_Run]:
    """Ops that count for several blocks, a run for each block and phase."""
    found: list[_Run] = []
    own_s = other_s = 0.0
    begin = 0
    for position, node in enumerate(nodes):
        if not _computes(node, seconds):
            continue
        count, phase = times[node], node.meta.get("phase")
        if count == 1:
            other_s += seconds[node]
            begin = position + 1
            continue
        run = found[-1] if found else None
        if run is None or (run.times, run.phase) != (count, phase) or other_s > _BETWEEN * own_s:
            found.append(_Run(begin, position, position, count, phase))
            own_s = 0.0
        found[-1].last = position
        begin = position + 1
        own_s += seconds[node]
        other_s = 0.0
    return found


class _Unrolling:
    """The executions of a program's nodes, each with when it is due."""

    def __init__(
        self,
        nodes: Sequence[fx.Node],
        seconds: Mapping[fx.Node, float],
        times: Mapping[fx.Node, int],
        runs: Sequence[_Run],
    ) -> None:
        self.nodes, self.seconds, self.times, self.runs = nodes, seconds, times, runs
        self.place = {node: position for position, node in enumerate(nodes)}
        ops = [p for p, node in enumerate(nodes) if _computes(node, seconds)]
        following = (bisect_left(ops, position) for position in range(len(nodes)))
        self.ends = [ops[i] if i < len(ops) else len(nodes) for i in following]
        each = (seconds[node] if _computes(node, seconds) else 0.0 for node in nodes)
        self.ahead = list(itertools.accumulate(each, initial=0.0))
        shift_s, before = 0.0, 0
        for run in runs:
            run.seconds = self.ahead[run.last + 1] - self.ahead[run.first]
            run.begin_s, run.before = self.ahead[run.first] + shift_s, before
            shift_s += (run.times - 1) * run.seconds
            before += run.times - 1

    def events(self) -> Iterator[_Event]:
        """All executions, in no order."""
        repeated: dict[int, list[int]] = defaultdict(list)
        for position, node in enumerate(self.nodes):
            near = [i for i, run in enumerate(self.runs) if run.times == self.times[node]]
            same = [i for i in near if self.runs[i].phase == node.meta.get("phase")] or near
            if same:
                repeated[min(same, key=lambda i: self.runs[i].distance(position))].append(position)
        once = set(range(len(self.nodes))).difference(*repeated.values())
        last = self._of_the_last(once)
        for position in once:
            yield self._single(position, position in last)
        for index, positions in repeated.items():
            yield from self._every(positions, self.runs[index])

    def _of_the_last(self, once: Collection[int]) -> set[int]:
        """Of nodes that run once, among those of a block, the ones that belong to the last block.

        Such work on what this block makes, or for later ones on nothing that was computed.
        """
        found: set[int] = set()
        for run in self.runs:
            for position in filter(once.__contains__, range(run.begin, run.last + 1)):
                node = self.nodes[position]
                sources = [self.place[n] for n in node.all_input_nodes if n in self.place]
                inside = any(self.place.get(user, -1) not in once for user in node.users)
                own = any(s not in once for s in sources)
                if own or (not inside and all(s in found for s in sources)):
                    found.add(position)
        return found

    def _event(self, due_s: float, block: int, position: int, turn: Turn) -> _Event:
        end = self.ends[position]
        due = round(due_s / _AT_ONCE_S)
        return _Event(due, end == position, position - end, block, position, turn)

    def _single(self, position: int, last: bool) -> _Event:
        """The one execution of a node that counts once."""
        turn = Turn((self.nodes[position],))
        behind = bisect_right([run.begin for run in self.runs], position) - 1
        if behind < 0:
            return self._event(self.ahead[position], 0, position, turn)
        run = self.runs[behind]
        more = run.times - 1 if last or position > run.last else 0
        due_s = run.begin_s + more * run.seconds + self.ahead[position] - self.ahead[run.first]
        return self._event(due_s, run.before + more, position, turn)

    def _every(self, positions: Sequence[int], run: _Run) -> Iterator[_Event]:
        """The executions of nodes that count for the blocks of a run."""
        offsets = {p: self.ahead[p] - self.ahead[run.first] for p in positions}
        for group in self._groups(positions, offsets, run):
            for position in group:
                due_s = run.begin_s + offsets[position]
                turn = Turn((self.nodes[position],), 0, run.times)
                yield self._event(due_s, run.before, position, turn)
            members = tuple(self.nodes[p] for p in group)
            first = run.begin_s + offsets[group[0]]
            for number in range(1, run.times):
                due_s, block = first + number * run.seconds, run.before + number
                yield self._event(due_s, block, group[0], Turn(members, number, run.times))

    def _groups(
        self, positions: Sequence[int], offsets: Mapping[int, float], run: _Run
    ) -> list[list[int]]:
        """Ops of a run that nothing stands between, together; everything else alone."""
        inside = [p for p in positions if run.first <= p <= run.last]
        outside = [p for p in positions if not run.first <= p <= run.last]
        cuts = sorted(round((offsets[p] % run.seconds) / _AT_ONCE_S) for p in outside)
        parts = {p: bisect_right(cuts, round(offsets[p] / _AT_ONCE_S)) for p in inside}
        groups = [[p] for p in outside]
        for before, position in itertools.pairwise([-2, *inside]):
            follows = position == before + 1 and parts[position] == parts[before]
            plain = all(p >= 0 and self.nodes[p] in self.seconds for p in (before, position))
            if follows and plain:
                groups[-1].append(position)
            else:
                groups.append([position])
        return groups
