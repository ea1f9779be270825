"""Where gathers that may be issued early stand among the collectives that ops wait for.

Collectives of one link run one behind the other. A gather for the next block, issued in front of an
all-to-all that attention waits for, holds the device up by all of its seconds, even if it is itself
not needed for long. Between two collectives of a link that ops wait for, the link is idle while ops
run: a gap. With W the work of the ops of a block, w that of a gap, and B the bytes of all gathers
that are issued in the block, a gap has room for

    B · w / W

bytes. Each gather is put into the first gap that has room for it, or else into the one with the
most. If the link has less to do than the device, a gap that is not overfull delays nothing,
whatever the speed of both.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence

from torch import fx

from autopar.codegen.passes.bucket import is_gather_of_storage, leaving
from autopar.codegen.passes.sends import is_start, is_wait
from autopar.core.axis_geometry import axis_geometry
from autopar.core.emitted_work import emitted_work
from autopar.core.plan import Plan

__all__ = ["LinkGaps", "links"]

# data sheets have 10 (CPUs) to 300 (GPUs): only the share of the matmuls in a block depends on it
_FLOPS_PER_BYTE = 100.0


def links(plan: Plan) -> tuple[str, ...]:
    """The link that collectives of each mesh axis use: inside nodes or between them."""
    per_node, shape = plan.cluster.get("devices_per_node", 1), plan.mesh_shape
    found = (axis_geometry(shape, axis, per_node) for axis in range(len(shape)))
    return tuple("inside" if each.num_nodes == 1 else "between" for each in found)


class LinkGaps:
    """The gaps of each link of a program.

    Args:
        graph: joint program, with fake values.
        links: of each mesh axis.
    """

    def __init__(self, graph: fx.Graph, links: Sequence[str]) -> None:
        self._nodes = list(graph.nodes)
        self._links = links
        self._awaited: dict[str, list[int]] = defaultdict(list)
        self._work: dict[fx.Node, float] = {}
        private = leaving(graph)
        for index, node in enumerate(self._nodes):
            if is_start(node) and node not in private and not is_gather_of_storage(node):
                self._awaited[self._link(node)].append(index)

    def places(self, starts: Sequence[fx.Node], begin: int, end: int) -> dict[fx.Node, int]:
        """The first position in a range at which each gather is to be issued.

        Args:
            starts: gathers in order.
            begin, end: of the range.
        """
        of_link: dict[str, list[fx.Node]] = defaultdict(list)
        for start in starts:
            of_link[self._link(start)].append(start)
        found: dict[fx.Node, int] = {}
        for link, own in of_link.items():
            found.update(zip(own, self._filled(link, own, begin, end), strict=True))
        return found

    def _filled(self, link: str, starts: Sequence[fx.Node], begin: int, end: int) -> list[int]:
        """The same for the gathers of one link."""
        awaited = self._awaited[link]
        inside = awaited[bisect_left(awaited, begin) : bisect_left(awaited, end)]
        edges = [begin, *(index + 1 for index in inside)]
        work = [self._done(*gap) for gap in zip(edges, [*inside, end], strict=True)]
        sizes = [start.meta["collective"][2] for start in starts]
        whole = sum(work) or 1.0
        room = [sum(sizes) * each / whole for each in work]
        found: list[int] = []
        for num_bytes in sizes:
            roomy = (gap for gap, left in enumerate(room) if left >= num_bytes)
            gap = next(roomy, max(range(len(room)), key=room.__getitem__))
            room[gap] -= num_bytes
            found.append(edges[gap])
        return found

    def _link(self, start: fx.Node) -> str:
        return self._links[start.meta["collective"][1]]

    def _done(self, begin: int, end: int) -> float:
        """The work of the ops in a range, in flops."""
        return sum(self._of(node) for node in self._nodes[begin:end])

    def _of(self, node: fx.Node) -> float:
        if node.op != "call_function" or is_start(node) or is_wait(node):
            return 0.0
        if node not in self._work:
            work = emitted_work(node)
            self._work[node] = work.flops + _FLOPS_PER_BYTE * work.moved if work else 0.0
        return self._work[node]
