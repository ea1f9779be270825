"""Measures live bytes: of every storage that ops create inside the mode, until it is freed.

A process group's thread drops what a collective sent, and its views of what arrived, only some time
after the wait has returned, later the busier the machine is. So a wait in this mode lasts until the
program alone holds what arrived, and before a peak is noted, the thread is given time to drop what
was sent: whatever is still there is held by the program.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar._compat import storage_users
from autopar.core.work import is_away

__all__ = ["LiveBytes"]

_PATIENCE_S = 0.5
_POLL_S = 1e-3


class LiveBytes(TorchDispatchMode):
    """Peak of the bytes that are live after any op, on any device.

    What exists before is counted where it is handed to `hold`; scratch inside an op is not seen,
    and what an op puts into host memory is not counted, on a CPU either.

    Attributes:
        peak_bytes: the largest sum seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0
        self._held: set[int] = set()
        self._sent: dict[int, list[StorageWeakRef]] = {}  # by the storage of what arrives
        self._lent: list[StorageWeakRef] = []

    def hold(self, tensors: Any) -> None:
        """Count tensors (DTensors by their local part) that exist already."""
        for tensor in pytree.tree_leaves(tensors):
            if isinstance(tensor, Tensor):
                local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                self._add(local)
                self._held.add(local.untyped_storage()._cdata)
        self._note()

    def lend(self, tensors: Any) -> None:
        """Tensors that the program may have dropped, and another thread is about to."""
        self._lent += self._references(tensors)

    def _references(self, tensors: Any) -> list[StorageWeakRef]:
        """To the storages that do not last anyway."""
        storages = [t.untyped_storage() for t in pytree.tree_leaves(tensors) if _is_tensor(t)]
        return [StorageWeakRef(s) for s in storages if s._cdata not in self._held]

    def _add(self, tensor: Tensor) -> None:
        if tensor.device.type == "meta" or type(tensor) not in (Tensor, torch.nn.Parameter):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self.live.get(key)
        if known is None or known[0].expired():
            self.live[key] = (StorageWeakRef(storage), storage.nbytes())

    def _total(self) -> int:
        for key in [key for key, (ref, _) in self.live.items() if ref.expired()]:
            del self.live[key]
        return sum(size for _, size in self.live.values())

    def _note(self) -> None:
        total = self._total()
        if total > self.peak_bytes and self._lent:
            self._lent_expires()
            total = self._total()
        self.peak_bytes = max(self.peak_bytes, total)

    def _lent_expires(self) -> None:
        _wait_until(lambda: all(ref.expired() for ref in self._lent))
        self._lent = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and not is_away(func):
                self._add(tensor)
        if func.namespace == "_c10d_functional":
            self._collective(func, args, result)
        self._note()
        return result

    def _collective(self, func: Any, args: Any, result: Any) -> None:
        """Note what a collective sends; when it was waited for, its thread is to let go of that."""
        (result,) = pytree.tree_leaves(result)
        key = result.untyped_storage()._cdata
        if func is torch.ops._c10d_functional.wait_tensor.default:
            self._lent += self._sent.pop(key, [])
            _wait_until(lambda: storage_users(result) == 1)
        else:
            self._sent[key] = self._references(args)


def _wait_until(done: Callable[[], bool]) -> None:
    """Give other threads some time."""
    deadline = time.monotonic() + _PATIENCE_S
    while not done() and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)
