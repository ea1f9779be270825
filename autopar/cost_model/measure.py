"""Measures the figures of a profile on the machine at hand.

``python -m autopar.cost_model.measure`` prints rows of JSON, one figure each, to be copied into
``profiles/*.toml`` with their provenance. A device is timed by the least of a few repeats (noise
only ever adds). Two lines are fitted by least squares of the *relative* error, so that small
sizes count as much as large ones:

* matmul: ``t = overhead + (flops / peak + ramp) / peak_fraction``, the law of `compute.py`;
* all-reduce over gloo: ``t = a + b * bytes``, then ``a = 2 (base + (n-1) alpha)`` and
  ``b = 2 (n-1) / (n bandwidth)``, the ring of `collectives.py` (Thakur et al. 2005,
  doi:10.1177/1094342005051521).
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

__all__ = ["fit_line", "measure_all_reduce", "measure_device"]

_MATMUL_SIZES = (64, 128, 256, 512, 1024)
_COPY_BYTES = 1 << 28
_MESSAGE_BYTES = (1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 25)


def fit_line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Fits ``y = a + b x`` with the least relative squared error and ``a >= 0``.

    Args:
        x: abscissae, such as bytes.
        y: positive ordinates, such as seconds.

    Returns:
        ``(a, b)``.
    """
    xs, ys = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    design = np.stack([1 / ys, xs / ys], axis=1)
    (a, b), *_ = np.linalg.lstsq(design, np.ones_like(ys), rcond=None)
    if a < 0:
        scaled = xs / ys
        return 0.0, float(scaled.sum() / (scaled * scaled).sum())
    return float(a), float(b)


def _best_seconds(run: Callable[[], object], sync: Callable[[], None], repeats: int = 7) -> float:
    """The least seconds of one call, over `repeats` timings of about 20 ms each."""
    run()
    sync()
    start = time.perf_counter()
    run()
    sync()
    calls = max(1, int(0.02 / max(time.perf_counter() - start, 1e-7)))
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            run()
        sync()
        best = min(best, (time.perf_counter() - start) / calls)
    return best


def measure_device(device_type: str, dtypes: Sequence[str]) -> list[dict[str, Any]]:
    """Measures op overhead, copy bandwidth and the matmul law of one device.

    Args:
        device_type: ``"cpu"`` (one thread) or ``"cuda"``.
        dtypes: dtype names such as ``"float32"``.

    Returns:
        Rows with ``metric``, ``unit``, ``value`` and what else identifies them.
    """
    import torch

    sync = torch.cuda.synchronize if device_type == "cuda" else (lambda: None)
    if device_type == "cpu":
        torch.set_num_threads(1)
    one = torch.ones(1, device=device_type)
    overhead_s = _best_seconds(lambda: one + one, sync)
    rows: list[dict[str, Any]] = [_row("kernel_overhead_s", "s", overhead_s)]
    source = torch.ones(_COPY_BYTES // 4, device=device_type)
    target = torch.empty_like(source)
    copy_s = _best_seconds(lambda: target.copy_(source), sync)
    rows.append(_row("memory_bandwidth", "bytes/s read+written", 2 * _COPY_BYTES / copy_s))
    pointwise_s = _best_seconds(lambda: torch.add(source, 1.0, out=target), sync)
    rows.append(_row("pointwise_bandwidth", "bytes/s read+written", 2 * _COPY_BYTES / pointwise_s))
    for dtype in dtypes:
        flops, seconds = [], []
        for size in _MATMUL_SIZES:
            a = torch.randn(size, size, device=device_type).to(getattr(torch, dtype))
            flops.append(2.0 * size**3)
            seconds.append(_best_seconds(lambda a=a: a @ a, sync))  # type: ignore[misc]
            rate = flops[-1] / seconds[-1]
            rows.append(_row("matmul_flops", "FLOP/s", rate, dtype=dtype, size=size))
        intercept, slope = fit_line(flops, [max(s - overhead_s, 1e-9) for s in seconds])
        rows.append(_row("matmul_fit", "s, FLOP/s", [intercept, 1 / slope], dtype=dtype))
    return rows


def measure_all_reduce(num_ranks: int = 4) -> list[dict[str, Any]]:
    """Measures all-reduce over gloo on loopback with `num_ranks` processes, and fits α and β.

    The intercept is split as if a launch cost as much as one hop: ``a = 2 n alpha``.

    Returns:
        One row per message size, then ``latency_s``, ``base_latency_s`` and ``bandwidth``.
    """
    import torch.multiprocessing as mp

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    workers = [
        context.Process(target=_all_reduce_worker, args=(rank, num_ranks, port, queue))
        for rank in range(num_ranks)
    ]
    for worker in workers:
        worker.start()
    seconds: list[float] = queue.get()
    for worker in workers:
        worker.join()
    rows = [
        _row("all_reduce_s", "s", value, num_bytes=size, num_ranks=num_ranks)
        for size, value in zip(_MESSAGE_BYTES, seconds, strict=True)
    ]
    a, b = fit_line(_MESSAGE_BYTES, seconds)
    alpha_s = a / (2 * num_ranks)
    rows.append(_row("latency_s", "s", alpha_s))
    rows.append(_row("base_latency_s", "s", alpha_s))
    rows.append(_row("bandwidth", "bytes/s", 2 * (num_ranks - 1) / (num_ranks * b)))
    return rows


def _all_reduce_worker(rank: int, num_ranks: int, port: int, queue: Any) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
    medians = []
    for size in _MESSAGE_BYTES:
        buffer = torch.zeros(size // 4)
        samples = []
        for _ in range(12):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(buffer)
            samples.append(time.perf_counter() - start)
        medians.append(float(np.median(samples[2:])))
    if rank == 0:
        queue.put(medians)
    dist.destroy_process_group()


def _row(metric: str, unit: str, value: object, **where: object) -> dict[str, Any]:
    return {"metric": metric, "unit": unit, "value": value, **where}


def main() -> None:
    """Prints the rows of this machine's best device, then of gloo on loopback."""
    import torch

    cuda = torch.cuda.is_available()
    dtypes = ("float32", "bfloat16", "float16") if cuda else ("float64", "float32", "bfloat16")
    for row in measure_device("cuda" if cuda else "cpu", dtypes) + measure_all_reduce():
        print(json.dumps(row))


if __name__ == "__main__":
    main()
