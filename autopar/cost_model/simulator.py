"""Seconds of a step by simulating its emitted program on streams of compute and communication.

The host issues nodes in order. An op runs when the compute stream is free. A collective starts when
everything issued before it on the compute stream is done (the event that torch's process groups
record) and its link is free: inside nodes and between them are two, as the groups of a mesh axis
have streams of their own. A wait stops the compute stream until its collective has ended. With C
the seconds of ops, and I those in which the compute stream stands at waits, or makes no headway as
a collective takes its share of the device::

    total = C + I        exposed = I        hidden = (seconds of collectives) - I

The link is busy for the whole of such a stop, so every second of it belongs to one collective. What
one hides behind another, on another link, is counted no more than C can hide: hidden communication
is at most C.

Copies of activations to host memory and back have a stream each way. One starts when everything
issued before it is done and its stream is free, and one that comes back no sooner than it has gone
to the host; where compute stands at the wait for one, these seconds are added to I, as the copy's.

A call that sends and multiplies at once (`overlapped_calls.py`) begins when both streams are free,
and takes both; what it takes longer than its ops is exposed.

In a folded program a block that stands for k runs k times (`unrolled.py`), so that queues grow as
they do in the whole program; what is exposed of a node is the mean of all times. Hidden is no more
than C and what compute stands for copies, whatever a node counts for.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from torch import fx

from autopar.core.host import ARRIVED, FROM_HOST, WITH_HOST
from autopar.cost_model.cluster import Cluster
from autopar.cost_model.collectives import CollectiveKind
from autopar.cost_model.emitted_ops import node_seconds
from autopar.cost_model.offload import can_offload, offload_seconds
from autopar.cost_model.overlapped_calls import call_seconds
from autopar.cost_model.profile import DeviceProfile
from autopar.cost_model.streams import Streams
from autopar.cost_model.unrolled import Turn, blocks_of, unrolled
from autopar.cost_model.update import update_seconds

__all__ = [
    "OpTimes",
    "Simulation",
    "Span",
    "optimizer_seconds",
    "simulate",
]


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
        start_s, duration_s: when it runs first, and for how long each time.
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
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    calls = {node: _call(node, cluster, times) for node in nodes}
    spans: list[Span] = []
    sent: list[tuple[fx.Node, Span]] = []
    copies: list[tuple[fx.Node, Span]] = []
    runs: Counter[fx.Node] = Counter()
    computing = {node: call.seconds for node, call in calls.items() if call.does == "run"}
    blocks = blocks_of(nodes, computing)
    for node in nodes:
        if blocks[node] > 1 and node.meta.get("closes_at"):
            calls[node] = _together(calls[node], blocks[node], cluster)
    for turn in unrolled(nodes, computing, blocks):
        runs.update(turn.nodes)
        if turn.number:
            _again(turn, calls, streams)
            continue
        (node,) = turn.nodes
        found = calls[node].spans(_issue(calls[node], turn, streams))
        spans += found
        for span in found:
            if span.stream != "compute":
                (sent if isinstance(span.stream, int) else copies).append((node, span))
    streams.finish()  # what nobody waited for ends before the step does
    lost = {node: seconds / runs[node] for node, seconds in streams.exposed.items()}
    compute_s = sum(s.duration_s * s.times for s in spans if s.stream == "compute")
    stood_s = sum(lost.get(node, 0.0) * span.times for node, span in copies)
    comm, exposed = _by_axis(sent, lost, compute_s + stood_s, len(cluster.mesh_shape))
    return Simulation(
        step_s=compute_s + sum(exposed) + stood_s,
        compute_s=compute_s,
        comm_s=comm,
        exposed_s=exposed,
        optimizer_s=optimizer_seconds(cluster.device, parameter_bytes, optimizer),
        spans=tuple(_with_hidden(spans, [*sent, *copies], lost)),
        copy_s=sum(span.duration_s * span.times for _, span in copies),
        exposed_copy_s=stood_s,
    )


class _Call(NamedTuple):
    """What a node does on the streams: "run", "send", "wait", "copy", "arrive" or "call" a peer.

    Attributes:
        seconds: of the op, the collective or the copy.
        sends: axis, kind, bytes and seconds of a collective.
        exposed_s: of a call that sends while it computes.
        taken: share of compute that a collective takes.
        link: that a collective uses.
        shared: seconds of a bucket with those of 1, 2, … blocks; the last is full.
    """

    node: fx.Node
    does: str
    seconds: float = 0.0
    sends: tuple[int, str, int, float] | None = None
    exposed_s: float = 0.0
    taken: float = 0.0
    link: str = ""
    shared: tuple[float, ...] = ()

    def spans(self, start_s: float) -> Sequence[Span]:
        """What it does, from then on."""
        meta = self.node.meta
        name, origin = self.node.name, str(meta.get("origin", ""))
        phase, count = str(meta.get("phase", "forward")), int(meta.get("times", 1))
        found = []
        if self.does in ("run", "call"):
            kind = str(meta.get("packs", ""))
            found.append(
                Span(name, "compute", phase, start_s, self.seconds, count, kind, origin=origin)
            )
        if self.does == "copy":
            way = "up" if self.node.target is FROM_HOST else "down"
            found.append(Span(name, way, phase, start_s, self.seconds, count, origin=origin))
        if self.sends is not None:
            axis, kind, num_bytes, seconds = self.sends
            count = (meta.get("overlapped") or meta["collective"])[3]
            members = meta.get("members", ((origin, num_bytes),))
            found.append(
                Span(name, axis, phase, start_s, seconds, count, kind, 0.0, members, origin)
            )
        return found


def _call(node: fx.Node, cluster: Cluster, times: OpTimes | None) -> _Call:
    """What a node does, and what that takes."""
    if "overlapped" in node.meta:
        kind, axis, num_bytes, _ = node.meta["overlapped"]
        compute_s, comm_s, exposed_s = call_seconds(node, cluster)
        sends = (axis, kind, num_bytes, comm_s)
        return _Call(node, "call", compute_s, sends, exposed_s, link=cluster.link(axis))
    if "collective" in node.meta:
        kind, axis, num_bytes, _ = node.meta["collective"]
        seconds = cluster.collective_seconds(CollectiveKind(kind), num_bytes, axis)
        sends, taken = (axis, kind, num_bytes, seconds), cluster.compute_share(axis)
        return _Call(node, "send", seconds, sends, taken=taken, link=cluster.link(axis))
    source = node.args[0] if node.args else None
    if isinstance(source, fx.Node) and source.op == "call_function" and "collective" in source.meta:
        awaited = source.meta["collective"][1]
        return _Call(node, "wait", link=cluster.link(awaited))
    if node.target is ARRIVED:
        return _Call(node, "arrive")
    if node.target in WITH_HOST and can_offload(cluster.device):
        return _Call(node, "copy", node_seconds(node, cluster.device))
    found = times.seconds(node) if times is not None else None
    return _Call(node, "run", node_seconds(node, cluster.device) if found is None else found)


def _again(turn: Turn, calls: Mapping[fx.Node, _Call], streams: Streams) -> None:
    """Run nodes for another block."""
    if len(turn.nodes) > 1:
        streams.run(sum(calls[node].seconds for node in turn.nodes))
    else:
        _issue(calls[turn.nodes[0]], turn, streams)


def _together(call: _Call, blocks: int, cluster: Cluster) -> _Call:
    """A reduction that goes out with those of the next blocks, until a bucket is full."""
    assert call.sends is not None
    axis, kind, num_bytes, _ = call.sends
    most = min(blocks, math.ceil(call.node.meta["closes_at"] / max(1, num_bytes)))
    counts = range(1, most + 1)
    shared = [cluster.collective_seconds(CollectiveKind(kind), n * num_bytes, axis) for n in counts]
    full, rest = divmod(blocks, most)
    mean_s = (full * shared[-1] + (shared[rest - 1] if rest else 0.0)) / blocks
    sends = (axis, kind, num_bytes, mean_s)
    return call._replace(seconds=mean_s, sends=sends, shared=tuple(shared))


def _issue(call: _Call, turn: Turn, streams: Streams) -> float:
    """Let a node run, send or wait, for the block of this number; returns when it starts."""
    node, number = call.node, turn.number
    match call.does:
        case "run":
            return streams.run(call.seconds)
        case "send" if call.shared and turn.times > 1:
            count = number % len(call.shared) + 1
            if count == len(call.shared) or number + 1 == turn.times:
                return streams.send(node, call.link, call.shared[count - 1], call.taken, number)
        case "send":
            return streams.send(node, call.link, call.seconds, call.taken, number)
        case "wait":
            streams.wait(node.all_input_nodes[0], call.link, number)
        case "arrive":
            streams.stand_for(node.all_input_nodes[0], number)
        case "copy":
            return streams.copy(node, call.seconds, number)
        case "call":
            return streams.call(node, call.link, call.seconds, call.exposed_s)
    return streams.compute_s


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
        hidden[span.stream] += (span.duration_s - exposed.get(node, 0.0)) * span.times
    total = sum(hidden)
    share = min(1.0, most_s / total) if total > 0 else 1.0
    return tuple(whole), tuple(a - share * h for a, h in zip(whole, hidden, strict=True))


def _with_hidden(
    spans: Iterable[Span], sent: Iterable[tuple[fx.Node, Span]], exposed: Mapping[fx.Node, float]
) -> Iterable[Span]:
    left = {id(span): max(0.0, span.duration_s - exposed.get(node, 0.0)) for node, span in sent}
    return (replace(s, hidden_s=left[id(s)]) if id(s) in left else s for s in spans)


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
