"""Runs a function on new processes that share a process group: gloo on CPU, NCCL on CUDA."""

from __future__ import annotations

import json
import math
import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.cost_model.profile import ClusterError

__all__ = ["on_ranks"]

_TIMEOUT_S = 1800.0


def on_ranks(function: Callable[..., Any], ranks: int, device_type: str, *args: Any) -> list[Any]:
    """`function(rank, device, *args)` on new processes with a process group; results are JSON.

    Raises:
        ClusterError: a rank failed; carries its traceback.
    """
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as scratch:
        processes = [
            context.Process(
                target=_entry, args=(function, rank, ranks, device_type, scratch, args), daemon=True
            )
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + _TIMEOUT_S
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        answers = []
        for rank, process in enumerate(processes):
            if process.is_alive():
                process.kill()
            path = Path(scratch) / f"{rank}.json"
            silent = {"error": "no answer", "at": math.inf}
            answers.append(json.loads(path.read_text()) if path.exists() else silent)
    failed = [(answer["at"], rank) for rank, answer in enumerate(answers) if "error" in answer]
    if failed:
        first = min(failed)[1]  # the others fail after it, for want of a peer
        raise ClusterError(f"rank {first} could not measure: {answers[first]['error']}")
    return [answer["result"] for answer in answers]


def _entry(
    function: Callable[..., Any],
    rank: int,
    ranks: int,
    device_type: str,
    scratch: str,
    args: tuple[Any, ...],
) -> None:
    device, backend = device_type, "gloo"
    torch.set_num_threads(1)
    if device_type == "cuda":
        device, backend = f"cuda:{rank}", "nccl"
        torch.cuda.set_device(rank)
    try:
        dist.init_process_group(
            backend, init_method=f"file://{scratch}/store", rank=rank, world_size=ranks
        )
        answer: dict[str, Any] = {"result": function(rank, device, *args)}
        dist.barrier()
    except Exception:
        answer = {"error": traceback.format_exc(), "at": time.time()}
    part = Path(scratch) / f"{rank}.part"
    part.write_text(json.dumps(answer))
    part.replace(Path(scratch) / f"{rank}.json")
    os._exit(0)  # a failed peer must not keep this rank in the group's destructor
