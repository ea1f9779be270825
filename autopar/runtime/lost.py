"""Which rank is gone, when communication fails.

Every process writes a growing number to the process group's store, from a thread. Where a
collective or a transfer fails, the survivors see whose number stands still. The first that knows
leaves its verdict in the store: by the time that others are thrown out of their calls, it may have
gone too, for the same reason.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist

from autopar._compat import cloned_store, default_store
from autopar.errors import AutoparError, LostRankError

__all__ = ["beat", "lost_ranks", "lost_text", "naming_lost_ranks"]

_INTERVAL_S = 2.0
_SILENCE_S = 10.0
_VERDICT = "autopar/lost"
_SIGNS = ("gloo", "NCCL", "Connection", "connection", "Socket", "recvValue", "Broken pipe")


class _Heart(NamedTuple):
    """The thread that writes this process's number, and what ends it."""

    store: Any
    stop: threading.Event
    thread: threading.Thread


_hearts: list[_Heart] = []  # of the process group that is in use


def _key(rank: int) -> str:
    return f"autopar/beat/{rank}"


def beat() -> None:
    """Let the other ranks see that this process lives, from now on."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    store = default_store()
    if _hearts and _hearts[0].store is store:
        return
    _rest()
    # a connection of its own: a wait on the store would hold the other one
    own, rank, stop = cloned_store(store), dist.get_rank(), threading.Event()
    own.set(_key(rank), "0")
    thread = threading.Thread(target=_beat, args=(stop, own, rank), daemon=True)
    _hearts.append(_Heart(store, stop, thread))
    thread.start()


def _beat(stop: threading.Event, own: Any, rank: int) -> None:
    number = 0
    while not stop.wait(_INTERVAL_S):
        number += 1
        try:
            own.set(_key(rank), str(number))
        except RuntimeError:  # the process that holds the store is gone, and with it the job
            return


@atexit.register
def _rest() -> None:
    """End the thread: one that comes back from the store into an interpreter at its end aborts."""
    while _hearts:
        heart = _hearts.pop()
        heart.stop.set()
        heart.thread.join(_SILENCE_S)


def lost_ranks() -> list[int]:
    """Ranks whose process has ended; waits for signs of life."""
    store, world = default_store(), dist.get_world_size()
    if store.check([_VERDICT]):
        return _ranks(store.get(_VERDICT))
    silent = {r: store.get(_key(r)) for r in range(world) if store.check([_key(r)])}
    deadline = time.monotonic() + _SILENCE_S
    while silent and time.monotonic() < deadline:
        time.sleep(_INTERVAL_S / 4)
        if store.check([_VERDICT]):
            return _ranks(store.get(_VERDICT))
        silent = {rank: seen for rank, seen in silent.items() if store.get(_key(rank)) == seen}
    if not silent:
        return []
    return _ranks(store.compare_set(_VERDICT, "", ",".join(map(str, sorted(silent)))))


def _ranks(verdict: bytes) -> list[int]:
    return [int(rank) for rank in verdict.decode().split(",")]


@contextmanager
def naming_lost_ranks(doing: str) -> Iterator[None]:
    """Where communication fails inside because ranks are gone, say which.

    Args:
        doing: what this rank was doing, for the message.

    Raises:
        LostRankError: ranks are gone; else the error is the one that came.
    """
    try:
        yield
    except AutoparError:
        raise
    except RuntimeError as error:
        told = lost_text(error)
        if told is None:
            raise
        raise LostRankError(
            f"rank {dist.get_rank()} stops {doing}, because {told}: see what it printed. "
            "Start all ranks again, and load the last checkpoint."
        ) from error


def lost_text(error: BaseException) -> str | None:
    """Who is gone, where that is what an error comes from; None if nobody is, or it is not."""
    if not dist.is_initialized() or not any(sign in str(error) for sign in _SIGNS):
        return None
    try:
        gone = lost_ranks()
    except RuntimeError as failure:
        return f"the store of the process group does not answer ({failure}): rank 0 may be gone"
    if not gone:
        return None
    return f"rank{'s' if len(gone) > 1 else ''} {', '.join(map(str, gone))} ended"
