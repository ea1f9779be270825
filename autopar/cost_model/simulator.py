"""Seconds of a step by simulating its emitted program on two streams, compute and communication.

The host issues nodes in order. An op runs when the compute stream is free. A collective starts when
everything issued before it on the compute stream is done and the communication stream is free (the
event that torch's process groups record). A wait stops the compute stream until its collective has
ended. With C the seconds of ops, and I those in which the compute stream stands at waits::

    total = C + I        exposed = I        hidden = (seconds of collectives) - I

The communication stream is busy for the whole of such a stop, so every second of it belongs to one
collective's mesh axis, and no collective hides behind another: hidden communication is at most C.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autopar.core.strategy import op_call
from autopar.core.work import LOOKUPS, global_flops, is_view, op_class
from autopar.cost_model.cluster import Cluster
from autopar.cost_model.collectives import CollectiveKind
from autopar.cost_model.compute import compute_seconds_array
from autopar.cost_model.memory import Offloaded, dtype_bytes, optimizer_state_bytes
from autopar.cost_model.offload import offload_seconds
from autopar.cost_model.profile import DeviceProfile

__all__ = ["OpTimes", "Simulation", "Span", "optimizer_seconds", "simulate"]

_COPIES = (torch.ops.aten.clone.default, torch.ops.aten.contiguous.default)


class OpTimes(Protocol):
    """Measured seconds of single ops, such as `OpDatabase`."""

    def seconds(self, node: fx.Node) -> float | None:
        """Seconds of an op on the shapes of this node; None where it cannot be run."""


@dataclass(frozen=True, slots=True)
class Span:
    """One node on a stream: "compute" or the index of the mesh axis that a collective is on."""

    name: str
    stream: str | int
    phase: str
    start_s: float
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A step of one rank.

    Attributes:
        step_s: forward and backward, without the optimizer.
        compute_s: of ops.
        comm_s, exposed_s, hidden_s: of collectives, per mesh axis; exposed plus hidden is all.
        optimizer_s: the update of this rank's share of the parameters.
        spans: everything that ran, in order of issue.
    """

    step_s: float
    compute_s: float
    comm_s: tuple[float, ...]
    exposed_s: tuple[float, ...]
    optimizer_s: float
    spans: tuple[Span, ...]

    @property
    def hidden_s(self) -> tuple[float, ...]:
        return tuple(c - e for c, e in zip(self.comm_s, self.exposed_s, strict=True))

    @property
    def total_s(self) -> float:
        """A training step with its update."""
        return self.step_s + self.optimizer_s

    def by_phase(self) -> dict[str, float]:
        """Seconds of compute per phase, of exposed communication, and of the optimizer."""
        found: dict[str, float] = defaultdict(float)
        for span in self.spans:
            if span.stream == "compute":
                found[span.phase] += span.duration_s
        return {
            **found,
            "exposed communication": sum(self.exposed_s),
            "optimizer": self.optimizer_s,
        }


class _Streams:
    """Clocks of the two streams, and the collectives in flight."""

    def __init__(self, num_axes: int) -> None:
        self.compute_s = self.comm_free_s = 0.0
        self.exposed = [0.0] * num_axes
        self.sent = [0.0] * num_axes
        self.busy: list[tuple[float, float, int]] = []  # (start, end, axis) on the communication
        self.ends: dict[fx.Node, float] = {}

    def run(self, seconds: float) -> float:
        start, self.compute_s = self.compute_s, self.compute_s + seconds
        return start

    def send(self, node: fx.Node, axis: int, seconds: float) -> float:
        start = max(self.compute_s, self.comm_free_s)
        self.comm_free_s = self.ends[node] = start + seconds
        self.busy.append((start, start + seconds, axis))
        self.sent[axis] += seconds
        return start

    def wait(self, end_s: float) -> None:
        """Stop the compute stream until `end_s`; who was sending meanwhile is exposed."""
        # what ended before now can never be waited for again
        self.busy = [b for b in self.busy if b[1] > self.compute_s]
        if end_s > self.compute_s:
            for start, stop, axis in self.busy:
                self.exposed[axis] += max(0.0, min(stop, end_s) - max(start, self.compute_s))
            self.compute_s = end_s


def simulate(
    graph: fx.Graph,
    cluster: Cluster,
    *,
    parameter_bytes: Sequence[tuple[int, str]] = (),
    optimizer: object = None,
    times: OpTimes | None = None,
) -> Simulation:
    """Simulate one rank's program.

    Args:
        graph: emitted joint graph; nodes carry fake values, collectives their kind, axis, bytes.
        cluster: with the mesh that the program is for.
        parameter_bytes: local bytes and dtype name of each trainable parameter.
        optimizer: as for `optimizer_state_bytes`; None for no update.
        times: measured ops, used in place of the cluster's curves.

    Returns:
        Seconds, and what ran when.
    """
    streams = _Streams(len(cluster.mesh_shape))
    spans: list[Span] = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        phase = str(node.meta.get("phase", "forward"))
        if "collective" in node.meta:
            kind, axis, num_bytes, _ = node.meta["collective"]
            seconds = cluster.collective_seconds(CollectiveKind(kind), num_bytes, axis)
            start = streams.send(node, axis, seconds)
            spans.append(Span(node.name, axis, phase, start, seconds))
        elif node.args and isinstance(node.args[0], fx.Node) and node.args[0] in streams.ends:
            streams.wait(streams.ends[node.args[0]])
        else:
            found = times.seconds(node) if times is not None else None
            seconds = node_seconds(node, cluster.device) if found is None else found
            spans.append(Span(node.name, "compute", phase, streams.run(seconds), seconds))
    streams.wait(streams.comm_free_s)  # what nobody waited for ends before the step does
    return Simulation(
        step_s=streams.compute_s,
        compute_s=sum(s.duration_s for s in spans if s.stream == "compute"),
        comm_s=tuple(streams.sent),
        exposed_s=tuple(streams.exposed),
        optimizer_s=optimizer_seconds(cluster.device, parameter_bytes, optimizer),
        spans=tuple(spans),
    )


def node_seconds(node: fx.Node, device: DeviceProfile) -> float:
    """Seconds of one emitted op by the device's curves."""
    value = node.meta.get("val")
    outputs = [v for v in pytree.tree_leaves(value) if isinstance(v, Tensor)]
    if node.target is operator.getitem or not outputs:
        return 0.0
    operands = [
        n.meta["val"] for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)
    ]
    if _shares_storage(outputs, operands):
        return device.view_overhead_s
    call = op_call(node, 1)
    kind = op_class(call)
    if kind == "view" or node.target in _COPIES:  # a reshape that must copy, for one
        kind = "memory" if all(_rows_are_runs(x) for x in operands) else "transpose"
    written = sum(_bytes(x) for x in outputs)
    lookup = node.target in LOOKUPS
    moved = 2 * written if lookup else written + sum(_bytes(x) for x in operands)
    seconds = compute_seconds_array(
        device,
        kind,
        str(outputs[0].dtype).removeprefix("torch."),
        np.array(0.0 if is_view(node.target) else global_flops(call)),
        np.array(float(moved)),
    )
    return float(seconds)


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _shares_storage(outputs: Iterable[Tensor], operands: Iterable[Tensor]) -> bool:
    held = {x.untyped_storage()._cdata for x in operands}
    return all(x.untyped_storage()._cdata in held for x in outputs)


def _rows_are_runs(x: Tensor) -> bool:
    """True if the last dim is contiguous, so that a copy reads runs of memory."""
    return x.dim() == 0 or x.stride(-1) == 1 or x.shape[-1] == 1


def optimizer_seconds(
    device: DeviceProfile, parameter_bytes: Sequence[tuple[int, str]], optimizer: object
) -> float:
    """Seconds of one update: each parameter, gradient and state is read, and all but gradients
    written, once, by one pass per parameter (a fused optimizer makes one in all).

    Args:
        device: whose memory is read.
        parameter_bytes: local bytes and dtype name of each trainable parameter.
        optimizer: as for `optimizer_state_bytes`; None for no update.
    """
    if optimizer is None:
        return 0.0
    if isinstance(optimizer, Offloaded):
        added = sum(offload_seconds(device, optimizer, n, dtype) for n, dtype in parameter_bytes)
        return optimizer_seconds(device, parameter_bytes, optimizer.optimizer) + added
    by_dtype: Mapping[str, list[float]] = defaultdict(list)
    for num_bytes, dtype in parameter_bytes:
        states = optimizer_state_bytes(optimizer, num_bytes // dtype_bytes(dtype), dtype)
        by_dtype[dtype].append(3.0 * num_bytes + 2.0 * states)
    total = 0.0
    for dtype, moved in by_dtype.items():
        array: Any = np.array(moved)
        seconds = compute_seconds_array(device, "pointwise", dtype, np.zeros(len(moved)), array)
        total += float(seconds.sum())
    return total
