r"""The seconds of a collective on one mesh axis: ``a + b * num_bytes``.

For ``n`` ranks on one link with latency α, bandwidth w and base latency c, and B bytes:

======================  ========================  ==================
kind                    a                         b
======================  ========================  ==================
all-gather              c + (n-1) α               (n-1) / (n w)
reduce-scatter          the same                  the same
all-reduce              reduce-scatter, then all-gather: twice both
all-to-all              c + (n-1) α               (n-1) / (n w)
broadcast (pipelined)   c + (n-1) α               1 / w
send/receive            c + α                     1 / w
======================  ========================  ==================

B is the full buffer of one group: all-gather's output, reduce-scatter's input, all-reduce's
buffer, but for all-to-all what ONE rank holds. So a tensor whose whole is S bytes and whose shard
is S/n costs B = S to all-gather and B = S/n to all-to-all: n times fewer bytes.
(Thakur, Rabenseifner and Gropp 2005, doi:10.1177/1094342005051521; Patarasuk and Yuan 2009,
doi:10.1016/j.jpdc.2008.09.002.)

**Groups that span nodes.** Let r be the ranks of a group on one node, m the nodes it touches, g
the devices of a node, and u the inter-node bandwidth per *device*, so a node has g u. All groups
of an axis run at once and every device is in exactly one, so a node with r ranks of each group
carries g/r groups, and each gets ``g u / (g/r) = r u``: contention is in this share.

* *Rings* (all-gather, reduce-scatter, all-reduce, broadcast) enter and leave a node once, so their
  bytes pass at ``min(w, r u)``: b has that in place of w. Of the n-1 steps m-1 are between nodes:
  ``a = c + (n-m) α + (m-1) α'``, which is how NCCL counts them (src/graph/tuning.cc).
* *All-to-all* sends (n-r)/n of each rank's bytes out at the rank's own share u, the rest inside:
  ``b = (r-1)/(n w) + (n-r)/(n u)``, ``a = c + (r-1) α + (n-r) α'``.
* *Send/receive* between nodes uses the sender's own share: ``1 / u`` and α'.

Whatever leaves a node has crossed the node's own link first, so u is at most w and α' at least α:
spanning nodes is never cheaper. Where groups are uneven over nodes, the worst group is priced.
Costs rise with n at a fixed stride as long as r is the same on every node; a group of 5 on nodes
of 4 can cost more than one of 8, because on the second node it owns one device's share, not four.

**Measured lines** (`LinkProfile.lines`) take the table's place inside a node. The law scales them
to group sizes that were not measured, and a group that spans nodes costs at least as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from autopar.core.axis_geometry import AxisGeometry
from autopar.cost_model.profile import CollectiveLine, LinkProfile

__all__ = ["CollectiveKind", "alpha_beta"]


class CollectiveKind(StrEnum):
    """A collective, or a send to the next rank of the axis."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    SEND_RECV = "send_recv"


def alpha_beta(
    kind: CollectiveKind, geometry: AxisGeometry, intra: LinkProfile, inter: LinkProfile
) -> tuple[float, float]:
    """The cost of a collective as a line: ``seconds = a + b * num_bytes`` for ``num_bytes > 0``.

    Args:
        kind: the collective.
        geometry: of the axis, from `axis_geometry`.
        intra: the link inside a node.
        inter: the link between nodes, per device.

    Returns:
        ``(a, b)`` in seconds and seconds per byte; ``(0.0, 0.0)`` for a group of one.
    """
    if geometry.group_size == 1:
        return 0.0, 0.0
    a, b = _law(kind, geometry, intra, inter)
    lines = intra.lines_of(kind)
    if not lines:
        return a, b
    measured = _measured(kind, lines, geometry.group_size, intra)
    if geometry.num_nodes == 1:
        return measured
    return max(a, measured[0]), max(b, measured[1])


def _measured(
    kind: CollectiveKind, lines: Sequence[CollectiveLine], size: int, intra: LinkProfile
) -> tuple[float, float]:
    """The line of a group size inside a node: the measured one, or one scaled as the law goes."""

    def law(n: int) -> tuple[float, float]:
        return _law(kind, AxisGeometry(group_size=n, num_nodes=1, ranks_per_node=n), intra, intra)

    below = [line for line in lines if line.group_size <= size]
    near = below[-1] if below else lines[0]
    (a, b), (near_a, near_b) = law(size), law(near.group_size)
    found = (
        near.latency_s * (a / near_a if near_a else 1.0),
        near.seconds_per_byte * (b / near_b if near_b else 1.0),
    )
    above = next((line for line in lines if line.group_size > size), None)
    if above is None or not below:
        return found
    return min(found[0], above.latency_s), min(found[1], above.seconds_per_byte)


def _law(
    kind: CollectiveKind, geometry: AxisGeometry, intra: LinkProfile, inter: LinkProfile
) -> tuple[float, float]:
    """The line that the module's table gives."""
    if kind is CollectiveKind.ALL_REDUCE:
        a, b = _law(CollectiveKind.REDUCE_SCATTER, geometry, intra, inter)
        return 2 * a, 2 * b
    n, m, r = geometry.group_size, geometry.num_nodes, geometry.ranks_per_node
    spans = m > 1
    near_s, near_bw = intra.latency_s, intra.bandwidth
    far_s = max(near_s, inter.latency_s) if spans else near_s
    far_bw = min(near_bw, inter.bandwidth) if spans else near_bw
    base_s = max(intra.base_latency_s, inter.base_latency_s) if spans else intra.base_latency_s
    if kind is CollectiveKind.SEND_RECV:
        return base_s + far_s, 1 / far_bw
    if kind is CollectiveKind.ALL_TO_ALL:
        steps_s = (r - 1) * near_s + (n - r) * far_s
        return base_s + steps_s, (r - 1) / (n * near_bw) + (n - r) / (n * far_bw)
    ring_bw = min(near_bw, r * far_bw) if spans else near_bw
    share = 1.0 if kind is CollectiveKind.BROADCAST else (n - 1) / n
    return base_s + (n - m) * near_s + (m - 1) * far_s, share / ring_bw
