"""Times collectives as they occur in a step: behind compute.

Ranks that have computed do not arrive at once, and sleeping threads must be woken, on cores that
others keep busy. Collectives in a tight loop take a fraction of that time where ranks share cores.
So each is timed behind some milliseconds of matmuls, whose own time is subtracted.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from autopar.cost_model.collectives import CollectiveKind
from autopar.cost_model.timing import median_seconds, synchronize

__all__ = ["Sample", "collective_calls", "measure_collectives"]

_COMPUTE_S = 2e-3  # of a rank; steps of small models have about that between two collectives
_TIMING_S = 4e-2  # for which a collective is repeated; of a single call chance is a fifth
_SIDES = {"cpu": 256, "cuda": 2048}  # of the products
_LEAST_S = 1e-7


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured collective.

    Attributes:
        kind, group_size, num_bytes: see `CollectiveLine`.
        seconds: that it takes.
        busy_s: CPU seconds of this process meanwhile, all threads together; 0 for other devices.
    """

    kind: str
    group_size: int
    num_bytes: int
    seconds: float
    busy_s: float = 0.0


def measure_collectives(
    device: str, group_size: int, sizes: Sequence[int], rounds: int
) -> list[Sample]:
    """Times every kind of collective; all groups of `group_size` ranks run at once.

    Called on every rank of a world that `group_size` divides.
    """
    group, _ = dist.new_subgroups(group_size)
    keys = [(kind, n) for n in sizes for kind in CollectiveKind]
    calls = [collective_calls(kind, n, group, device) for kind, n in keys]
    compute = _products(device)
    timed = _timer(device)
    repeats = []
    for call in calls:
        call()
        repeats.append(max(1, min(10, int(_TIMING_S / max(timed([call], 1)[0], _LEAST_S)))))
    agreed = torch.tensor(repeats, device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
    times: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for _ in range(rounds):
        for key, call, count in zip(keys, calls, agreed.tolist(), strict=True):
            both, alone = timed([compute, call], count), timed([compute], count)
            seconds, busy = (max(b - a, 0.0) for b, a in zip(both, alone, strict=True))
            times[key].append((max(seconds, _LEAST_S), busy))
    medians = {
        key: [statistics.median(each) for each in zip(*t, strict=True)] for key, t in times.items()
    }
    return [Sample(str(kind), group_size, n, *medians[kind, n]) for kind, n in keys]


def _products(device: str) -> Callable[[], None]:
    """Computes for `_COMPUTE_S` seconds, the same on all ranks."""
    side = _SIDES[torch.device(device).type]
    x = torch.ones(side, side, device=device)
    (seconds,) = median_seconds([lambda: torch.mm(x, x)], device, 3)
    count = torch.tensor(math.ceil(_COMPUTE_S / seconds), device=device)
    dist.all_reduce(count, op=dist.ReduceOp.MAX)
    number = int(count)

    def compute() -> None:
        for _ in range(number):
            torch.mm(x, x)

    return compute


def _timer(device: str) -> Callable[[Sequence[Callable[[], object]], int], tuple[float, float]]:
    """Seconds of some calls, all ranks at once, and CPU seconds of this process meanwhile."""
    sync = synchronize(device)

    def timed(calls: Sequence[Callable[[], object]], count: int) -> tuple[float, float]:
        dist.barrier()
        sync()
        start, busy = time.perf_counter(), time.process_time()
        for _ in range(count):
            for call in calls:
                call()
        sync()
        busy = time.process_time() - busy if device == "cpu" else 0.0
        return (time.perf_counter() - start) / count, busy / count

    return timed


def collective_calls(
    kind: CollectiveKind, num_bytes: int, group: Any, device: str
) -> Callable[[], object]:
    """The call that an emitted program makes, with its wait, on a full buffer of float32.

    Args:
        kind: the collective.
        num_bytes: as `Cluster.collective_seconds` counts them.
        group: this rank's process group.
        device: of the buffer.
    """
    c10d = torch.ops._c10d_functional
    size, name = dist.get_world_size(group), group.group_name
    count = max(1, num_bytes // 4 // size) * size
    whole = torch.zeros(count, device=device)
    part = whole[: count // size].clone()
    even = [count // size] * size
    me = dist.get_rank(group)
    outgoing = [count if r == (me + 1) % size else 0 for r in range(size)]
    incoming = [count if r == (me - 1) % size else 0 for r in range(size)]
    source = dist.get_process_group_ranks(group)[0]
    starts: dict[CollectiveKind, Callable[[], Any]] = {
        CollectiveKind.ALL_REDUCE: lambda: c10d.all_reduce(whole, "sum", name),
        CollectiveKind.ALL_GATHER: lambda: c10d.all_gather_into_tensor(part, size, name),
        CollectiveKind.REDUCE_SCATTER: lambda: c10d.reduce_scatter_tensor(whole, "sum", size, name),
        CollectiveKind.ALL_TO_ALL: lambda: c10d.all_to_all_single(whole, even, even, name),
        CollectiveKind.SEND_RECV: lambda: c10d.all_to_all_single(whole, incoming, outgoing, name),
    }
    if kind is CollectiveKind.BROADCAST:
        return lambda: dist.broadcast(whole, source, group=group)
    start = starts[kind]
    return lambda: c10d.wait_tensor(start())
