"""Measured seconds of single ops, kept between runs: filled when first asked, then looked up.

The key is the device's name, the op with its other arguments, the shapes, strides and dtypes of its
tensors, and torch's version. Values do not matter to the seconds, so ops run on ones (integers: on
zeros, which index anything).
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autopar.cost_model.measure import cpu_name
from autopar.cost_model.timing import median_seconds

__all__ = ["OpDatabase"]

_SCHEMA = "CREATE TABLE IF NOT EXISTS ops (key TEXT PRIMARY KEY, seconds REAL)"


class OpDatabase:
    """Seconds of ops on the device at hand.

    Args:
        path: SQLite file, made when needed.
        device: where ops run.
        share: factor on measured seconds: ranks per core, where ranks share cores.
        rounds: timings of each op; the median is kept.
    """

    def __init__(
        self, path: str | Path, device: str = "cpu", *, share: float = 1.0, rounds: int = 5
    ) -> None:
        self.path = Path(path)
        self.device = torch.device(device)
        self.share = share
        self.rounds = rounds
        self.measured = 0
        self._known: dict[str, float] = {}

    def seconds(self, node: fx.Node) -> float | None:
        """Seconds of the op of a node on its shapes; None for one that is not run alone."""
        values = [n.meta.get("val") for n in node.all_input_nodes]
        if not isinstance(node.target, torch._ops.OpOverload) or not all(
            isinstance(v, Tensor) for v in values
        ):
            return None
        key = self.key(node)
        if key not in self._known:
            with closing(self._open()) as database, database:
                row = database.execute("SELECT seconds FROM ops WHERE key = ?", (key,)).fetchone()
                if row is None:
                    row = (self._measure(node),)
                    database.execute("INSERT OR REPLACE INTO ops VALUES (?, ?)", (key, row[0]))
            self._known[key] = float(row[0])
        return self._known[key] * self.share

    def key(self, node: fx.Node) -> str:
        """What the seconds of a node depend on."""
        args, kwargs = pytree.tree_map_only(
            fx.Node, lambda n: _described(n.meta["val"]), (node.args, node.kwargs)
        )
        parts = [self._name(), torch.__version__, str(node.target), repr(args), repr(kwargs)]
        return json.dumps(parts)

    def _name(self) -> str:
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return f"{cpu_name()}, {torch.get_num_threads()} of {os.cpu_count()} cores"

    def _open(self) -> sqlite3.Connection:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        database = sqlite3.connect(self.path, timeout=60)
        database.execute(_SCHEMA)
        return database

    def _measure(self, node: fx.Node) -> float:
        args, kwargs = pytree.tree_map_only(
            fx.Node, lambda n: self._tensor(n.meta["val"]), (node.args, node.kwargs)
        )
        call: Callable[..., Any] = node.target  # type: ignore[assignment]
        self.measured += 1
        with torch.no_grad():
            (found,) = median_seconds(
                [lambda: call(*args, **kwargs)], str(self.device), self.rounds
            )
        return found

    def _tensor(self, fake: Tensor) -> Tensor:
        value = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=self.device)
        return value.fill_(1) if fake.is_floating_point() else value.zero_()


def _described(value: Tensor) -> tuple[Any, ...]:
    return tuple(value.shape), tuple(value.stride()), str(value.dtype)
