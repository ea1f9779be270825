"""How the groups of a mesh axis lie over nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

__all__ = ["AxisGeometry", "axis_geometry"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisGeometry:
    """How the groups of one mesh axis lie over the nodes (the worst of them).

    Attributes:
        group_size: n, ranks in a group.
        num_nodes: m, the most nodes that a group touches.
        ranks_per_node: r, the fewest ranks that a group has on a node it touches.
    """

    group_size: int
    num_nodes: int
    ranks_per_node: int


@lru_cache(maxsize=4096)
def axis_geometry(mesh_shape: tuple[int, ...], axis: int, devices_per_node: int) -> AxisGeometry:
    """The geometry of `axis` on a row-major mesh over nodes of `devices_per_node` ranks.

    Args:
        mesh_shape: the mesh; a rank is the row-major index of its coordinates.
        axis: index into `mesh_shape`, not negative.
        devices_per_node: rank q is on node ``q // devices_per_node``.

    Returns:
        The geometry of the worst group.
    """
    n, stride = mesh_shape[axis], math.prod(mesh_shape[axis + 1 :])
    span, node = n * stride, devices_per_node
    if n == 1 or node % span == 0:
        return AxisGeometry(group_size=n, num_nodes=1, ranks_per_node=n)
    if stride % node == 0:
        return AxisGeometry(group_size=n, num_nodes=n, ranks_per_node=1)
    if span % node == 0 and node % stride == 0:
        ranks = node // stride
        return AxisGeometry(group_size=n, num_nodes=n // ranks, ranks_per_node=ranks)
    return _uneven_geometry(n, np.arange(math.prod(mesh_shape)).reshape(-1, n, stride) // node)


def _uneven_geometry(
    n: int, nodes: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
) -> AxisGeometry:
    """The worst of groups that lie unevenly; `nodes` is (outer, n, stride), the node of a rank."""
    num_nodes, ranks_per_node = 1, n
    for group in np.moveaxis(nodes, 1, 2).reshape(-1, n):
        counts = np.unique(group, return_counts=True)[1]
        num_nodes = max(num_nodes, len(counts))
        ranks_per_node = min(ranks_per_node, int(counts.min()))
    return AxisGeometry(group_size=n, num_nodes=num_nodes, ranks_per_node=ranks_per_node)
