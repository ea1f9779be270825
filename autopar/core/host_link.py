"""Copies between a device and host memory: both ways at once, and beside what the host computes.

Each way has a stream of its own. Host and device of a CPU mesh are one memory: copies are made
there all the same, when they are asked for. Host memory for an accelerator is pinned: torch keeps
its blocks from step to step, and gives one out again once the copies that read it are done.

Optimizer states go down and up in turns that `begin` and `end` bound; activations one by one, with
`keep`, `fetch` and `wait_for`.
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
        # by address, of which an allocator has so many: the copies that were begun there last
        self._kept: dict[int, torch.Event] = {}
        self._fetched: dict[int, torch.Event] = {}

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

    def keep(self, tensor: Tensor) -> Tensor:
        """A copy in host memory, made beside what the device is given to do from here on.

        The device's memory goes to no other tensor before the copy is done, unless an op writes
        over it: such an op must come behind `wait_for_kept`. What the host reads of
        the copy without `fetch`, it must wait for itself.
        """
        if self._streams is None:
            return tensor.clone()
        down = self._streams[0]
        down.wait_stream(torch.accelerator.current_stream(self._device))
        host = self._room_for(tensor)
        with _on(down):
            self._copy(host, tensor)
        self._held_by(tensor, down)
        self._kept[host.data_ptr()] = down.record_event()
        return host

    def wait_for_kept(self, host: Tensor) -> None:
        """What the device is given to do from here on waits for a copy that `keep` makes."""
        if self._streams is not None:
            event = self._kept[host.data_ptr()]
            torch.accelerator.current_stream(self._device).wait_event(event)

    def fetch(self, to: Tensor, host: Tensor) -> None:
        """Begin to copy what `keep` has put into host memory to a tensor on the device.

        Its memory may have been another tensor's, which what was given to the device still reads.
        """
        if self._streams is None:
            to.copy_(host)
            return
        up = self._streams[1]
        up.wait_stream(torch.accelerator.current_stream(self._device))
        up.wait_event(self._kept[host.data_ptr()])
        with _on(up):
            self._copy(to, host)
        self._fetched[to.data_ptr()] = up.record_event()

    def wait_for(self, tensor: Tensor) -> None:
        """What the device is given to do from here on waits for a tensor that `fetch` fills."""
        if self._streams is not None:
            event = self._fetched[tensor.data_ptr()]
            torch.accelerator.current_stream(self._device).wait_event(event)

    # what tests without an accelerator have stand-ins for, beside the streams
    def _room_for(self, tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=HOST, pin_memory=True)

    def _copy(self, to: Tensor, source: Tensor) -> None:
        to.copy_(source, non_blocking=True)

    def _held_by(self, tensor: Tensor, stream: torch.Stream) -> None:
        tensor.record_stream(stream)


def _on(stream: torch.Stream) -> AbstractContextManager[object]:
    return stream


@cache
def link_of(device: torch.device) -> HostLink:
    """The link of a device to the host."""
    return HostLink(device)
