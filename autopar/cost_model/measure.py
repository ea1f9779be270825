"""Measures a machine: curves of its ops and lines of its collectives, as a profile.

All ranks run at once, one thread each, as they do in a step. Ops are timed in interleaved rounds,
of which the median counts. On a CPU the clock is the thread's own, times the ranks per core where
there is more than one: so the wait for a core that the ranks give each other is in, and other
programs' load is not. Collectives need a wall clock, and are timed behind compute
(`collective_timing.py`); of their rounds the median counts.
Curves and lines are then made monotone. Lines are fitted by least squares of the *relative*
error, so that small sizes count as much as large ones. (Rings: Thakur, Rabenseifner and Gropp
2005, doi:10.1177/1094342005051521.)
"""

from __future__ import annotations

import datetime
import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from autopar.cost_model.collective_timing import Sample, measure_collectives
from autopar.cost_model.collectives import CollectiveKind
from autopar.cost_model.host_memory import machine_memory_bytes
from autopar.cost_model.probes import geometric_mean, probes
from autopar.cost_model.profile import (
    ClusterError,
    CollectiveLine,
    Curve,
    DeviceProfile,
    Efficiency,
    LinkProfile,
    Profile,
    dtype_name,
)
from autopar.cost_model.ranks import on_ranks
from autopar.cost_model.timing import fit_line, median_seconds
from autopar.cost_model.toml_text import to_toml

__all__ = ["cpu_name", "measure_profile", "write_profile"]

_MESSAGE_BYTES = (1 << 10, 1 << 13, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)

# --- what each rank does


def _measure_rank(
    rank: int,
    device: str,
    dtypes: Sequence[str],
    group_sizes: Sequence[int],
    rounds: int,
    quick: bool,
) -> dict[str, Any]:
    ops: list[list[Any]] = []
    for index, dtype in enumerate(dtypes):
        found = list(probes(device, dtype, plain=index > 0, largest=3 if quick else 99))
        dist.barrier()
        seconds = median_seconds([p.run for p in found], device, rounds)
        ops += [
            [p.op_class, p.dtype, p.unit, p.group, p.work, p.num_bytes, s / p.steps]
            for p, s in zip(found, seconds, strict=True)
        ]
    x = torch.zeros(16, 16, device=device)
    reshape = torch.ops.aten.reshape.default
    (view_s,) = median_seconds([lambda: reshape(x, [256])], device, rounds)
    samples = []
    for size in group_sizes:
        samples += measure_collectives(device, size, _MESSAGE_BYTES[: 3 if quick else 99], rounds)
    return {"ops": ops, "view_s": view_s, "collectives": [_row(s) for s in samples]}


def _row(sample: Sample) -> list[Any]:
    return [sample.kind, sample.group_size, sample.num_bytes, sample.seconds, sample.busy_s]


# --- from samples to a profile


def measure_profile(
    name: str,
    *,
    base: Profile,
    device_type: str = "cpu",
    ranks: int = 1,
    group_sizes: Sequence[int] | None = None,
    dtypes: Sequence[str] | None = None,
    rounds: int = 5,
    quick: bool = False,
) -> Profile:
    """Measure this machine.

    Args:
        name: of the new profile.
        base: a profile of such a device; what is not measured is taken from it.
        device_type: "cpu" (gloo, one thread a rank) or "cuda" (NCCL, one device a rank).
        ranks: processes that run at once: as many as will train on this machine.
        group_sizes: of the collectives; default: the powers of two up to `ranks`.
        dtypes: the first is measured with all classes, others with the common ones.
        rounds: timings of each figure.
        quick: small shapes and messages only: seconds instead of a minute, and less true.

    Returns:
        The profile.

    Raises:
        ClusterError: group sizes that do not divide `ranks`, or a rank that failed.
    """
    sizes = list(group_sizes or [2**k for k in range(1, 20) if ranks % 2**k == 0])
    if any(size < 2 or ranks % size for size in sizes):
        raise ClusterError(f"group sizes {sizes} must divide the {ranks} ranks and be at least 2")
    cpu = device_type == "cpu"
    wanted = list(dtypes or ("float32", "bfloat16", *(["float64"] if cpu else ["float16"])))
    found = on_ranks(_measure_rank, ranks, device_type, wanted, sizes, rounds, quick)
    cores = (os.cpu_count() or 1) if cpu else 0
    merged = _merged(found, max(1.0, ranks / cores) if cores else 1.0)
    how = _provenance(device_type, ranks, rounds)
    source = f"measured: {rounds} interleaved rounds, {ranks} rank(s) at once"
    return replace(
        base,
        name=name,
        device=_device(base.device, merged, ranks, cores, source),
        intra=_link(base.intra, merged.collectives, source, cores / ranks) if sizes else base.intra,
        devices_per_node=ranks,
        device_name_pattern="(?!)",  # never chosen by the name of a device: others may differ
        provenance=how,
    )


@dataclass(frozen=True, slots=True)
class _Merged:
    ops: list[list[Any]]
    view_s: float
    collectives: list[Sample]


def _merged(found: Sequence[dict[str, Any]], share: float) -> _Merged:
    """Medians over ranks, times the ranks per core; collectives last as their slowest rank."""
    return _Merged(
        [
            [*rows[0][:-1], share * statistics.median(row[-1] for row in rows)]
            for rows in zip(*(rank["ops"] for rank in found), strict=True)
        ],
        share * statistics.median(rank["view_s"] for rank in found),
        [
            Sample(kind, size, n, max(r[3] for r in rows), statistics.mean(r[4] for r in rows))
            for rows in zip(*(rank["collectives"] for rank in found), strict=True)
            for kind, size, n, _, _ in rows[:1]
        ],
    )


def _curves(rows: Iterable[Sequence[Any]]) -> tuple[Curve, ...]:
    """One curve per class and dtype; the ops of a point count alike."""
    points: dict[tuple[str, str, str], dict[int, list[tuple[float, float]]]] = {}
    for op_class, dtype, unit, group, work, _, seconds in rows:
        key = (op_class, dtype_name(dtype), unit)
        points.setdefault(key, {}).setdefault(group, []).append((work, seconds))
    curves = []
    for (op_class, dtype, unit), groups in points.items():
        means = sorted(
            (geometric_mean([w for w, _ in pairs]), geometric_mean([s for _, s in pairs]))
            for pairs in groups.values()
        )
        rising = np.maximum.accumulate([s for _, s in means])
        curves.append(
            Curve(
                op_class=op_class,
                dtype=dtype,
                unit=unit,
                work=tuple(float(f"{w:.6g}") for w, _ in means),
                seconds=tuple(float(f"{s:.4g}") for s in rising),
            )
        )
    return tuple(curves)


def _device(
    base: DeviceProfile, merged: _Merged, ranks: int, cores: int, source: str
) -> DeviceProfile:
    curves = _curves(merged.ops)
    rates = {c.dtype: _rate(c) for c in curves if c.op_class == "matmul"}
    memory = next(c for c in curves if c.op_class == "memory")
    best = rates[memory.dtype]
    fractions = {
        name: Efficiency(peak_fraction=min(1.0, _rate(c) / best))
        for name in ("attention", "conv")
        for c in curves
        if (c.op_class, c.dtype) == (name, memory.dtype)
    }
    whole = Efficiency(peak_fraction=1.0)
    pointwise = next(c for c in curves if c.op_class == "pointwise")
    measured = (
        "peak_flops", "memory_bandwidth", "kernel_overhead_s", "view_overhead_s", "curves",
        "concurrent_ranks", "cores", "host_memory_bytes",
        *(f"efficiency.{n}" for n in (*fractions, "matmul", "memory")),
    )  # fmt: skip
    return replace(
        base,
        name=f"{base.name}, measured",
        peak_flops={**base.peak_flops, **rates},
        memory_bandwidth=memory.work[-1] / memory.seconds[-1],
        kernel_overhead_s=pointwise.seconds[0],
        view_overhead_s=merged.view_s,
        efficiency={**base.efficiency, **fractions, "matmul": whole, "memory": whole},
        concurrent_ranks=ranks,
        cores=cores,
        host_memory_bytes=machine_memory_bytes() // ranks,
        curves=curves,
        sources={**base.sources, **dict.fromkeys(measured, source)},
    )


def _rate(curve: Curve) -> float:
    return max(w / s for w, s in zip(curve.work, curve.seconds, strict=True))


def _compute_share(samples: Sequence[Sample], cores: float) -> float:
    """Of what a rank computes with, the share that its collectives keep busy.

    Args:
        samples: of collectives.
        cores: CPU cores for each rank; 0 where it has a device of its own.
    """
    if not cores:
        return 0.0
    busy = sum(s.busy_s for s in samples) / sum(s.seconds for s in samples)
    computing = min(1.0, cores)  # one thread a rank
    return min(1.0, max(0.0, (computing + busy - cores) / computing))


def _link(base: LinkProfile, samples: Sequence[Sample], source: str, cores: float) -> LinkProfile:
    lines: list[CollectiveLine] = []
    for kind in CollectiveKind:
        low = (0.0, 0.0)
        for size in sorted({s.group_size for s in samples}):
            rows = [s for s in samples if (s.kind, s.group_size) == (kind, size)]
            a, b = fit_line([s.num_bytes for s in rows], [s.seconds for s in rows])
            low = max(low[0], float(f"{a:.4g}")), max(low[1], float(f"{b:.4g}"))
            lines.append(
                CollectiveLine(
                    kind=str(kind), group_size=size, latency_s=low[0], seconds_per_byte=low[1]
                )
            )
    n = max(line.group_size for line in lines)
    ring = next(x for x in lines if (x.kind, x.group_size) == (CollectiveKind.ALL_REDUCE, n))
    hop = ring.latency_s / (2 * n)  # as if a launch cost as much as a hop
    return replace(
        base,
        latency_s=hop,
        base_latency_s=hop,
        bandwidth=2 * (n - 1) / (n * max(ring.seconds_per_byte, 1e-15)),
        compute_share=float(f"{_compute_share(samples, cores):.3g}"),
        lines=tuple(lines),
        sources=dict.fromkeys((*base.sources, "compute_share", "lines"), source),
    )


def _provenance(device_type: str, ranks: int, rounds: int) -> dict[str, str]:
    found = {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "cores": str(os.cpu_count()),
        "ranks": f"{ranks} at once, {ranks / (os.cpu_count() or 1):g} per core",
        "rounds": str(rounds),
    }
    if device_type == "cuda":
        found["device"] = torch.cuda.get_device_name()
    return found


@cache
def cpu_name() -> str:
    """What the processor calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile as TOML, for `Cluster.from_profile(path)`."""
    note = "Measured by `autopar profile`.\nUnits: bytes, bytes/s, FLOP/s, seconds."
    path.write_text(to_toml(profile.to_dict(), note))
