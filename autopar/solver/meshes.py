"""Meshes of the same devices that a plan may take in place of the given one: adjacent axes joined.

A collective over two axes is one of each, of which the second waits for the first. Over the joined
axis it is one call, whose rings use the links inside a node and between nodes at the same time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from autopar.core.constraints import Constraints, assign_mesh
from autopar.cost_model import Cluster

__all__ = ["meshes"]


def meshes(cluster: Cluster, constraints: Constraints) -> list[Cluster]:
    """The cluster as given, and with axes joined where no pin speaks of one.

    Args:
        cluster: all devices, or those of a pipeline stage.
        constraints: of the user.
    """
    roles = assign_mesh(constraints, cluster.mesh_shape)
    if constraints.params or any(role.name != "free" for role in roles):
        return [cluster]
    found = {cluster.mesh_shape: cluster}
    for first, last in _runs(len(cluster.mesh_shape)):
        joined = _joined(cluster, first, last)
        found.setdefault(joined.mesh_shape, joined)
    return list(found.values())


def _runs(num_axes: int) -> Iterator[tuple[int, int]]:
    """All axes, and every two that are adjacent, as `(first, last)`."""
    if num_axes > 1:
        yield 0, num_axes - 1
        yield from itertools.pairwise(range(num_axes))


def _joined(cluster: Cluster, first: int, last: int) -> Cluster:
    shape, names = cluster.mesh_shape, cluster.axis_names
    run = slice(first, last + 1)
    if sum(size > 1 for size in shape[run]) < 2:
        return cluster  # there is nothing to join
    return cluster.with_mesh_shape(
        (*shape[:first], math.prod(shape[run]), *shape[last + 1 :]),
        (*names[:first], "_".join(names[run]), *names[last + 1 :]),
    )
