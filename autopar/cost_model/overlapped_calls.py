"""Seconds of a matmul and the collective next to it in one call (`core/overlapped.py`).

The parts of the n ranks are multiplied in turn, while others are on their way. With C the seconds
of the n matmuls, t those of the collective, and E those of what is copied before and after::

    total = E + max(C, t) + min(C, t) / n

C + E count as compute; the rest, between t / n and t, is exposed. No such call has been timed, as
no devices with symmetric memory were available.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import fx

from autopar.core.einsum import flops, output_shape, parse_equation
from autopar.core.overlapped import GATHER_MATMUL, copied
from autopar.cost_model.cluster import Cluster
from autopar.cost_model.collectives import CollectiveKind
from autopar.cost_model.compute import compute_seconds_array
from autopar.cost_model.profile import DeviceProfile

__all__ = ["CallSeconds", "call_seconds", "pipelined_seconds"]


class CallSeconds(NamedTuple):
    """Seconds of ops, of the collective, and of the part of that which ops wait for."""

    compute_s: float
    comm_s: float
    exposed_s: float


def pipelined_seconds(compute_s: float, comm_s: float, ranks: int) -> float:
    """The longer of both, and one of `ranks` parts of the shorter: max(C, t) + min(C, t) / n."""
    return max(compute_s, comm_s) + min(compute_s, comm_s) / ranks


def call_seconds(node: fx.Node, cluster: Cluster) -> CallSeconds:
    """Seconds of one call of a program.

    Args:
        node: carries what it sends as `meta["overlapped"]`.
        cluster: with the program's mesh.
    """
    kind, axis, num_bytes, _ = node.meta["overlapped"]
    comm_s = cluster.collective_seconds(CollectiveKind(kind), num_bytes, axis)
    gathers = node.target is GATHER_MATMUL
    product_s, copy_s = (_gather if gathers else _reduction)(node, cluster.device)
    total_s = pipelined_seconds(product_s, comm_s, cluster.mesh_shape[axis])
    return CallSeconds(product_s + copy_s, comm_s, total_s - product_s)


def _gather(node: fx.Node, device: DeviceProfile) -> tuple[float, float]:
    args: Any = node.args
    shard, others, equations, dim, keep, ranks, _ = args
    a, dtype, size = _described(shard)
    part = math.prod(a) * size
    product_s = 0.0
    copies = [part]  # to where the other ranks read it
    for index, (other, equation) in enumerate(zip(others, equations, strict=True)):
        b, _, _ = _described(other)
        product_s += ranks * _product_seconds(device, dtype, equation, a, b, size)
        left, right, out = copied(equation, dim, a, b)
        copies += [math.prod(b) * size] * right
        copies += [ranks * math.prod(output_shape(equation, a, b)) * size] * out
        if not index:
            copies += [part] * left + [part, left * ranks * part] * keep
    return product_s, _copy_seconds(device, dtype, copies)


def _reduction(node: fx.Node, device: DeviceProfile) -> tuple[float, float]:
    args: Any = node.args
    left_node, right_node, equation, dim, ranks, _ = args
    (a, dtype, size), (b, _, _) = _described(left_node), _described(right_node)
    form = parse_equation(equation)
    own = form.a.index(form.out[dim])
    part = [*a[:own], a[own] // ranks, *a[own + 1 :]]
    product_s = ranks * _product_seconds(device, dtype, equation, part, b, size)
    left, right, out = copied(equation, own, a, b)
    result = math.prod(output_shape(equation, part, b)) * size
    copies = [math.prod(a) * size] * left + [math.prod(b) * size] * right + [result] * out
    # what came from all ranks is read and summed
    summed_s = _seconds(device, "pointwise", dtype, 0.0, (ranks + 1) * result)
    return product_s, summed_s + _copy_seconds(device, dtype, copies)


def _product_seconds(
    device: DeviceProfile, dtype: str, equation: str, a: Sequence[int], b: Sequence[int], size: int
) -> float:
    """Of one product, which reads its operands and writes its result."""
    moved = size * sum(map(math.prod, (a, b, output_shape(equation, a, b))))
    return _seconds(device, "matmul", dtype, flops(equation, a, b), moved)


def _copy_seconds(device: DeviceProfile, dtype: str, copies: Iterable[int]) -> float:
    """Each byte is read and written."""
    return sum(_seconds(device, "memory", dtype, 0.0, 2 * n) for n in copies if n)


def _seconds(device: DeviceProfile, kind: str, dtype: str, work: float, moved: float) -> float:
    given = (np.array(float(work)), np.array(float(moved)))
    return float(compute_seconds_array(device, kind, dtype, *given))


def _described(node: Any) -> tuple[list[int], str, int]:
    """Shape, dtype name and bytes of an element."""
    value = node.meta["val"]
    return [*value.shape], str(value.dtype).removeprefix("torch."), value.element_size()
