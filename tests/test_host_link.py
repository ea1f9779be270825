"""Copies of activations on streams of their own, with stand-ins that run as late as they may.

What is given to a stream waits in a queue, and runs when another stream waits for it, or at the end
in any order. So a value is right only where the link makes one stream wait for the other.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from autopar.codegen.passes.in_place import reduce_in_place
from autopar.core import host_link
from autopar.core.host import ARRIVED, FETCHED, FROM_HOST, STORED, TO_HOST, copy_at_once
from autopar.core.host_link import HostLink

c10d = torch.ops._c10d_functional


class Late:
    """A stream that does nothing before it must."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], Any]] = []
        self.done = 0

    def run(self, until: int | None = None) -> None:
        until = len(self.queue) if until is None else until
        while self.done < until:
            self.done += 1
            self.queue[self.done - 1]()

    def record_event(self) -> tuple[Late, int]:
        return self, len(self.queue)

    def wait_event(self, event: tuple[Late, int]) -> None:
        stream, until = event
        self.queue.append(lambda: stream.run(until))

    def wait_stream(self, stream: Late) -> None:
        self.wait_event(stream.record_event())

    def __enter__(self) -> None:
        Link.current = self

    def __exit__(self, *error: Any) -> None:
        Link.current = Link.compute


class Link(HostLink):
    """Of a device whose streams are late."""

    compute = current = Late()

    def __init__(self) -> None:
        super().__init__(host_link.HOST)
        Link.compute = Link.current = Late()
        self.held: list[tuple[Tensor, Any]] = []
        self.ways = Late(), Late()
        self._streams = self.ways  # type: ignore[assignment]

    def _room_for(self, tensor: Tensor) -> Tensor:
        return torch.full_like(tensor, -1.0)

    def _copy(self, to: Tensor, source: Tensor) -> None:
        Link.current.queue.append(lambda: to.copy_(source))

    def _held_by(self, tensor: Tensor, stream: Any) -> None:
        self.held.append((tensor, stream))


@pytest.mark.parametrize("seed", range(20))
def test_streams_wait_for_what_they_read(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward of some blocks, their backward with the next copy begun early, in two steps."""
    link, rng = Link(), random.Random(seed)
    compute, count = Link.compute, 4
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: compute)
    found: list[Tensor] = []
    old: list[Tensor] = []
    rooms = [torch.zeros(3) for _ in range(count)]  # memory that steps use again
    hosts: list[Tensor] = []
    for step in range(2):
        hosts = []
        for block in range(count):
            x, value = torch.zeros(3), float(10 * step + block)
            compute.queue.append(lambda x=x, value=value: x.fill_(value))
            hosts.append(link.keep(x))
            assert link.held[-1] == (x, link.ways[0])
        for room in rooms:  # something reads what was there before
            compute.queue.append(lambda room=room: old.append(room.clone()))
        link.fetch(rooms[-1], hosts[-1])
        for block in reversed(range(count)):
            if block:
                link.fetch(rooms[block - 1], hosts[block - 1])
            link.wait_for(rooms[block])
            compute.queue.append(lambda block=block: found.append(rooms[block].clone()))
        streams = [*link.ways, compute]
        rng.shuffle(streams)
        for stream in streams:
            stream.run()
    expected = [float(10 * step + b) for step in range(2) for b in reversed(range(count))]
    assert [float(x[0]) for x in found] == expected
    assert [float(x[0]) for x in old] == [0.0] * count + [float(b) for b in range(count)]


def test_nothing_waits_that_need_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute goes on beside a copy, and what comes back waits for its own way out alone."""
    link = Link()
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: Link.compute)
    first, second = link.keep(torch.ones(2)), link.keep(torch.ones(2))
    Link.compute.run()
    assert link.ways[0].done == 0
    link.fetch(torch.zeros(2), first)
    link.ways[1].run()
    assert 0 < link.ways[0].done < len(link.ways[0].queue)
    assert float(first[0]) == 1.0 and float(second[0]) == -1.0


def test_what_is_stored_may_be_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Inductor does with a tensor that no later op reads."""
    for waits in (False, True):
        link = Link()
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: Link.compute)
        monkeypatch.setattr("autopar.core.host.link_of", lambda device, link=link: link)
        x = torch.ones(2)
        host = (torch.ops.autopar.stored if waits else torch.ops.autopar.to_host)(x)
        Link.compute.queue.append(lambda x=x: x.zero_())
        Link.compute.run()
        link.ways[0].run()
        assert float(host[0]) == float(waits)


def test_inductor_gets_no_copy_that_runs_beside_compute() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    away = graph.call_function(TO_HOST, (x,))
    back = graph.call_function(FROM_HOST, (away,), {"device": torch.device("cpu")})
    graph.output((graph.call_function(ARRIVED, (back,)),))
    copy_at_once(graph)
    assert [n.target for n in graph.nodes if n.op == "call_function"] == [STORED, FETCHED]
    assert float(fx.GraphModule(torch.nn.Module(), graph)(torch.ones(2))[0][0]) == 1.0


def test_an_all_reduce_does_not_write_over_what_leaves() -> None:
    """Its operand may still be read by the copy."""
    for copied in (False, True):
        graph = fx.Graph()
        x = graph.placeholder("x")
        product = graph.call_function(torch.ops.aten.mul.Tensor, (x, 2.0))
        nodes = [product]
        if copied:
            nodes.append(graph.call_function(TO_HOST, (product,)))
        sent = graph.call_function(c10d.all_reduce.default, (product, "sum", "0"))
        done = graph.call_function(c10d.wait_tensor.default, (sent,))
        graph.output((done, *nodes[1:]))
        for node in (x, *nodes, sent, done):
            node.meta = {"val": torch.empty(4, device="meta"), "phase": "forward"}
        sent.meta["collective"] = ("all_reduce", 0, 16, 1)
        assert reduce_in_place(graph, lambda node: node.meta.get("phase")) == (not copied)
