"""Buckets: several small collectives of one group, kind and dtype become one.

    y_i = C(x_i), i = 1..k    →    y_1 | … | y_k = C(x_1 | … | x_k)

holds for all-reduce on flat tensors, and for reduce-scatter and all-gather on tensors whose first
dim counts ranks, joined behind it. With latency a, b seconds per byte and n_i bytes, k collectives
cost k·a + b·Σn_i, and one costs a + b·Σn_i. A bucket is closed when it has a few times a / b bytes
(`Plan.buckets`): then latency is a small share, and what is sent first still runs beside the
compute that makes the rest (Li et al. 2020, arXiv 2006.15704).

Joined are reductions whose results leave the step (gradients), where a bucket goes out with its
last member, and gathers of what the caller holds (parameters) within one block, where it goes out
with its first.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence

import torch
from torch import fx

from autopar.codegen.passes.joined import ancestors, is_copied_out, join_all, size_of
from autopar.codegen.passes.lifetimes import LITTLE, Lifetimes
from autopar.codegen.passes.order import copied, is_packing, link
from autopar.codegen.passes.sends import is_start, is_wait

__all__ = [
    "Sizes",
    "bucket",
    "fewest_buckets",
    "is_gather_of_storage",
    "leaving",
    "reduced_before",
]

c10d = torch.ops._c10d_functional
Sizes = Mapping[tuple[int, str], int]
Most = Mapping[str, int]  # bytes of the bucket that a member may be in, by name
Live = Callable[[fx.Graph], Lifetimes]

_MOST_TRIES = 6  # to shrink single buckets, each with a copy of the graph
_SHRINK = 4  # of a bucket that does not fit, the part that is tried next


def bucket(
    graph: fx.Graph,
    sizes: Sizes,
    block_of: Callable[[fx.Node], Hashable],
    budget: int,
    resident: Mapping[str, int] | None = None,
    known: Lifetimes | None = None,
) -> fx.Graph:
    """Join small collectives.

    Args:
        graph: joint program, which is left as it is.
        sizes: bytes that close a bucket, by axis and kind.
        block_of: block of the model that a node belongs to; None outside of blocks.
        budget: what may be live; where it binds, buckets are smaller.
        resident: bytes that live beside the graph's own, by phase.
        known: what is live in `graph`, if it is known.

    Returns:
        The new graph, or `graph` itself where there is nothing to join.
    """

    @functools.cache  # no graph is changed once it was asked for
    def live(asked: fx.Graph) -> Lifetimes:
        return known if known and asked is graph else Lifetimes(asked, resident)

    joined = _joined(graph, sizes, budget, live, _reductions)
    gathers = functools.partial(_gathers, block_of=block_of)
    return _joined(joined, sizes, budget, live, gathers)


def _joined(
    graph: fx.Graph,
    sizes: Sizes,
    budget: int,
    live: Live,
    choose: Callable[[fx.Graph, Sizes, int, Live, Most], list[list[fx.Node]]],
) -> fx.Graph:
    """Join what `choose` finds, in smaller buckets where that lives in more than the budget.

    Parts are taken out of what is gathered all at once, or each where it is read if that does not
    fit. Then first only those buckets shrink that are open where the peak is, and at last all.
    """
    most: dict[str, int] = {}
    tries = 0
    while any(sizes.values()):
        buckets = choose(graph, sizes, budget, live, most)
        if not buckets:
            break
        reached = max(sum(map(size_of, members)) for members in buckets)
        at_once = any(is_copied_out(m) for members in buckets for m in members)
        for split in (True, False) if at_once else (False,):
            trial = copied(graph)
            twins = {node.name: node for node in trial.nodes}
            position = {node: index for index, node in enumerate(trial.nodes)}
            names = [[(position[twins[m.name]], m.name) for m in members] for members in buckets]
            join_all(trial, [[twins[m.name] for m in members] for members in buckets], split)
            lifetimes = live(trial)
            if lifetimes.peak_bytes <= budget * (1 + LITTLE):
                return trial
        before = lifetimes.nodes[: int(lifetimes.live.argmax()) + 1]
        peak = next((position[node] for node in reversed(before) if node in position), -1)
        tries += 1
        shrunk = _shrunk(buckets, names, peak)
        if shrunk and tries <= _MOST_TRIES:
            most |= shrunk
        else:
            sizes = {key: min(num_bytes, reached) // 2 for key, num_bytes in sizes.items()}
    return graph


def _shrunk(
    buckets: Sequence[Sequence[fx.Node]], names: Sequence[Sequence[tuple[int, str]]], peak: int
) -> dict[str, int]:
    """Bytes of the bucket that members may be in which are waiting where the peak is.

    Args:
        buckets: as they were tried.
        names: positions of their members, and names.
        peak: position.
    """
    found: dict[str, int] = {}
    for bucket_, members in zip(buckets, names, strict=True):
        early = [name for at, name in members if at <= peak + 1 <= members[-1][0]]
        found |= dict.fromkeys(early, sum(map(size_of, bucket_)) // _SHRINK)
    return found


def is_gather_of_storage(node: fx.Node) -> bool:
    """True for an all-gather of a placeholder, or of views, casts or gathers of one."""
    if node.target is not c10d.all_gather_into_tensor.default:
        return False
    stack = list(node.all_input_nodes)
    while stack:
        source = stack.pop()
        if source.op == "placeholder":
            continue
        known = is_packing(source) or is_wait(source)
        if not known and source.target is not c10d.all_gather_into_tensor.default:
            return False
        stack += source.all_input_nodes
    return True


def leaving(graph: fx.Graph) -> set[fx.Node]:
    """Collectives, waits and packing whose results nobody but the caller reads."""
    found: set[fx.Node] = set()
    for node in reversed(list(graph.nodes)):
        passes_on = is_packing(node) or is_wait(node) or is_start(node)
        unread = bool(node.users) and found.issuperset(node.users)
        if node.op == "output" or (passes_on and unread and "sent" not in node.meta):
            found.add(node)
    return found


def _key(node: fx.Node) -> Hashable:
    """What members of a bucket have in common: kind, axis, how often, arguments, dtype, phase."""
    kind, axis, _, times = node.meta["collective"]
    return kind, axis, times, node.args[1:], node.meta["val"].dtype, node.meta.get("phase")


def _limit(node: fx.Node, sizes: Sizes, most: Most) -> int:
    """Bytes that close the bucket of a collective."""
    kind, axis, _, _ = node.meta["collective"]
    limit = sizes.get((axis, kind), 0)
    return min(limit, most.get(node.name, limit))


def _reductions(
    graph: fx.Graph, sizes: Sizes, budget: int, live: Live, most: Most
) -> list[list[fx.Node]]:
    """Runs of reductions that only the caller reads, in the order in which they can be issued.

    Behind a reduction on one axis may stand one on another axis: members have equally many before,
    and each can be issued when the bucket of the one before it has gone out. What another pipeline
    stage waits for is left alone.
    """
    lifetimes = live(graph)
    private = leaving(graph)
    issued: dict[fx.Node, int] = {}
    found: list[list[fx.Node]] = []
    for level in _levels(graph, private):
        alike: dict[tuple[Hashable, int], list[fx.Node]] = defaultdict(list)
        for node in level:
            before = (issued[source] for source in reduced_before(node, private))
            issued[node] = max([lifetimes.position[node], *before])
            limit = _limit(node, sizes, most)
            if size_of(node) < limit and _may_share(node):
                alike[_key(node), limit].append(node)
        for (_, limit), unsorted in alike.items():
            members = sorted(unsorted, key=issued.__getitem__)
            room = [budget - int(lifetimes.beside(m)[issued[m]]) for m in members]
            ends = fewest_buckets([size_of(m) for m in members], room, limit)
            for first, end in itertools.pairwise([0, *ends]):
                found.append(members[first:end])
                issued.update(dict.fromkeys(members[first:end], issued[members[end - 1]]))
            _mark_open(members, ends, limit)
    return [members for members in found if len(members) > 1]


def _mark_open(members: Sequence[fx.Node], ends: Sequence[int], limit: int) -> None:
    """Note what would close the last bucket, if it is open.

    Of a folded graph, the next block's reductions go in there in the whole program.
    """
    first = ends[-2] if len(ends) > 1 else 0
    is_open = sum(map(size_of, members[first:])) < limit
    for index, member in enumerate(members):
        member.meta["closes_at"] = limit if is_open and index >= first else 0


def _levels(graph: fx.Graph, private: Collection[fx.Node]) -> list[list[fx.Node]]:
    """Reductions that only the caller reads by how many stand before them, in order."""
    depth: dict[fx.Node, int] = {}
    levels: dict[int, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        depth[node] = max((depth[n] for n in node.all_input_nodes), default=0)
        if node in private and is_start(node):
            levels[depth[node]].append(node)
            depth[node] += 1
    return [levels[number] for number in sorted(levels)]


def reduced_before(start: fx.Node, private: Collection[fx.Node]) -> list[fx.Node]:
    """The reductions, out of `leaving`, whose results one works on."""
    return [
        source
        for node in link(start)
        for source in node.all_input_nodes
        if is_start(source) and source in private
    ]


def _may_share(node: fx.Node) -> bool:
    """True for a reduction that may go out with others."""
    return (
        node.target in (c10d.all_reduce.default, c10d.reduce_scatter_tensor.default)
        and node.meta.get("phase") in ("backward", "finish")
        and "piece" not in node.meta
        and _leaves_contiguous(node)
    )


def fewest_buckets(sizes: Sequence[int], room: Sequence[int], limit: int) -> list[int]:
    """Where buckets of consecutive members end, so that there are as few as may be.

    A bucket goes out with its last member, where the joined copy must find room. It has less than
    `limit` without that one. Where most is live, a few members wait for others rather than go out
    as a bucket that is nearly all latency. Of equally few the last is smallest: it hides least.

    Args:
        sizes: bytes of each member, in order.
        room: bytes that may be made where each is issued.
        limit: bytes that close a bucket.
    """
    count, first_of = [0], [0]
    for end in range(1, len(sizes) + 1):
        best, joined = (count[end - 1] + 1, end - 1), sizes[end - 1]
        for first in range(end - 2, -1, -1):
            if joined - sizes[end - 1] + sizes[first] >= limit:
                break
            joined += sizes[first]
            if joined > room[end - 1]:
                break
            if count[first] + 1 < best[0]:
                best = (count[first] + 1, first)
        count.append(best[0])
        first_of.append(best[1])
    ends = [len(sizes)] if sizes else []
    while ends and first_of[ends[-1]]:
        ends.append(first_of[ends[-1]])
    return ends[::-1]


def _leaves_contiguous(start: fx.Node) -> bool:
    """False if the caller must copy what it gets, as gradients are contiguous.

    Of a tensor alone, the copy takes its place; of a bucket, the whole stays beside it.
    """
    stack = [start]
    while stack:
        node = stack.pop()
        if any(user.op == "output" for user in node.users) and not node.meta["val"].is_contiguous():
            return False
        stack += node.users
    return True


def _gathers(
    graph: fx.Graph,
    sizes: Sizes,
    budget: int,
    live: Live,
    most: Most,
    block_of: Callable[[fx.Node], Hashable],
) -> list[list[fx.Node]]:
    """Gathers of parameters that one block needs in one phase.

    From the first on, the joined result must fit beside what is live.
    """
    lifetimes = live(graph)
    open_: dict[Hashable, list[fx.Node]] = defaultdict(list)
    closed: list[list[fx.Node]] = []
    for node in graph.nodes:
        if not is_start(node) or not is_gather_of_storage(node):
            continue
        limit, block = _limit(node, sizes, most), block_of(node)
        chained = any(is_start(n) for n in ancestors(node))
        if block is None or chained or size_of(node) >= limit:
            continue
        key = (_key(node), block, limit)
        joined = sum(map(size_of, open_[key])) + size_of(node)
        between = slice(lifetimes.position[next(iter(open_[key]), node)], lifetimes.position[node])
        if joined > limit or lifetimes.beside(node)[between].max(initial=0) + joined > budget:
            closed.append(open_.pop(key))
        open_[key].append(node)
    return [members for members in (*closed, *open_.values()) if len(members) > 1]
