"""Checkpoints: a training run saved on one mesh and plan, and resumed on any other.

    path/latest                  name of the last complete one
    path/step-00000100/          index.json   shape, dtype, boxes, places and checksums of all
                                 *.distcp     the tensors, a file per rank (torch.save)
                                 state.pt     optimizer options, counters, what the user adds
                                 plan.json    the plan it was trained with

A checkpoint is written under another name, renamed when all ranks have written, and only then named
by `latest`, so an interrupted save leaves the previous one in place. Loading executes nothing.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.optim import Optimizer

from autopar.errors import AutoparError, CheckpointError
from autopar.runtime import optimizer_state
from autopar.runtime.agree import agreed, reason
from autopar.runtime.module import ParallelModule
from autopar.runtime.pieces import pieces
from autopar.runtime.scaler import LossScaler
from autopar.runtime.state_module import check_parallel
from autopar.runtime.storage import SavePlanner, Writer, write_file

__all__ = [
    "LATEST",
    "MODEL",
    "STATE",
    "SaveHandle",
    "guarded",
    "of_step",
    "parameter_names",
    "save_checkpoint",
]

STATE, LATEST, _PLAN = "state.pt", "latest", "plan.json"
MODEL = "model/"


class SaveHandle:
    """A save that may still be running.

    Args:
        folder: of the checkpoint, once it is complete.
        future: None for a save that is complete.
        group: the process group that an asynchronous save communicates in.

    Attributes:
        has_raised: `result` has said that the save failed.
    """

    def __init__(self, folder: Path, future: Future[Any] | None = None, group: Any = None) -> None:
        self.folder = folder
        self.group = group
        self.has_raised = False
        self._future = future

    def done(self) -> bool:
        """True when the save has ended, whether or not it succeeded."""
        return self._future is None or self._future.done()

    def wait(self) -> None:
        """Wait until the save has ended, whether or not it succeeded."""
        if self._future is not None:
            wait([self._future])

    def result(self, timeout_s: float | None = None) -> Path:
        """Wait until the save has ended, and return its folder.

        Raises:
            CheckpointError: it failed, on this rank or another.
            TimeoutError: it is still running after `timeout_s` seconds.
        """
        if self._future is not None:
            try:
                guarded(lambda: self._future.result(timeout_s), "written")  # type: ignore[union-attr]
            except CheckpointError:
                self.has_raised = True
                raise
        return self.folder


def guarded(call: Callable[[], Any], what: str) -> Any:
    """Run a call of DCP; its errors, those of other ranks among them, become ours."""
    try:
        return call()
    except (AutoparError, TimeoutError):
        raise
    except CheckpointException as error:
        failures = {rank: failure[0] for rank, failure in error.failures.items()}
        rank, first = next(iter(failures.items()), (-1, error))
        if isinstance(first, CheckpointError) and len(failures) == 1:
            raise CheckpointError(str(first)) from error
        where = f"rank {rank}: " if what == "written" else ""
        raise CheckpointError(f"the checkpoint was not {what}: {where}{reason(first)}") from error
    except Exception as error:
        raise CheckpointError(f"the checkpoint was not {what}: {reason(error)}") from error


def save_checkpoint(
    path: str | Path,
    module: ParallelModule,
    optimizer: Optimizer | None = None,
    *,
    scheduler: Any = None,
    scaler: LossScaler | None = None,
    step: int,
    data: Mapping[str, Any] | None = None,
    asynchronous: bool = False,
) -> SaveHandle:
    """Save a training run. Every rank calls this, with a folder that all ranks share.

    If an asynchronous save is still running, it is waited for first.

    Args:
        path: folder of the run's checkpoints; each becomes a folder in it.
        module: saved are its parameters, persistent buffers and the counter of dropout.
        optimizer: saved with its states and options.
        scheduler: anything with `state_dict` and `load_state_dict`, such as an LR scheduler.
        scaler: loss scaler; default: the module's `loss_scaler`.
        step: number of the checkpoint; an older one of the same number is replaced.
        data: more to keep, the same on all ranks: tensors, numbers, strings and containers of them.
        asynchronous: return once the tensors are copied to the CPU, and write in the background.

    Returns:
        A handle; `result()` waits for an asynchronous save.

    Raises:
        CheckpointError: it cannot be written; on every rank.
    """
    check_parallel(module)
    if not isinstance(step, Integral) or step < 0:
        raise CheckpointError(f"step={step!r} of a checkpoint must be a whole number, 0 or more")
    root = Path(path)
    before = module.pending_save
    if before is not None:
        module.pending_save = None
        if not before.has_raised:
            before.result()
    tensors, extra = _collected(module, optimizer, scheduler, scaler, step, data, asynchronous)
    part, final = _prepared(root, module, step, extra)
    boxes = pieces(tensors)
    arguments: dict[str, Any] = {
        "storage_writer": Writer(part, lambda: _commit(root, part, final, step)),
        "planner": SavePlanner(boxes),
    }
    if not asynchronous:
        guarded(lambda: save(SavePlanner.state(boxes), **arguments), "written")
        return SaveHandle(final)
    # a group of its own: collectives of the training go on meanwhile
    group = before.group if before is not None and before.group else dist.new_group(backend="gloo")
    future = guarded(
        lambda: async_save(SavePlanner.state(boxes), process_group=group, **arguments),
        "written",
    )
    module.pending_save = SaveHandle(final, future, group)
    return module.pending_save


def _collected(
    module: ParallelModule,
    optimizer: Optimizer | None,
    scheduler: Any,
    scaler: LossScaler | None,
    step: int,
    data: Mapping[str, Any] | None,
    asynchronous: bool,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What this rank holds of the run's tensors, and the rest of its state, of all ranks."""
    tensors = {f"{MODEL}{name}": value for name, value in module.saved_tensors().items()}
    kept: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    failure: Exception | None = None
    try:
        if optimizer is not None:
            if not isinstance(optimizer, Optimizer):
                raise CheckpointError(
                    f"optimizer= is a {type(optimizer).__name__}: pass one optimizer of torch"
                )
            states, kept = optimizer_state.collect(optimizer, parameter_names(module))
            tensors.update(states)
        extra = {
            "step": step,
            "random": module.random_state,
            "optimizer": None,
            "scheduler": scheduler.state_dict() if scheduler is not None else None,
            "scaler": _state_of(scaler or module.loss_scaler),
            "data": dict(data or {}),
        }
    except Exception as error:  # whatever it is, the other ranks must hear of it
        failure = error
    asked = {"the checkpoint's step": step, "what is saved": [optimizer is None, asynchronous]}
    agreed(failure, asked)
    if optimizer is not None:
        extra["optimizer"] = optimizer_state.merged(kept)
    return tensors, extra


def parameter_names(module: ParallelModule) -> dict[int, str]:
    return {id(parameter): name for name, parameter in module.named_parameters()}


def _state_of(scaler: LossScaler | None) -> dict[str, Any] | None:
    return scaler.state_dict() if scaler is not None and scaler.is_enabled() else None


def _prepared(
    root: Path, module: ParallelModule, step: int, extra: dict[str, Any]
) -> tuple[Path, Path]:
    """Rank 0 writes what is not sharded; the folder to write to, and its later name."""
    failure: Exception | None = None
    name = [""]
    if dist.get_rank() == 0:
        try:
            blob = _blob(extra)
            name = [_free_name(root, step)]
            part = root / f".{name[0]}.part"
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            write_file(part / STATE, blob)
            module.plan.save(part / _PLAN)
        except Exception as error:
            failure = error
    agreed(failure, {})
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(name, src=0)
    return root / f".{name[0]}.part", root / name[0]


def _free_name(root: Path, step: int) -> str:
    name, number = f"step-{step:08d}", 1
    while (root / name).exists():
        number += 1
        name = f"step-{step:08d}.{number}"
    return name


def _blob(extra: dict[str, Any]) -> bytes:
    """`state.pt`, which must load without running code.

    Raises:
        CheckpointError: an entry would not.
    """
    for key, value in extra.items():
        buffer = io.BytesIO()
        try:
            torch.save(value, buffer)
            buffer.seek(0)
            torch.load(buffer, weights_only=True)
        except Exception as error:
            raise CheckpointError(
                f"the state of {key!r} holds more than tensors, numbers, strings and containers of "
                f"them, and would need code to load: {error}"
            ) from error
    buffer = io.BytesIO()
    torch.save(extra, buffer)
    return buffer.getvalue()


def _commit(root: Path, part: Path, final: Path, step: int) -> None:
    """All ranks have written: the checkpoint gets its name, `latest` names it, older twins go."""
    part.rename(final)
    scratch = root / f".{LATEST}.part"
    write_file(scratch, final.name.encode())
    scratch.replace(root / LATEST)
    for twin in of_step(root, step):
        if twin != final:
            shutil.rmtree(twin)


def of_step(root: Path, step: int) -> list[Path]:
    """Checkpoints of a step, the newest first."""
    name = f"step-{step:08d}"
    twins = (p for p in root.glob(f"{name}.*") if p.suffix[1:].isdigit())
    numbered = {1: root / name, **{int(p.suffix[1:]): p for p in twins}}
    return [numbered[n] for n in sorted(numbered, reverse=True) if numbered[n].exists()]
