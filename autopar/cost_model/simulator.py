"""Seconds of a step by simulating its emitted program on two streams, compute and communication.

The host issues nodes in order. An op runs when the compute stream is free. A collective starts when
everything issued before it on the compute stream is done and the communication stream is free (the
event that torch's process groups record). A wait stops the compute stream until its collective has
ended. With C the seconds of ops, and I those in which the compute stream stands at waits, or makes
no headway as a collective takes its share of the device::

    total = C + I        exposed = I        hidden = (seconds of collectives) - I

The communication stream is busy for the whole of such a stop, so every second of it belongs to one
collective, and no collective hides behind another: hidden communication is at most C.

Copies of activations to host memory and back have a stream each way. One starts when everything
issued before it is done and its stream is free, and one that comes back no sooner than it has gone
to the host; where compute stands at the wait for one, these seconds are added to I, as the copy's.

A call that sends and multiplies at once (`overlapped_calls.py`) begins when both streams are free,
and takes both; what it takes longer than its ops is exposed.

In a folded program a node of the block that stands for k counts k times: the blocks between run as
this one does. Where that would hide more than C and what compute stands for copies, hidden is that.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autopar.core.host import ARRIVED, FROM_HOST, WITH_HOST
from autopar.core.strategy import op_call
from autopar.core.work import LOOKUPS, global_flops, is_view, op_class
from autopar.cost_model.cluster import Cluster
from autopar.cost_model.collectives import CollectiveKind
from autopar.cost_model.compute import compute_seconds_array
from autopar.cost_model.offload import can_offload, offload_seconds
from autopar.cost_model.overlapped_calls import call_seconds
from autopar.cost_model.profile import DeviceProfile
from autopar.cost_model.streams import Streams
from autopar.cost_model.update import update_seconds

__all__ = [
    "OpTimes",
    "Simulation",
    "Span",
    "node_seconds",
    "optimizer_seconds",
    "simulate",
]

_COPIES = (torch.ops.aten.clone.default, torch.ops.aten.contiguous.default)


class OpTimes(Protocol):
    """Measured seconds of single ops, such as `OpDatabase`."""

    def seconds(self, node: fx.Node) -> float | None:
        """Seconds of an op on the shapes of this node; None where it cannot be run."""


@dataclass(frozen=True, slots=True)
class Span:
    """One node on a stream: "compute", "up" or "down" between the device and the host, or the index
    of the mesh axis that a collective is on.

    Attributes:
        name: of the node.
        stream: where it runs.
        phase: forward or backward.
        start_s, duration_s: when, in a program whose nodes all run once.
        times: how often it runs in the step.
        kind: of a collective; of an op that packs, what for: the "order" of ranks, or a "bucket".
        hidden_s: of the `duration_s` of a collective or a copy, what runs beside compute.
        members: what a collective sends: (origin, bytes) of each tensor.
        origin: the traced node that it is for.
    """

    name: str
    stream: str | int
    phase: str
    start_s: float
    duration_s: float
    times: int = 1
    kind: str = ""
    hidden_s: float = 0.0
    members: tuple[tuple[str, int], ...] = ()
    origin: str = ""

    @property
    def packs(self) -> bool:
        """True for an op that brings a tensor into the form that is sent, or out of it."""
        return self.stream == "compute" and bool(self.kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A step of one rank.

    Attributes:
        step_s: forward and backward, without the optimizer.
        compute_s: of ops.
        comm_s, exposed_s, hidden_s: of collectives, per mesh axis; exposed plus hidden is all.
        optimizer_s: the update of this rank's share of the parameters.
        spans: everything that ran, in order of issue.
        copy_s, exposed_copy_s: of copies with host memory, and what compute waits for of them.
    """

    step_s: float
    compute_s: float
    comm_s: tuple[float, ...]
    exposed_s: tuple[float, ...]
    optimizer_s: float
    spans: tuple[Span, ...]
    copy_s: float = 0.0
    exposed_copy_s: float = 0.0

    @property
    def hidden_s(self) -> tuple[float, ...]:
        return tuple(c - e for c, e in zip(self.comm_s, self.exposed_s, strict=True))

    @property
    def packing_s(self) -> float:
        """Seconds of ops that pack; part of `compute_s`."""
        return sum(span.duration_s * span.times for span in self.spans if span.packs)

    @property
    def total_s(self) -> float:
        """A training step with its update."""
        return self.step_s + self.optimizer_s

    def hidden_shares(self) -> dict[tuple[str, int, str], float]:
        """Part of the seconds of collectives that is hidden, by (origin, axis, kind) of a tensor.

        A tensor in a bucket has the share of the bucket.
        """
        hidden: dict[tuple[str, int, str], float] = defaultdict(float)
        whole: dict[tuple[str, int, str], float] = defaultdict(float)
        for span in self.spans:
            if isinstance(span.stream, int):
                for origin, num_bytes in span.members:
                    key = (origin, span.stream, span.kind)
                    hidden[key] += num_bytes * span.hidden_s
                    whole[key] += num_bytes * span.duration_s
        return {key: hidden[key] / size if size else 0.0 for key, size in whole.items()}

    def by_phase(self) -> dict[str, float]:
        """Seconds of compute per phase, of exposed communication, and of the optimizer."""
        found: dict[str, float] = defaultdict(float)
        for span in self.spans:
            if span.stream == "compute":
                found[span.phase] += span.duration_s * span.times
        return {
            **found,
            "exposed communication": sum(self.exposed_s),
            **({"exposed copies": self.exposed_copy_s} if self.copy_s else {}),
            "optimizer": self.optimizer_s,
        }


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
    streams = Streams()
    spans: list[Span] = []
    sent: list[tuple[fx.Node, Span]] = []
    copies: list[tuple[fx.Node, Span]] = []
    for node in graph.nodes:
        found = _issue(node, streams, cluster, times) if node.op == "call_function" else ()
        spans += found
        for span in found:
            if span.stream != "compute":
                (sent if isinstance(span.stream, int) else copies).append((node, span))
    streams.wait(streams.comm_free_s)  # what nobody waited for ends before the step does
    compute_s = sum(s.duration_s * s.times for s in spans if s.stream == "compute")
    stood_s = sum(streams.exposed[node] * span.times for node, span in copies)
    comm, exposed = _by_axis(sent, streams.exposed, compute_s + stood_s, len(cluster.mesh_shape))
    return Simulation(
        step_s=compute_s + sum(exposed) + stood_s,
        compute_s=compute_s,
        comm_s=comm,
        exposed_s=exposed,
        optimizer_s=optimizer_seconds(cluster.device, parameter_bytes, optimizer),
        spans=tuple(_with_hidden(spans, [*sent, *copies], streams.exposed)),
        copy_s=sum(span.duration_s * span.times for _, span in copies),
        exposed_copy_s=stood_s,
    )


def _issue(
    node: fx.Node, streams: Streams, cluster: Cluster, times: OpTimes | None
) -> Sequence[Span]:
    """Let a node run, or wait; what it does on its streams."""
    phase, count = str(node.meta.get("phase", "forward")), int(node.meta.get("times", 1))
    origin = str(node.meta.get("origin", ""))
    if "overlapped" in node.meta:
        kind, axis, num_bytes, count = node.meta["overlapped"]
        compute_s, comm_s, exposed_s = call_seconds(node, cluster)
        start = streams.call(node, compute_s, exposed_s)
        members = ((origin, num_bytes),)
        return (
            Span(node.name, "compute", phase, start, compute_s, count, origin=origin),
            Span(node.name, axis, phase, start, comm_s, count, kind, 0.0, members, origin),
        )
    if "collective" in node.meta:
        kind, axis, num_bytes, count = node.meta["collective"]
        seconds = cluster.collective_seconds(CollectiveKind(kind), num_bytes, axis)
        start = streams.send(node, seconds, cluster.compute_share(axis))
        members = node.meta.get("members", ((origin, num_bytes),))
        return (Span(node.name, axis, phase, start, seconds, count, kind, 0.0, members, origin),)
    if node.args and isinstance(node.args[0], fx.Node) and node.args[0] in streams.ends:
        streams.wait(streams.ends[node.args[0]])
        return ()
    if node.target is ARRIVED:
        streams.stand_for(node.all_input_nodes[0])
        return ()
    if node.target in WITH_HOST and can_offload(cluster.device):
        seconds = node_seconds(node, cluster.device)
        start, way = streams.copy(node, seconds), "up" if node.target is FROM_HOST else "down"
        return (Span(node.name, way, phase, start, seconds, count, origin=origin),)
    found = times.seconds(node) if times is not None else None
    seconds = node_seconds(node, cluster.device) if found is None else found
    start, kind = streams.run(seconds), str(node.meta.get("packs", ""))
    return (Span(node.name, "compute", phase, start, seconds, count, kind, origin=origin),)


def _by_axis(
    sent: Iterable[tuple[fx.Node, Span]],
    exposed: Mapping[fx.Node, float],
    most_s: float,
    num_axes: int,
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds of collectives per mesh axis, all and exposed; hidden is at most `most_s`."""
    whole, hidden = [0.0] * num_axes, [0.0] * num_axes
    for node, span in sent:
        assert isinstance(span.stream, int)
        whole[span.stream] += span.duration_s * span.times
        hidden[span.stream] += (span.duration_s - exposed[node]) * span.times
    total = sum(hidden)
    share = min(1.0, most_s / total) if total > 0 else 1.0
    return tuple(whole), tuple(a - share * h for a, h in zip(whole, hidden, strict=True))


def _with_hidden(
    spans: Iterable[Span], sent: Iterable[tuple[fx.Node, Span]], exposed: Mapping[fx.Node, float]
) -> Iterable[Span]:
    left = {id(span): max(0.0, span.duration_s - exposed[node]) for node, span in sent}
    return (replace(s, hidden_s=left[id(s)]) if id(s) in left else s for s in spans)


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
    """Seconds of one update (`update.py`); what states on the host add is included.

    Args:
        device: whose memory is read.
        parameter_bytes: local bytes and dtype name of each trainable parameter.
        optimizer: as for `optimizer_state_bytes`; None for no update.
    """
    return sum(
        update_seconds(device, optimizer, n, dtype) + offload_seconds(device, optimizer, n, dtype)
        for n, dtype in parameter_bytes
    )
