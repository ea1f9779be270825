"""Ranks see that all of them do, where a module does not just repeat its last step.

All steps of a module are planned by all ranks together, but later ranks may differ in which they
run: one has a shorter last batch than the others, or has caught an error of its own between forward
and backward. It would enter the collectives of one step, and the others those of another, with sums
of unlike gradients, or an abort where sizes differ. So before a module turns to a step of another
kind than its last one, or to any while that still lacks a backward, each rank waits until all have
come to do the same. A rank that alone does so raises, and the others hear of its end.

Training that repeats one kind of step waits for nothing.
"""

from __future__ import annotations

import time
from typing import NoReturn

import torch.distributed as dist

from autopar._compat import default_store
from autopar.errors import AutoparError, LostRankError
from autopar.runtime import counted, lost
from autopar.runtime.agree import arrived, patience_s

__all__ = ["Turns"]

_LOOK_S = 1.0  # between looks for ranks that do not come
_SILENCE_S = 60.0  # of a rank that does not come: code may keep its thread from running for long
_MOST_S = 1800.0  # as torch's own default for collectives
_LOST = "lost: "
_OTHER_KIND = "a batch of another shape than its last one, or in another mode"
_WANTED = (
    "Pass every rank the same global batch (model.shard_dataloader(loader) loads each rank's rows "
    "of one), and run the same calls on all of them, also where one of them has caught an error. "
    "Start all ranks again, and load the last checkpoint"
)


class Turns:
    """What a module has run last on this rank."""

    def __init__(self) -> None:
        self._last = ""
        self._owes = False  # a backward of it

    def begin(self, fingerprint: str, devices: int) -> None:
        """Count a step that communicates, if all ranks run it (`counted.py`).

        Args:
            fingerprint: of its plan.
            devices: that it runs on.

        Raises:
            AutoparError: other ranks do not turn to such a step, have run other steps, or have not
                failed in the last one, as this one has.
            LostRankError: a rank has ended.
        """
        if not counted.is_shared(devices):
            return
        lost.check_on()
        if self._owes:
            _Meeting(fingerprint, "the backward of its last step left out").wait()
        elif self._last and fingerprint != self._last:
            _Meeting(fingerprint, _OTHER_KIND).wait()
        counted.begin_step(fingerprint)
        self._last, self._owes = fingerprint, False

    def owe(self) -> None:
        """A backward belongs to the step that was begun."""
        self._owes = True

    def pay(self) -> None:
        """A backward begins."""
        self._owes = False


_added: list[str] = []  # the meeting that this rank has come to last
_passed: list[tuple[str, str]] = []  # keys of the meeting before it


class _Meeting:
    """All ranks come together in front of a step.

    Each asks the store a few times, and looks at its next rank alone; the first that knows why not
    all can come tells the others.

    Args:
        fingerprint: of the step's plan.
        how: this rank comes to it.
    """

    def __init__(self, fingerprint: str, how: str) -> None:
        self.how = how
        self.store = default_store()
        self.rank = dist.get_rank()
        self.next = (self.rank + 1) % dist.get_world_size()
        self.step = counted.now().begun + 1
        self.mine = f"{self.step}:{fingerprint}, {how}"
        self.done = f"autopar/turn/{self.step}/done"
        self.verdict = f"autopar/turn/{self.step}/verdict"
        self.life = lost.Life(self.next)
        self.since = time.monotonic()

    def wait(self) -> None:
        """Wait until all ranks have come, for as long as the others live and may come.

        Raises:
            AutoparError: another rank does something else.
            LostRankError: a rank has ended.
        """
        with lost.naming_lost_ranks("waiting behind the end"):
            self._come()
            while not arrived(self.store, self.done, _LOOK_S):
                lost.check_on()
                self._look()
        self._forget_last()

    def _come(self) -> None:
        self.store.set(_turned(self.rank), self.mine)
        if _added != [self.mine]:  # not again where a signal's handler ended the wait
            _added[:] = [self.mine]
            if self.store.add(f"autopar/turn/{self.mine}", 1) == dist.get_world_size():
                self.store.set(self.done, "")

    def _look(self) -> None:
        """Raise where a rank is known not to come."""
        if self.store.check([self.verdict]):
            self._raise(self.store.get(self.verdict).decode())
        told = self._of_next()
        if told is not None and not self.store.check([self.done]):  # it may have come and gone
            self._raise(self.store.compare_set(self.verdict, "", told).decode())

    def _of_next(self) -> str | None:
        """Why the next rank does not come, if that is known."""
        if self.store.check([_turned(self.next)]):
            theirs = self.store.get(_turned(self.next)).decode()
            if theirs.startswith(f"{self.step}:"):
                first, second = sorted((self.rank, self.next))
                unlike = f"ranks {first} and {second} come to it with steps of different kinds"
                return None if theirs == self.mine else unlike
        counts, mine = lost.counts_of(self.store, self.next), counted.now()
        if counts.begun > mine.begun:
            return f"rank {self.next} has begun step {counts.begun}, the next one"
        if counts.backwards > mine.backwards:
            return f"rank {self.next} has begun that backward"
        ended = self.life.ended(self.store, min(_SILENCE_S, patience_s()))
        if ended is None and time.monotonic() - self.since > _MOST_S:
            ended = f"rank {self.next} has not come in {_MOST_S:g} s, though it lives"
        return None if ended is None else f"{_LOST}{ended}"

    def _raise(self, told: str) -> NoReturn:
        if told.startswith(_LOST):
            raise LostRankError(
                f"rank {self.rank} stops in front of step {self.step}, because "
                f"{told.removeprefix(_LOST)}: see what it printed. Start all ranks again, and load "
                "the last checkpoint."
            )
        message = (
            f"rank {self.rank} comes to step {self.step} with {self.how}, but {told}. {_WANTED}"
        )
        lost.refuse(message)
        raise AutoparError(message)

    def _forget_last(self) -> None:
        """Leave nothing of the meeting before this one in the store: all ranks have left that."""
        if self.rank == 0:
            for key in _passed.pop() if _passed else ():
                self.store.delete_key(key)
            _passed.append((f"autopar/turn/{self.mine}", self.done))


def _turned(rank: int) -> str:
    return f"autopar/turned/{rank}"
