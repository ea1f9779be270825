"""Ranks agree, or all of them stop: one rank's error must not leave the others waiting."""

from __future__ import annotations

import itertools
import os
import pickle
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch import fx

from autopar._compat import default_store
from autopar.codegen.traffic import collectives_digest
from autopar.errors import AutoparError, CheckpointError, LostRankError
from autopar.runtime.lost import NEVER, Life, lost_text, tell_reason, watching

__all__ = [
    "agree",
    "agreed",
    "alike_on_all",
    "arrived",
    "of_one_rank",
    "patience_s",
    "reason",
    "wait_for_all",
]

_PATIENCE_S = 300.0
_UNLIKE = (
    "All ranks make the same calls: is this one's batch of another shape, dtype or structure, or "
    "the module in another mode? Pass batches of equal global shape on every rank."
)
_LOOK_S = 1.0  # between looks for a rank that is waited for
_FIRST_PAUSE_S = 1e-3  # between looks for a key; each is twice the one before
_calls = itertools.count()
_made = itertools.count()  # by one rank for all

Result = TypeVar("Result")


def agree(error: Exception | None, mine: Mapping[str, Any], what: str) -> None:
    """Compare `mine` over all ranks of the world; every rank calls this, failed or not.

    Args:
        error: what this rank is about to raise.
        mine: what must be equal everywhere, by name, most telling first.
        what: the ranks are about to do.

    Raises:
        Exception: `error`, where there is one.
        AutoparError: another rank failed, holds something else, is about to do something else, or
            does not come within `$AUTOPAR_TIMEOUT_S` seconds (default 300).
    """
    reference, *others = _of_everyone(error, mine, what)
    for rank, other in enumerate(others, 1):
        if other != reference:
            raise AutoparError(
                f"ranks hold different models or inputs: {_difference(reference, other)} on ranks "
                f"0 and {rank}. Build the same model with the same configuration, and pass the "
                "same plan and the same global batch shape on every rank."
            )


def alike_on_all(
    write: Callable[[], Result], graphs: Callable[[Result], Mapping[str, fx.Graph]]
) -> Result:
    """The programs that this rank writes; no rank then waits for collectives that never come.

    Args:
        write: makes the programs.
        graphs: of what was made, by the name that a program has on all ranks that run it.

    Raises:
        Exception: of `write`.
        AutoparError: another rank failed, or has other collectives, or has them in another order.
    """
    made: list[Result] = []
    failure: Exception | None = None
    try:
        made = [write()]
    except Exception as error:  # whatever it is, the other ranks must hear of it
        failure = error
    mine = {name: collectives_digest(g) for each in made for name, g in graphs(each).items()}
    known: dict[str, tuple[int, str]] = {}
    for rank, theirs in enumerate(_of_everyone(failure, mine, "emit a step")):
        for name, digest in theirs.items():
            other, expected = known.setdefault(name, (rank, digest))
            if digest != expected:
                raise AutoparError(
                    f"{name} has other collectives on rank {rank} than on rank {other}: this is a "
                    "defect of autopar, please report it. With passes=() each rank runs the "
                    "program as the plan has it."
                )
    return made[0]


def _of_everyone(
    error: Exception | None, mine: Mapping[str, Any], what: str
) -> list[Mapping[str, Any]]:
    """`mine` of every rank of the world; an error of one of them is raised on all."""
    text = None if error is None else f"{type(error).__name__}: {error}"
    everyone: list[Any] = [(text, dict(mine))]
    if dist.is_initialized() and dist.get_world_size() > 1:
        wait_for_all(what)
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (text, dict(mine)))
    if error is not None:
        raise error
    for rank, (failure, _) in enumerate(everyone):
        if failure is not None:
            raise AutoparError(f"rank {rank} failed: {failure}")
    return [theirs for _, theirs in everyone]


def agreed(failure: Exception | None, mine: Mapping[str, Any]) -> None:
    """`agree`, with a `CheckpointError` on every rank."""
    try:
        agree(failure, mine, "take part in a checkpoint")
    except CheckpointError:
        raise
    except AutoparError as error:
        raise CheckpointError(str(error)) from error
    except Exception as error:
        raise CheckpointError(reason(error)) from error


def reason(error: BaseException) -> str:
    """What an error says, without torch's advice to load files that may hold code.

    Where it comes from a rank that is gone, says which.
    """
    told = lost_text(error)
    if told is not None:
        return told
    if isinstance(error, pickle.UnpicklingError):
        return "a file holds something else than tensors and plain values"
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def patience_s() -> float:
    """Seconds that ranks wait for each other: `$AUTOPAR_TIMEOUT_S`."""
    return float(os.environ.get("AUTOPAR_TIMEOUT_S", _PATIENCE_S))


def wait_for_all(what: str) -> None:
    """A barrier that ends: where one rank alone has something to compile, the rest never come.

    Args:
        what: the ranks are about to do.

    Raises:
        AutoparError: others are about to do something else, or do not come within
            `$AUTOPAR_TIMEOUT_S` seconds (default 300).
    """
    call, rank, world = next(_calls), dist.get_rank(), dist.get_world_size()
    store = default_store()
    keys = [f"autopar/agree/{call}/{other}" for other in range(world)]
    store.set(keys[rank], what)
    patience = patience_s()
    try:
        with watching(keys):
            store.wait(keys, timedelta(seconds=patience))
    except RuntimeError as error:  # torch's DistStoreError
        missing = ", ".join(str(r) for r in range(world) if not store.check([keys[r]]))
        raise AutoparError(
            f"rank {rank} waited {patience:g} s for ranks {missing} to {what}. {_UNLIKE} "
            "Set AUTOPAR_TIMEOUT_S where ranks may be further apart."
        ) from error
    everyone = [told.decode() for told in store.multi_get(keys)]
    other = next((r for r, told in enumerate(everyone) if told != what), None)
    if other is not None:
        there = f"rank {other} to {everyone[other]}"
        if everyone[other].startswith(NEVER):
            there = f"but {everyone[other].removeprefix(NEVER)}"
        failure = AutoparError(f"rank {rank} came to {what}, {there}. {_UNLIKE}")
        tell_reason(failure)
        raise failure


def arrived(store: Any, key: str, seconds: float) -> bool:
    """Wait for a key of the store; False if it has not come after so many seconds.

    The store's own wait would print two warnings each time that it ends without the key.
    """
    deadline, pause = time.monotonic() + seconds, _FIRST_PAUSE_S
    while not store.check([key]):
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause *= 2
    return True


def of_one_rank(rank: int, what: str, work: Callable[[], Result]) -> Result:
    """What one rank makes, or its error, on every rank.

    The others wait for as long as it lives: a collective would end the job where the work takes
    longer than the timeout of the process group.

    Args:
        rank: that works.
        what: it does, for messages.
        work: done there.

    Raises:
        AutoparError: the work failed.
        LostRankError: the rank has ended, or shown no life for `$AUTOPAR_TIMEOUT_S` seconds.
    """
    box: list[Any] = [None]
    failure: Exception | None = None
    if dist.get_rank() == rank:
        try:
            box = [work()]
        except AutoparError as error:
            box = [error]
        except Exception as error:
            failure = error
            told = f"rank {rank} failed to {what}: {type(error).__name__}: {error}"
            box = [AutoparError(told)]
    if dist.get_world_size() > 1:
        key = f"autopar/made/{next(_made)}"
        if dist.get_rank() == rank:
            default_store().set(key, "")
        else:
            _wait_for_rank(rank, key, what)
        dist.broadcast_object_list(box, src=rank)
    if failure is not None:
        raise failure
    if isinstance(box[0], AutoparError):
        raise box[0]
    made: Result = box[0]
    return made


def _wait_for_rank(rank: int, key: str, what: str) -> None:
    store, life = default_store(), Life(rank)
    try:
        while not arrived(store, key, _LOOK_S):
            if (ended := life.ended(store, patience_s())) is not None:
                raise LostRankError(
                    f"rank {dist.get_rank()} stops, because {ended} while it was to {what}: see "
                    "what it printed, and start all ranks again."
                )
    except RuntimeError as error:
        if (gone := lost_text(error)) is None:
            raise
        raise LostRankError(
            f"rank {dist.get_rank()} stops while rank {rank} is to {what}: {gone}."
        ) from error


def _difference(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    for name in (*first, *second):
        if first.get(name) != second.get(name):
            return f"{name} is {first.get(name, 'absent')} and {second.get(name, 'absent')}"
    return "the order of the parameters differs"
