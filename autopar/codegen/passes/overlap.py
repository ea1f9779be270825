"""Overlap: collectives begin as early as their inputs allow and end as late as their users allow.

Copies from host memory begin early, too; they are waited for where their value is read.

Each pass only moves nodes. What lives longer as a result must fit in `budget`, the peak of the
program before the passes plus what may be added to it (except for what `fetched_bytes` adds and the
few numbers of `tell_last`), so a pass never raises the peak beyond what is allowed:

    live(i) + bytes ≤ budget    for every position i that a buffer is kept over

A pass that is given `lifetimes`, those of its graph, notes there what it holds longer.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from types import MappingProxyType

from torch import fx

from autopar.codegen.passes.bucket import is_gather_of_storage, leaving, reduced_before
from autopar.codegen.passes.lifetimes import LITTLE, Lifetimes
from autopar.codegen.passes.link_gaps import LinkGaps
from autopar.codegen.passes.order import feeding, is_packing, link, phase_starts, reorder
from autopar.codegen.passes.sends import is_start, is_wait
from autopar.core.host import ARRIVED, FROM_HOST
from autopar.core.work import is_view

__all__ = [
    "begin_early",
    "fetch_ahead",
    "fetched_bytes",
    "follow_later",
    "issue_early",
    "prefetch",
    "tell_last",
    "wait_late",
]

Resident = Mapping[str, int] | None
_BEHIND = 2  # collectives, before one that works on what another has made
_BEFORE = 1e-4
"""Of a key: a chain of views stays within the place of its reader."""


def prefetch(
    graph: fx.Graph,
    lifetimes: Lifetimes,
    block_of: Callable[[fx.Node], Hashable],
    budget: int,
    links: Sequence[str],
) -> None:
    """Gather the parameters of a block while the block before it runs.

    Gathers are grouped by the block that reads them. Those of a group are issued behind the first
    of the group before, so that two groups are held at a time (Zhao et al. 2023, arXiv 2304.11277),
    and where the link has time for them (`link_gaps.py`). A gather of what is gathered again, over
    another axis, is issued a group earlier yet, so that the second has something to work on.
    """
    begins = phase_starts(lifetimes.nodes)
    ahead = _gathers_behind(lifetimes.nodes)
    keys: dict[fx.Node, float] = {}
    placed: dict[fx.Node, int] = {}
    groups: list[int] = []
    last = None
    gaps = LinkGaps(graph, links)
    for phase, group in _gather_groups(lifetimes.nodes, block_of):
        groups = groups if phase == last else []
        last = phase
        groups.append(min(lifetimes.position[node] for node in group))
        horizons = _horizons(group, ahead, groups, begins[phase], gaps)
        for start in group:
            chain, horizon = link(start), horizons[start]
            placed[start] = _move_chain(lifetimes, start, chain, horizon, budget, keys, placed)
    reorder(graph, keys)


def _horizons(
    group: Sequence[fx.Node],
    ahead: Mapping[fx.Node, int],
    groups: Sequence[int],
    begin: int,
    gaps: LinkGaps,
) -> dict[fx.Node, int]:
    """The first position at which each gather of a group may be issued.

    Args:
        group: gathers.
        ahead: as of `_gathers_behind`.
        groups: where the groups of the phase begin so far, that of `group` last.
        begin: of the phase.
        gaps: of the program.
    """
    found: dict[fx.Node, int] = {}
    for depth in sorted(set(map(ahead.__getitem__, group))):
        alike = [start for start in group if ahead[start] == depth]
        if depth + 2 > len(groups):
            found.update(dict.fromkeys(alike, begin))
        else:
            first, end = groups[-depth - 2], groups[-depth - 1]
            found.update(gaps.places(alike, first + 1, end))
    return found


def _gathers_behind(nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """How many gathers, one behind the other, work on what each gather of storage makes."""
    found: dict[fx.Node, int] = {}
    for node in reversed(nodes):
        if (is_start(node) and is_gather_of_storage(node)) or is_wait(node) or is_packing(node):
            found[node] = max((found[u] + is_start(u) for u in node.users if u in found), default=0)
    return found


def _gather_groups(
    nodes: list[fx.Node], block_of: Callable[[fx.Node], Hashable]
) -> Iterator[tuple[str, list[fx.Node]]]:
    """Runs of gathers of storage that one block needs in one phase; others stand alone."""
    group: list[fx.Node] = []
    last: tuple[str, Hashable] | None = None
    for node in nodes:
        if not is_start(node) or not is_gather_of_storage(node):
            continue
        now = (str(node.meta.get("phase")), block_of(node))
        if group and (now != last or now[1] is None):
            assert last is not None
            yield last[0], group
            group = []
        group.append(node)
        last = now
    if group and last is not None:
        yield last[0], group


def fetch_ahead(
    graph: fx.Graph,
    block_of: Callable[[fx.Node], Hashable],
    budget: int,
    resident: Resident = None,
) -> None:
    """Begin to copy from host memory what a block reads while the block before it runs.

    Copies are grouped by the block that reads them. Those of a group begin when the first of the
    group before has arrived, so that each has the time of a block, and few are held at a time.
    """
    if not any(node.target is FROM_HOST for node in graph.nodes):
        return
    lifetimes = Lifetimes(graph, resident)
    begins = phase_starts(lifetimes.nodes)
    keys: dict[fx.Node, float] = {}
    last: Hashable = None
    behind = arrived = 0
    for index, node in enumerate(lifetimes.nodes):
        if node.target is FROM_HOST:
            phase = str(node.meta.get("phase"))
            if (now := (phase, block_of(node))) != last:
                last, behind, arrived = now, arrived, 0
            _move_up(lifetimes, node, max(behind, begins[phase]), budget, keys)
        elif node.target is ARRIVED and not arrived:
            arrived = index + 1
    reorder(graph, keys)


def fetched_bytes(lifetimes: Lifetimes, block_of: Callable[[fx.Node], Hashable]) -> int:
    """Bytes that come back from host memory for one block at most.

    So much may be on its way for the next one, which a plan's memory counts.
    """
    found: dict[Hashable, int] = defaultdict(int)
    for node in lifetimes.nodes:
        if node.target is FROM_HOST:
            found[node.meta.get("phase"), block_of(node)] += lifetimes.created(node)
    return max(found.values(), default=0)


def issue_early(graph: fx.Graph, lifetimes: Lifetimes, budget: int) -> None:
    """Issue each collective right behind its operand, or behind the collective before it.

    Collectives keep their order: one that is needed later must not delay one that is needed now.
    Gathers of parameters, whose operand is always there, are left to `prefetch`. What is made of
    the step's inputs, such as the number of labels that count, is little: it is issued where its
    phase begins, behind the gathers that this begins with. Where it is read, at the end of the
    forward, ranks would stand still for it.
    """
    begins = phase_starts(lifetimes.nodes)
    keys: dict[fx.Node, float] = {}
    given = {node: c for node in lifetimes.nodes if (c := _made_of_inputs(lifetimes, node))}
    for node, chain in given.items():
        horizon = _behind_gathers(lifetimes, node, begins[node.meta["phase"]])
        _move_chain(lifetimes, node, chain, horizon, budget, keys)
    behind = 0
    for index, node in enumerate(lifetimes.nodes):
        if not is_start(node) or node in given:
            continue
        placed = index
        if not is_gather_of_storage(node):
            first = max(behind, begins[node.meta["phase"]])
            placed = _move_up(lifetimes, node, first, budget, keys)
        behind = max(behind, placed)
    reorder(graph, keys)


def _made_of_inputs(lifetimes: Lifetimes, start: fx.Node) -> list[fx.Node]:
    """A collective and all ops that lead to it from placeholders; none if there is more to it.

    A gather of storage is `prefetch`'s. Ops that make more than a little are where others wait for
    what they make, or for the device.
    """
    if not is_start(start) or is_gather_of_storage(start):
        return []
    found = {start: None}
    stack = [start]
    while stack:
        for source in stack.pop().all_input_nodes:
            if source.op == "placeholder" or source in found:
                continue
            if is_start(source) or is_wait(source) or source.target in (FROM_HOST, ARRIVED):
                return []
            found[source] = None
            stack.append(source)
    little = LITTLE * lifetimes.peak_bytes
    return list(found) if sum(map(lifetimes.created, found)) <= little else []


def _behind_gathers(lifetimes: Lifetimes, start: fx.Node, begin: int) -> int:
    """The first position in a phase behind the gathers of storage that it begins with."""
    here = lifetimes.position[start]
    for index in range(begin, here):
        node = lifetimes.nodes[index]
        if is_wait(node) and is_gather_of_storage(node.all_input_nodes[0]):
            return index
    return begin


def follow_later(graph: fx.Graph, budget: int, resident: Resident = None) -> None:
    """Issue a reduction of what another one made, over another axis, behind later collectives.

    Gradients only: right behind the first, compute would stand still for all of that; and behind
    the next, for what the first had to queue for.
    """
    private = leaving(graph)
    starts = [node for node in graph.nodes if is_start(node)]
    order = {node: index for index, node in enumerate(starts)}
    before = {node: reduced_before(node, private) for node in starts if node in private}
    if not any(before.values()):
        return
    lifetimes = Lifetimes(graph, resident)
    keys: dict[fx.Node, float] = {}
    for node, sources in before.items():
        if not sources or node.meta.get("phase") != "backward":
            continue
        after = max(order[source] for source in sources)
        others = [s for s in starts[after + 1 :] if s is not node and not before.get(s)]
        behind = others[min(_BEHIND, len(others)) - 1] if others else None
        if behind is None or lifetimes.position[behind] < lifetimes.position[node]:
            continue
        now, then = lifetimes.position[node], lifetimes.position[behind] + 1
        held = sum(map(lifetimes.created, sources))
        if lifetimes.beside(node)[now:then].max() + held > budget:
            continue
        lifetimes.live[now:then] += held
        moved = {node}
        for each in sorted(link(node), key=lifetimes.position.__getitem__, reverse=True):
            if each is node or moved.issuperset(each.users):
                moved.add(each)
                keys[each] = then - 0.5
    reorder(graph, keys)


def _move_up(
    lifetimes: Lifetimes, start: fx.Node, horizon: int, budget: int, keys: dict[fx.Node, float]
) -> int:
    """Move a collective with its packing towards `horizon`; returns the position it gets."""
    return _move_chain(lifetimes, start, feeding(start), horizon, budget, keys)


def _move_chain(
    lifetimes: Lifetimes,
    start: fx.Node,
    chain: Collection[fx.Node],
    horizon: int,
    budget: int,
    keys: dict[fx.Node, float],
    placed: Mapping[fx.Node, int] = MappingProxyType({}),
) -> int:
    """As `_move_up`, with what is to move along, where some nodes have moved already."""
    position = lifetimes.position
    operands = {n for node in chain for n in node.all_input_nodes}.difference(chain)
    first = max([horizon, *(placed.get(n, position[n]) + 1 for n in operands)])
    behind = [node for node in chain if position[node] >= first]
    num_bytes = sum(lifetimes.created(node) for node in behind)
    first = lifetimes.earliest(start, first, num_bytes, budget)
    lifetimes.live[first : position[start]] += num_bytes
    for node in behind:
        if position[node] >= first:
            keys[node] = min(keys.get(node, math.inf), first - 0.5)
    return first


def begin_early(graph: fx.Graph, base: Sequence[fx.Node], finish: Sequence[fx.Node]) -> None:
    """Issue the collectives of `finish` among the nodes of `base`, as soon as their operands are.

    Waits stay where they are. A collective that works on what another one made is issued, with the
    wait for that, behind the next one of another gradient, so that it does not wait for long. The
    peak is not raised.

    Args:
        graph: of both, `base` in front.
        base: in order.
        finish: in order.
    """
    lifetimes = Lifetimes(graph)
    budget, horizon = lifetimes.peak_bytes, min(lifetimes.position[n] for n in base)
    inside = set(finish)
    waves: dict[int, list[tuple[fx.Node, list[fx.Node]]]] = defaultdict(list)
    for node in filter(is_start, finish):
        chain = _made_of(node, inside)
        waves[sum(map(is_start, chain))].append((node, chain))
    placed: dict[fx.Node, int] = {}
    keys: dict[fx.Node, float] = {}
    nexts: dict[fx.Node, fx.Node] = {}
    for wave in (waves[depth] for depth in sorted(waves)):
        found: list[fx.Node] = []
        for node, chain in sorted(wave, key=lambda each: _ready(each[1], lifetimes, placed)):
            before = [n for n in chain if is_start(n) and n is not node]
            if all(n in nexts for n in before):
                own = [n for n in chain if n not in keys and n not in before]
                first = max((placed[nexts[n]] + 1 for n in before), default=horizon)
                placed[node] = _move_chain(lifetimes, node, own, first, budget, keys, placed)
                found.append(node)
        nexts = dict(itertools.pairwise(found))
    reorder(graph, keys)


def _made_of(node: fx.Node, inside: set[fx.Node]) -> list[fx.Node]:
    """A node and those that it is made of, out of some, in no order."""
    found = {node: None}
    stack = [node]
    while stack:
        for source in stack.pop().all_input_nodes:
            if source in inside and source not in found:
                found[source] = None
                stack.append(source)
    return list(found)


def _ready(chain: Sequence[fx.Node], lifetimes: Lifetimes, placed: Mapping[fx.Node, int]) -> int:
    """From where what a chain reads is there."""
    own = set(chain).difference(placed)
    read = {n for node in own for n in node.all_input_nodes}.difference(own)
    return max((placed.get(n, lifetimes.position[n]) for n in read), default=0)


def wait_late(graph: fx.Graph, lifetimes: Lifetimes, budget: int) -> None:
    """Put the wait for each collective in front of the first reader of its result.

    Views of the result go along. Gradients are read by nobody but the caller, so their reductions
    run beside the rest of the backward. A collective other than an all-reduce holds its operand
    until the wait, which is put later only as far as that fits.
    """
    late: set[fx.Node] = set()
    for node in lifetimes.nodes:
        source = node.args[0] if node.args else None
        # a reshape that copies stays: what it copies from would live longer
        shows = is_view(node.target) and source in late and not lifetimes.created(node)
        if is_wait(node) or shows:
            late.add(node)
    keys: dict[fx.Node, float] = {node: float(i) for node, i in lifetimes.position.items()}
    for node in reversed(lifetimes.nodes):
        if node not in late or not node.users:
            continue
        first = min(keys[user] for user in node.users) - _BEFORE
        if is_wait(node):
            start = node.args[0]
            assert isinstance(start, fx.Node)
            end = math.ceil(first)
            at = lifetimes.latest(start, end, budget)
            first = first if at == end else max(keys[node], at - 0.5)
        keys[node] = first
    reorder(graph, keys)


def tell_last(graph: fx.Graph, budget: int) -> None:
    """Put behind the backward what only the caller reads of a collective: the sum of a loss, say.

    The order stays as it was where this would raise the peak above `budget` by more than a little:
    a loss is summed where the most is live, and a few numbers of it are held longer.
    """
    nodes = list(graph.nodes)
    needed: set[fx.Node] = set()
    for node in reversed(nodes):
        if node.meta.get("phase") == "backward" or is_start(node) or node in needed:
            needed.update(node.all_input_nodes)
    if not any(node.meta.get("phase") == "backward" for node in nodes):
        return
    told: dict[fx.Node, None] = {}
    for node in nodes:
        if node.op != "output" and node.meta.get("phase") == "forward" and node not in needed:
            if is_wait(node) or any(source in told for source in node.all_input_nodes):
                told[node] = None
    if not told:
        return
    reorder(graph, {node: len(nodes) + index for index, node in enumerate(told)})
    if Lifetimes(graph).peak_bytes > (1 + LITTLE) * budget:
        reorder(graph, {node: float(index) for index, node in enumerate(nodes)})
