"""Ranks see that all of them do, where a module does not just repeat its last step.

All steps of a module are planned by all ranks together, but later ranks may differ in which they
run: one has a shorter last batch than the others, or has caught an error of its own between forward
and backward. It would enter the collectives of one step, and the others those of another, with sums
of unlike gradients, or an abort where sizes differ. So before a module turns to a step of another
kind than its last one, or has had no backward of that, each rank waits until all have come to do
the same. A rank that alone does so raises, and the others hear of its end.

Training that repeats one kind of step waits for nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from autopar._compat import default_store
from autopar.errors import AutoparError
from autopar.runtime import counted, lost
from autopar.runtime.agree import arrived, patience_s

__all__ = ["Turns"]

_LOOK_S = 1.0  # between looks for ranks that do not come
_WANTED = (
    "Pass every rank the same global batch (model.shard_dataloader(loader) loads each rank's rows "
    "of one), and run the same calls on all of them, also where one of them has caught an error"
)


class Turns:
    """What a module has run last on this rank."""

    def __init__(self) -> None:
        self._last = ""
        self._owed = 0  # backwards of it

    def begin(self, fingerprint: str, devices: int) -> None:
        """Count a step that communicates, if all ranks run it (`counted.py`).

        Args:
            fingerprint: of its plan.
            devices: that it runs on.

        Raises:
            AutoparError: other ranks do not turn to such a step, have run other steps, or have not
                failed in the last one, as this one has.
        """
        if not counted.is_shared(devices):
            return
        lost.check_on()
        if self._last and (self._owed or fingerprint != self._last):
            _come_together(f"{fingerprint}, {self._owed} left out")
        counted.begin_step(fingerprint)
        self._last, self._owed = fingerprint, 0

    def owe(self) -> None:
        """A backward belongs to the step that was begun."""
        self._owed += 1

    def pay(self) -> None:
        """A backward begins."""
        self._owed = max(0, self._owed - 1)


def _come_together(what: str) -> None:
    """Wait until all ranks have come here for their next step with the same `what`.

    Each rank asks the store a few times, and not for every other one, unless some do not come.
    """
    store, rank, step = default_store(), dist.get_rank(), counted.now().begun + 1
    mine, done = f"{step}:{what}", f"autopar/turn/{step}/done"
    store.set(_turned(rank), mine)
    if store.add(f"autopar/turn/{mine}", 1) == dist.get_world_size():
        store.set(done, "")
    deadline = time.monotonic() + patience_s()
    while not arrived(store, done, _LOOK_S):
        apart = next(_apart(store, rank, step, mine), None)
        if apart is None and time.monotonic() > deadline:
            apart = f"not all ranks have done so in {patience_s():g} s (AUTOPAR_TIMEOUT_S)"
        if apart is not None:
            message = (
                f"rank {rank} comes to step {step} with a batch of another shape than its last "
                f"one, in another mode, or without the backward of its last step, but {apart}. "
                f"{_WANTED}. Start all ranks again, and load the last checkpoint."
            )
            lost.refuse(message)
            raise AutoparError(message)
    _forget(store, step, mine)


_passed: list[tuple[str, str]] = []  # keys of the last meeting, which all ranks have left


def _forget(store: Any, step: int, mine: str) -> None:
    """Leave nothing of the meeting before this one in the store."""
    if dist.get_rank() == 0:
        for key in _passed.pop() if _passed else ():
            store.delete_key(key)
        _passed.append((f"autopar/turn/{mine}", f"autopar/turn/{step}/done"))


def _turned(rank: int) -> str:
    return f"autopar/turned/{rank}"


def _apart(store: Any, rank: int, step: int, mine: str) -> Iterator[str]:
    """What other ranks do instead, of those that are known to do something else."""
    for other in range(dist.get_world_size()):
        if other == rank:
            continue
        if store.check([_turned(other)]):
            theirs = store.get(_turned(other)).decode()
            if theirs.startswith(f"{step}:"):
                if theirs != mine:
                    yield f"rank {other} comes to it with one of yet another kind"
                continue
        if elsewhere := lost.elsewhere(store, other):
            yield elsewhere
        elif lost.counts_of(store, other).backwards > counted.now().backwards:
            yield f"rank {other} has begun that backward"
