"""Resumes a training run from what `save_checkpoint` wrote, on any mesh and plan.

First everything is checked, on every rank; then tensors are read in place; then the remaining state
is restored. Each rank reads for itself, and all ranks compare results in between, so that one that
fails leaves nobody waiting.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load
from torch.optim import Optimizer

from autopar.errors import CheckpointError
from autopar.runtime import optimizer_state
from autopar.runtime.agree import agreed, reason
from autopar.runtime.checkpoint import (
    LATEST,
    MODEL,
    STATE,
    guarded,
    of_step,
    parameter_names,
)
from autopar.runtime.module import ParallelModule
from autopar.runtime.pieces import pieces
from autopar.runtime.scaler import LossScaler
from autopar.runtime.state_module import check_parallel
from autopar.runtime.storage import INDEX, Index, LoadPlanner, Reader, SavePlanner

__all__ = ["Checkpoint", "load_checkpoint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What `load_checkpoint` found.

    Attributes:
        folder: the checkpoint's.
        step: as given to `save_checkpoint`.
        data: what was given to `save_checkpoint` as `data`.
    """

    folder: Path
    step: int
    data: Mapping[str, Any] = field(default_factory=dict)


def load_checkpoint(
    path: str | Path,
    module: ParallelModule,
    optimizer: Optimizer | None = None,
    *,
    scheduler: Any = None,
    scaler: LossScaler | None = None,
    step: int | None = None,
) -> Checkpoint:
    """Resume a training run, on any mesh and with any plan of the model. Every rank calls this.

    Each rank reads only what it holds. Nothing in the files is executed.

    Args:
        path: as given to `save_checkpoint`, or one of the folders in it.
        module, optimizer, scheduler, scaler: are filled; those left out are not loaded.
        step: number of the checkpoint; default: the latest.

    Returns:
        The checkpoint's step, and the `data` that was saved with it.

    Raises:
        CheckpointError: there is no checkpoint, tensors are missing or have another shape, or files
            are damaged; on every rank. Nothing is changed, unless reading itself failed.
    """
    check_parallel(module)
    if module.pending_save is not None:
        module.pending_save.wait()  # it may be the latest
    failure: Exception | None = None
    ready: _Ready | None = None
    try:
        ready = _ready(Path(path), module, optimizer, step)
        _check_asked(ready.extra, optimizer, scheduler, scaler)
        if optimizer is not None:
            optimizer_state.check(optimizer, parameter_names(module), ready.extra["optimizer"])
    except Exception as error:  # whatever it is, the other ranks must hear of it
        failure = error
    agreed(failure, {"the checkpoint": ready.folder.name if ready else ""})
    assert ready is not None
    try:
        _read(ready)
    except CheckpointError as error:
        failure = error
    agreed(failure, {})
    try:
        _restore(ready, module, optimizer, scheduler, scaler)
    except CheckpointError as error:
        failure = error
    except Exception as error:
        failure = CheckpointError(f"{ready.folder}: {reason(error)}")
    agreed(failure, {})
    extra = ready.extra
    return Checkpoint(folder=ready.folder, step=int(extra["step"]), data=extra["data"])


@dataclass(frozen=True, slots=True)
class _Ready:
    """A checkpoint that fits the module, and the tensors to fill from it."""

    folder: Path
    index: Index
    extra: dict[str, Any]
    parameters: dict[str, Tensor]
    states: dict[str, Tensor]


def _ready(
    root: Path, module: ParallelModule, optimizer: Optimizer | None, step: int | None
) -> _Ready:
    folder = _folder(root, step)
    index = Index.read(folder)
    extra = _read_extra(folder)
    tensors = {f"{MODEL}{name}": value for name, value in module.saved_tensors().items()}
    everywhere = {f"{MODEL}{name}" for name in module.plan.shapes} | tensors.keys()
    _check_model(folder, index, tensors, everywhere)
    states: dict[str, Tensor] = {}
    if optimizer is not None:
        states = optimizer_state.targets(optimizer, parameter_names(module), index.tensors)
    return _Ready(folder, index, extra, tensors, states)


def _folder(root: Path, step: int | None) -> Path:
    if step is not None:
        found = of_step(root, step)
        if not found:
            raise CheckpointError(f"there is no checkpoint of step {step} in {root}")
        return found[0]
    if (root / INDEX).exists():
        return root
    try:
        name = (root / LATEST).read_text().strip()
    except OSError as error:
        raise CheckpointError(f"there is no complete checkpoint in {root} ({error})") from error
    if not name or Path(name).name != name:
        raise CheckpointError(f"{root / LATEST} names no checkpoint but {name!r}")
    return root / name


def _read_extra(folder: Path) -> dict[str, Any]:
    path = folder / STATE
    try:
        extra = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{path} is damaged ({reason(error)}): load an earlier checkpoint"
        ) from error
    keys = {"step", "random", "optimizer", "scheduler", "scaler", "data"}
    if not isinstance(extra, dict) or not keys <= extra.keys():
        raise CheckpointError(f"{path} is not the state of a training run")
    return extra


def _check_model(
    folder: Path, index: Index, tensors: Mapping[str, Tensor], everywhere: set[str]
) -> None:
    stored = {name for name in index.tensors if name.startswith(MODEL)}
    missing, strange = sorted(tensors.keys() - stored), sorted(stored - everywhere)
    for names, what in ((missing, "lacks"), (strange, "has, and the model has not,")):
        if names:
            listed = ", ".join(name.removeprefix(MODEL) for name in names[:3])
            raise CheckpointError(f"{folder} {what} {len(names)} tensors: {listed}")
    for name, tensor in tensors.items():
        entry = index.tensors[name]
        here = (tuple(tensor.shape), tensor.dtype)
        there = (tuple(entry.size), entry.properties.dtype)
        if here != there:
            raise CheckpointError(
                f"{name.removeprefix(MODEL)} is {here[1]} of shape {here[0]} in the model and "
                f"{there[1]} of shape {there[0]} in {folder}"
            )


def _check_asked(
    extra: Mapping[str, Any], optimizer: Any, scheduler: Any, scaler: LossScaler | None
) -> None:
    for name, given in (("optimizer", optimizer), ("scheduler", scheduler), ("scaler", scaler)):
        if given is not None and extra[name] is None and getattr(given, "enabled", True):
            raise CheckpointError(f"the checkpoint was saved without {name}=")


def _restore(
    ready: _Ready,
    module: ParallelModule,
    optimizer: Optimizer | None,
    scheduler: Any,
    scaler: LossScaler | None,
) -> None:
    """Take up the state that is no parameter or buffer; the optimizer's tensors are read."""
    extra = ready.extra
    if optimizer is not None:
        names = parameter_names(module)
        optimizer_state.restore(optimizer, names, extra["optimizer"], ready.states)
    if scheduler is not None:
        _resume_scheduler(scheduler, extra["scheduler"])
    wanted = scaler or module.loss_scaler
    if wanted is not None and extra["scaler"] is not None:
        wanted.load_state_dict(extra["scaler"])
    module.random_state = extra["random"]


def _resume_scheduler(scheduler: Any, state: Any) -> None:
    try:
        scheduler.load_state_dict(state)
    except Exception as error:
        raise CheckpointError(
            f"the {type(scheduler).__name__} does not take the state of the scheduler that was "
            f"saved ({reason(error)}): make one of the same kind, or leave scheduler= out"
        ) from error


def _read(ready: _Ready) -> None:
    boxes = pieces({**ready.parameters, **ready.states})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is ")
        guarded(
            lambda: load(
                SavePlanner.state(boxes),
                storage_reader=Reader(ready.folder, ready.index),
                planner=LoadPlanner(boxes),
                no_dist=True,
            ),
            f"read from {ready.folder}",
        )
