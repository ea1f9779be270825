"""Activations that wait in host memory from the forward to the backward, as ops of the graph.

- ``autopar::to_host``: a copy in host memory; the forward goes on beside it.
- ``autopar::from_host``: begins the way back to the device.
- ``autopar::arrived``: what `from_host` yields, once it is there.
- ``autopar::fetched``: both in one, for compilers that know of no views of other ops' results.
- ``autopar::stored``: `to_host`, done before the forward goes on, for compilers that write over
  what no later op reads.

Planned and traced graphs have the first two; the lowering of `from_host` (`codegen/lowerings/
host.py`) adds the third, so that passes may begin a copy before its value is needed. What
is in host memory keeps its layout, as devices send nothing to each other from there. On an
accelerator each way is a stream of its own (`host_link.py`); that has never run on a GPU, only with
stand-ins for its streams. On a CPU, whose memory is the host's, copies are made where they stand.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from autopar.core.host_link import HOST, link_of
from autopar.core.library import KERNEL, LIBRARY

__all__ = [
    "ARRIVED",
    "AWAY",
    "FETCHED",
    "FROM_HOST",
    "STORED",
    "TO_HOST",
    "WITH_HOST",
    "copy_at_once",
]

LIBRARY.define("to_host(Tensor x) -> Tensor")
LIBRARY.define("stored(Tensor x) -> Tensor")
LIBRARY.define("from_host(Tensor x, *, Device device) -> Tensor")
LIBRARY.define("arrived(Tensor(a) x) -> Tensor(a)")
LIBRARY.define("fetched(Tensor x, *, Device device) -> Tensor")


def _to_host(x: Tensor) -> Tensor:
    return link_of(x.device).keep(x)


def _stored(x: Tensor) -> Tensor:
    host = _to_host(x)
    link_of(x.device).wait_for_kept(host)
    return host


def _from_host(x: Tensor, *, device: torch.device) -> Tensor:
    to = torch.empty_like(x, device=device, pin_memory=False)
    link_of(to.device).fetch(to, x)  # whose device has a number, as that of what was sent
    return to


def _arrived(x: Tensor) -> Tensor:
    link_of(x.device).wait_for(x)
    return x


def _fetched(x: Tensor, *, device: torch.device) -> Tensor:
    return _arrived(_from_host(x, device=device))


LIBRARY.impl("to_host", _to_host, KERNEL)
LIBRARY.impl("stored", _stored, KERNEL)
LIBRARY.impl("from_host", _from_host, KERNEL)
LIBRARY.impl("arrived", _arrived, KERNEL)
LIBRARY.impl("fetched", _fetched, KERNEL)


@torch.library.register_fake("autopar::stored", lib=LIBRARY)
@torch.library.register_fake("autopar::to_host", lib=LIBRARY)
def _to_host_fake(x: Tensor) -> Tensor:
    return torch.empty_like(x, device=HOST)


@torch.library.register_fake("autopar::fetched", lib=LIBRARY)
@torch.library.register_fake("autopar::from_host", lib=LIBRARY)
def _from_host_fake(x: Tensor, *, device: torch.device) -> Tensor:
    return torch.empty_like(x, device=device)


@torch.library.register_fake("autopar::arrived", lib=LIBRARY)
def _arrived_fake(x: Tensor) -> Tensor:
    return x


TO_HOST = torch.ops.autopar.to_host.default
STORED = torch.ops.autopar.stored.default
FROM_HOST = torch.ops.autopar.from_host.default
ARRIVED = torch.ops.autopar.arrived.default
FETCHED = torch.ops.autopar.fetched.default
WITH_HOST = (TO_HOST, FROM_HOST)
"""Copies between the device and host memory."""
AWAY = (TO_HOST, STORED)
"""Ops whose results are in host memory."""


def copy_at_once(graph: fx.Graph) -> None:
    """Let no copy run beside compute, in place: one that comes back begins where it is waited for.

    Inductor takes no op of others whose result is a view, and gives the memory of what it reads no
    more to another tensor at once, while a copy on a stream of its own would still read it.
    """
    for node in list(graph.nodes):
        if node.target is TO_HOST:
            node.target = STORED
        elif node.target is ARRIVED:
            (begun,) = node.all_input_nodes
            with graph.inserting_before(node):
                fetched = graph.call_function(FETCHED, begun.args, begun.kwargs)
            fetched.meta = dict(node.meta)
            node.replace_all_uses_with(fetched)
            graph.erase_node(node)
            graph.erase_node(begun)
