"""Copies between a device and host memory: both ways at once, and beside what the host computes.

Each way has a stream of its own. Host and device of a CPU mesh are one memory: copies are made
there all the same, when they are asked for. Host memory for an accelerator is pinned: torch keeps
its blocks from step to step, and gives one out again once the copies that read it are done.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor

__all__ = ["HOST", "HostLink", "link_of"]

HOST = torch.device("cpu")


class HostLink:
    """The way between one device and the host. Made by `link_of`, once for each device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: tuple[torch.Stream, torch.Stream] | None = None
        if device != HOST:
            self._streams = torch.Stream(device=device), torch.Stream(device=device)

    def begin(self) -> None:
        """What is copied from here on waits for what the device was given to do before."""
        if self._streams is not None:
            for stream in self._streams:
                stream.wait_stream(torch.accelerator.current_stream(self._device))

    def down(self, tensors: Iterable[Tensor]) -> tuple[list[Tensor], torch.Event | None]:
        """Copies in host memory, which are there after the event; None if they are at once."""
        if self._streams is None:
            return [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors], None
        copies = []
        with _on(self._streams[0]):
            for tensor in tensors:
                host = torch.empty(tensor.shape, dtype=tensor.dtype, device=HOST, pin_memory=True)
                copies.append(host.copy_(tensor, non_blocking=True))
        return copies, self._streams[0].record_event()

    def up(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copy to the first of each pair, on the device, from the second."""
        with _on(self._streams[1]) if self._streams is not None else nullcontext():
            for to, host in pairs:
                to.copy_(host, non_blocking=True)

    def end(self) -> None:
        """What the device is given to do from here on waits for all that goes up."""
        if self._streams is not None:
            torch.accelerator.current_stream(self._device).wait_stream(self._streams[1])


def _on(stream: torch.Stream) -> AbstractContextManager[object]:
    return stream


@cache
def link_of(device: torch.device) -> HostLink:
    """The link of a device to the host."""
    return HostLink(device)
