"""Measures live bytes: every storage that ops create while the mode is on, until it is freed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["LiveBytes"]


class LiveBytes(TorchDispatchMode):
    """Peak of the bytes that are live after any op, on any device.

    What exists before is counted where it is handed to `hold`; scratch inside an op is not seen.

    Attributes:
        peak_bytes: the largest sum seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0

    def hold(self, tensors: Any) -> None:
        """Count tensors (DTensors by their local part) that exist already."""
        for tensor in pytree.tree_leaves(tensors):
            if isinstance(tensor, Tensor):
                self._add(tensor.to_local() if hasattr(tensor, "to_local") else tensor)
        self._note()

    def _add(self, tensor: Tensor) -> None:
        if tensor.device.type == "meta" or type(tensor) not in (Tensor, torch.nn.Parameter):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self.live.get(key)
        if known is None or known[0].expired():
            self.live[key] = (StorageWeakRef(storage), storage.nbytes())

    def _note(self) -> None:
        for key in [key for key, (ref, _) in self.live.items() if ref.expired()]:
            del self.live[key]
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self.live.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._add(tensor)
        self._note()
        return result
