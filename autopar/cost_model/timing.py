"""Timing calls on a device, and fitting lines to what is measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

__all__ = ["fit_line", "median_seconds", "synchronize"]


def fit_line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Fits ``y = a + b x`` with the least relative squared error and ``a, b >= 0``.

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
    return float(a), max(float(b), 0.0)


def synchronize(device: str) -> Callable[[], None]:
    """What waits until a device has done its work."""
    return torch.cuda.synchronize if torch.device(device).type == "cuda" else (lambda: None)


def _clock_of(device: str) -> Callable[[], float]:
    """A CPU thread's own time; the wall clock for other devices."""
    return time.thread_time if torch.device(device).type == "cpu" else time.perf_counter


def median_seconds(
    calls: Sequence[Callable[[], object]], device: str, rounds: int, least_s: float = 3e-3
) -> list[float]:
    """Median seconds of each call, timed in rounds that go through all of them.

    Args:
        calls: what is timed.
        device: where they run.
        rounds: timings of each call.
        least_s: a call is repeated until a timing takes about that long.
    """
    sync, clock = synchronize(device), _clock_of(device)

    def timed(call: Callable[[], object], count: int) -> float:
        start = clock()
        for _ in range(count):
            call()
        sync()
        return (clock() - start) / count

    repeats = []
    for call in calls:
        timed(call, 1)
        repeats.append(max(1, int(least_s / max(timed(call, 1), 1e-7))))
    found: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for times, call, count in zip(found, calls, repeats, strict=True):
            times.append(timed(call, count))
    return [statistics.median(times) for times in found]
