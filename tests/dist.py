"""Runs a function on several real gloo ranks, and says what every rank returned or raised.

Ranks are forked from a server process that has imported torch and the tests' models already, so a
run costs seconds, not a torch import per rank.
"""

from __future__ import annotations

import io
import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["RankError", "run_ranks", "try_ranks"]

_PRELOAD = [
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "torch.export._trace",
    "torch.fx.experimental.proxy_tensor",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.vit.modeling_vit",
    "transformers.models.resnet.modeling_resnet",
    "autopar.api",
    "tests.zoo",
    "tests.warm",
]


@dataclass(frozen=True)
class RankError:
    """What a rank raised: type name, message, and the traceback as text."""

    kind: str
    message: str
    trace: str


def try_ranks(
    function: Callable[..., Any], world: int, *args: Any, timeout: float = 120.0
) -> list[Any]:
    """`function(rank, *args)` on `world` gloo ranks; each result is a value or a `RankError`.

    A rank still running after `timeout` seconds is stopped and counts as `RankError("Timeout")`.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with tempfile.TemporaryDirectory() as scratch:
        store = str(Path(scratch) / "store")
        readers: dict[Connection, int] = {}
        processes: list[BaseProcess] = []
        for rank in range(world):
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(
                target=_entry, args=(writer, function, rank, world, store, args), daemon=True
            )
            process.start()
            writer.close()
            readers[reader] = rank
            processes.append(process)
        outcomes: list[Any] = [RankError("Timeout", f"no answer in {timeout} s", "")] * world
        deadline = time.monotonic() + timeout
        while readers and (left := deadline - time.monotonic()) > 0:
            for reader in wait(list(readers), left):
                assert isinstance(reader, Connection)
                outcomes[readers.pop(reader)] = _receive(reader)
        for process in processes:
            process.join(5 if not readers else 0)
            if process.is_alive():
                process.kill()
                process.join()
    return outcomes


def run_ranks(
    function: Callable[..., Any], world: int, *args: Any, timeout: float = 120.0
) -> list[Any]:
    """As `try_ranks`, but a rank that fails fails the test with its traceback."""
    outcomes = try_ranks(function, world, *args, timeout=timeout)
    failed = [(r, o) for r, o in enumerate(outcomes) if isinstance(o, RankError)]
    if failed:
        raise AssertionError(
            "\n".join(f"rank {r}: {o.kind}: {o.message}\n{o.trace}" for r, o in failed)
        )
    return outcomes


def _receive(reader: Connection) -> Any:
    try:
        return torch.load(io.BytesIO(reader.recv_bytes()), weights_only=False)
    except EOFError:
        return RankError("Died", "the process ended without an answer", "")


def _entry(
    writer: Connection,
    function: Callable[..., Any],
    rank: int,
    world: int,
    store: str,
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        dist.barrier()  # a rank that fails at once must not close what another is connecting to
        result = function(rank, *args)
        dist.barrier()
    except BaseException as error:
        result = RankError(type(error).__name__, str(error), traceback.format_exc())
    buffer = io.BytesIO()
    torch.save(result, buffer)
    writer.send_bytes(buffer.getvalue())
    writer.close()
    os._exit(0)
