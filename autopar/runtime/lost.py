"""Finds out which rank is lost when communication fails.

A thread of every process writes a growing number to the process group's store. When a collective or
a transfer fails, the survivors see whose number has stopped. The first one that knows leaves its
verdict in the store: by the time that others get an error from their calls, it may have ended too,
for the same reason. A process that ends by an exception says so, and why.

Next to the number, a process writes which communicating steps it has begun (`counted.py`). So the
thread of a rank that waits for others before a step sees which of them have moved on, and answers
for them. A rank that waits long says where, for the others to print (`stalled.py`); one that waits
in a step after other steps than another rank's ends with the error that its next step would raise.

A step that failed on some ranks alone is not left behind by catching the error: others wait in it,
and would take this rank's next step for it. So a rank runs no step behind one that failed, unless
it failed on all of them.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch.distributed as dist

from autopar._compat import cloned_store, default_store
from autopar.errors import AutoparError, LostRankError
from autopar.runtime import counted
from autopar.runtime.counted import Counts
from autopar.runtime.stalled import Stall, communicating, waiting

__all__ = [
    "NEVER",
    "Life",
    "beat",
    "check_on",
    "counts_of",
    "elsewhere",
    "lost_text",
    "naming_lost_ranks",
    "refuse",
    "tell_failure",
    "tell_reason",
    "watching",
]

NEVER = "never: "
"""What the answer begins with that is given for a rank which does not come."""

_INTERVAL_S = 2.0
_SILENCE_S = 10.0
_VERDICT = "autopar/lost"
_SIGNS = ("gloo", "NCCL", "Connection", "connection", "Socket", "recvValue", "Broken pipe")


class _Heart(NamedTuple):
    """The thread that writes this process's number, and what ends it."""

    rank: int
    process: int
    store: Any
    stop: threading.Event
    thread: threading.Thread


_hearts: list[_Heart] = []  # of the process group that is in use
_FAILURES = 5  # of the store, one behind the other
_awaited: list[list[str]] = []  # a key of each rank, for which this one waits
_failed: list[str] = []  # the error of the step that this process has begun last
_refused: list[str] = []  # why it runs no more of them


def _key(rank: int) -> str:
    return f"autopar/beat/{rank}"


def _end(rank: int) -> str:
    return f"autopar/ended/{rank}"


def _reason(rank: int) -> str:
    return f"autopar/reason/{rank}"


def _waits(rank: int) -> str:
    return f"autopar/waits/{rank}"


def _failure(rank: int, step: int) -> str:
    return f"autopar/failed/{step}/{rank}"


def check_on() -> None:
    """See that this rank may go on to another step.

    Raises:
        AutoparError: another rank has run other steps, or has not failed in the last one, as this
            one has.
    """
    if _failed:
        _wait_for_failures(_failed.pop())
    if counted.unlike or _refused:
        raise AutoparError((counted.unlike or _refused)[0])


def refuse(reason: str) -> None:
    """Let this rank run no more steps that communicate: others wait in one that it has left."""
    _refused.append(reason)


def _written(number: int) -> str:
    """What this process writes of itself."""
    return ":".join(map(str, (number, *counted.now())))


def counts_of(store: Any, rank: int) -> Counts:
    """What a rank has written of its steps."""
    if not store.check([_key(rank)]):
        return Counts()
    return Counts(*map(int, store.get(_key(rank)).decode().split(":")[1:]))


def _compare(store: Any, rank: int) -> None:
    """Note if the next rank has come to where it is by other steps than this one."""
    other = (rank + 1) % dist.get_world_size()
    counted.compare(rank, other, counts_of(store, other))


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
    own.set(_key(rank), _written(0))
    thread = threading.Thread(target=_beat, args=(stop, own, rank), daemon=True)
    _hearts.append(_Heart(rank, os.getpid(), store, stop, thread))
    thread.start()


def _beat(stop: threading.Event, own: Any, rank: int) -> None:
    number, failed, stall = 0, 0, Stall()
    while failed < _FAILURES and not stop.wait(_INTERVAL_S):
        number += 1
        try:
            own.set(_key(rank), _written(number))
            _compare(own, rank)
            for keys in tuple(_awaited):
                _answer(own, keys)
            if (doing := waiting()) is not None:
                _tell_wait(own, rank, doing, stall)
            elif stall.seen:
                own.set(_waits(rank), "")
        except RuntimeError:  # once it may be the network's; else the store is gone, and the job
            failed += 1
        else:
            failed = 0


def _tell_wait(store: Any, rank: int, doing: str, stall: Stall) -> None:
    """Say that this rank waits, and where the others are; end it where that is for nothing."""
    if counted.unlike:
        told = f"autopar: rank {rank} ends {doing}: {counted.unlike[0]}"
        print(told, file=sys.stderr, flush=True)
        store.set(_end(rank), "")
        os._exit(1)  # the main thread is inside a call of the process group
    store.set(_waits(rank), f"{counted.now().begun}:{doing}")
    if stall.is_due():  # each rank is asked for, which is much of a large job
        others = (r for r in range(dist.get_world_size()) if r != rank)
        places = {other: _place(store, other) for other in others}
        stall.tell(rank, f"{doing} of step {counted.now().begun}", places)


def _place(store: Any, rank: int) -> str:
    """Where a rank is, as it has said."""
    if store.check([_end(rank)]):
        return "has ended"
    if not store.check([_key(rank)]):
        return "has not begun"
    begun = counts_of(store, rank).begun
    if store.check([_waits(rank)]):
        step, _, doing = store.get(_waits(rank)).decode().partition(":")
        if step == str(begun):
            return f"is {doing} of step {begun}"
    return f"has begun {begun} steps, and is not in communication for long"


@atexit.register
def _end_here() -> None:
    """Say that this process ends, where there is still someone to tell."""
    for heart in _hearts:
        if heart.process == os.getpid():  # and not one that it has forked
            _leave(heart, _end(heart.rank), "")
    _rest()


def _leave(heart: _Heart, key: str, text: str) -> None:
    """Leave a word for the others; where the process that holds the store is gone, so are they."""
    with suppress(RuntimeError):
        heart.store.set(key, text)


def _rest() -> None:
    """End the thread: one that comes back from the store into an interpreter at its end aborts."""
    while _hearts:
        heart = _hearts.pop()
        heart.stop.set()
        heart.thread.join(_SILENCE_S)


def tell_reason(error: BaseException) -> None:
    """Leave for the others why this rank does not go on with the step that it has begun."""
    if _hearts and not isinstance(error, LostRankError):
        first = str(error).partition("\n")[0]
        heart = _hearts[0]
        _leave(heart, _reason(heart.rank), f"{counted.now().begun}:{type(error).__name__}: {first}")


def tell_failure(error: BaseException, devices: int) -> None:
    """`tell_reason`, of a step that all ranks run: they are asked for it before the next one.

    Args:
        error: that the step ended with.
        devices: that it runs on.
    """
    tell_reason(error)
    if _hearts and devices == dist.get_world_size():
        _failed[:] = [f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"]
        _leave(_hearts[0], _failure(_hearts[0].rank, counted.now().begun), "")


def _wait_for_failures(reason: str) -> None:
    """See that the step which failed here has failed on all ranks, or run none from now on."""
    store, step = default_store(), counted.now().begun
    keys = [_failure(rank, step) for rank in range(dist.get_world_size())]
    deadline = time.monotonic() + _SILENCE_S
    while not store.check(keys):
        if time.monotonic() > deadline:
            others = [r for r, key in enumerate(keys) if not store.check([key])]
            _refused.append(
                f"step {step} failed on rank {dist.get_rank()} and not on rank"
                f"{'s' * (len(others) > 1)} {', '.join(map(str, others))} ({reason}). They wait in "
                "it, and would add the gradients of the next batch to those of this one. Start "
                "all ranks again and load the last checkpoint; to skip a batch, look at it on "
                "every rank before the step"
            )
            return
        time.sleep(_INTERVAL_S / 40)


@contextmanager
def watching(keys: list[str]) -> Iterator[None]:
    """Around a wait for a key of each rank: `NEVER` and the reason, for one that cannot come."""
    _awaited.append(keys)
    try:
        yield
    finally:
        _awaited.clear()


def _answer(store: Any, keys: Sequence[str]) -> None:
    """Answer for ranks that do not come to where this one waits."""
    for rank, key in enumerate(keys):
        if not store.check([key]) and (told := elsewhere(store, rank)):
            store.compare_set(key, "", f"{NEVER}{told}")


def elsewhere(store: Any, rank: int) -> str:
    """Why a rank does not come to the step that this one is in front of, if that is known.

    Args:
        store: of the process group.
        rank: that is waited for.
    """
    if store.check([_end(rank)]):
        return f"rank {rank} ended{_given_reason(store, rank)}"
    theirs, mine = counts_of(store, rank).begun, counted.now().begun
    return f"rank {rank} has begun step {theirs}, the next one" if theirs > mine else ""


def _given_reason(store: Any, rank: int) -> str:
    """The reason that a rank gave in the step that this one is at."""
    if not store.check([_reason(rank)]):
        return ""
    step, _, text = store.get(_reason(rank)).decode().partition(":")
    return f" ({text})" if int(step) >= counted.now().begun - 1 else ""


class Life:
    """Signs of life of one rank, which this one waits for."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._seen = b""
        self._since = time.monotonic()

    def ended(self, store: Any, patience_s: float) -> str | None:
        """What has become of it; None while it shows life, or has not shown any for a short time.

        Args:
            store: of the process group.
            patience_s: seconds without life that count as its end.
        """
        if store.check([_end(self._rank)]):
            return f"rank {self._rank} ended{_given_reason(store, self._rank)}"
        number = store.get(_key(self._rank)) if store.check([_key(self._rank)]) else b""
        if number != self._seen:
            self._seen, self._since = number, time.monotonic()
        if time.monotonic() - self._since > patience_s:
            return f"rank {self._rank} has shown no life for {patience_s:g} s"
        return None


def _lost_ranks() -> list[int]:
    """Ranks whose process has ended; waits for signs of life."""
    store, world = default_store(), dist.get_world_size()
    if store.check([_VERDICT]):
        return _ranks(store.get(_VERDICT))
    ended = [r for r in range(world) if store.check([_end(r)])]
    if ended:
        return _settled(store, ended)
    silent = {r: store.get(_key(r)) for r in range(world) if store.check([_key(r)])}
    deadline = time.monotonic() + _SILENCE_S
    while silent and time.monotonic() < deadline:
        time.sleep(_INTERVAL_S / 4)
        if store.check([_VERDICT]):
            return _ranks(store.get(_VERDICT))
        silent = {rank: seen for rank, seen in silent.items() if store.get(_key(rank)) == seen}
    return _settled(store, sorted(silent)) if silent else []


def _settled(store: Any, ranks: Sequence[int]) -> list[int]:
    """The verdict of the first rank that has one."""
    return _ranks(store.compare_set(_VERDICT, "", ",".join(map(str, ranks))))


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
        with communicating(doing):
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
        gone = _lost_ranks()
    except RuntimeError as failure:
        return f"the store of the process group does not answer ({failure}): rank 0 may be gone"
    if not gone:
        return None
    reasons = "".join(_given_reason(default_store(), rank) for rank in gone)
    return f"rank{'s' if len(gone) > 1 else ''} {', '.join(map(str, gone))} ended{reasons}"
