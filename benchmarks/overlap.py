"""How much communication a real step hides behind compute, with and without the passes.

    python -m benchmarks.overlap [--world-size 4] [--models llama] [--rounds 5] [--each]

The same plan runs on gloo ranks with no pass, with late waits alone, and with all passes (`--each`:
also with each pass alone). Steps are recorded by torch's profiler. Communication is the time in
which a rank has a collective in flight, from its call to its end; exposed is what of it the rank
spends inside a wait::

    hidden = 1 - |waits ∩ in flight| / |in flight|

Beside it stands what the simulator expects of the same program. Ranks that share cores also wait
for each other's compute, which counts as exposed communication here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

import autopar
from autopar.cost_model.ranks import on_ranks
from benchmarks.models import build
from benchmarks.provenance import provenance

__all__ = ["exposure", "measure", "recorded"]

RESULTS = Path(__file__).parent / "results"
PINS: dict[str, dict[str, Any]] = {
    "data": {"data": 4, "zero": 0},
    "zero-3": {"data": 4, "zero": 3},
    "data and tensor": {"data": 2, "tensor": {"mode": "1d", "size": 2}, "zero": 0},
}
Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals that cover the same, in order."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def exposure(flights: Iterable[Interval], waits: Iterable[Interval]) -> tuple[float, float]:
    """Time with a collective in flight, and how much of it is spent in waits."""
    flying, waiting = union(flights), union(waits)
    both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in flying for b in waiting)
    return sum(end - start for start, end in flying), both


def recorded(module: autopar.ParallelModule, inputs: Any) -> tuple[float, float, int]:
    """Seconds in flight, seconds exposed, and collectives of one step that torch's profiler saw."""
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as record:
        module.train_step(**inputs)
    flights, waits = [], []
    for event in record.events() or ():
        interval = (event.time_range.start / 1e6, event.time_range.end / 1e6)
        if event.name.startswith("gloo:"):
            flights.append(interval)
        elif event.name == "_c10d_functional::wait_tensor":
            waits.append(interval)
    module.zero_grad()
    return (*exposure(flights, waits), len(flights))


def measure(
    rank: int, device: str, name: str, pins: Any, settings: Sequence[Sequence[str]], rounds: int
) -> list[dict[str, Any]]:
    """One rank's figures, for each set of passes; sets take turns."""
    world = dist.get_world_size()
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=world)
    model, inputs = build(name)
    mesh = init_device_mesh("cpu", (world,))
    modules: list[autopar.ParallelModule] = []
    for passes in settings:
        given = {"plan": modules[0].plan} if modules else {"constraints": pins}
        modules.append(
            autopar.parallelize(model, mesh, inputs, cluster=cluster, passes=passes, **given)
        )
    rows: list[dict[str, Any]] = [
        {"flight_s": [], "exposed_s": [], "step_s": [], "calls": 0} for _ in settings
    ]
    for turn in range(rounds + 1):
        for module, row in zip(modules, rows, strict=True):
            flight_s, exposed_s, row["calls"] = recorded(module, inputs)
            dist.barrier()
            start = time.perf_counter()
            module.train_step(**inputs)
            module.zero_grad()
            dist.barrier()
            if turn:  # the first is to warm up
                row["step_s"].append(time.perf_counter() - start)
                row["flight_s"].append(flight_s)
                row["exposed_s"].append(exposed_s)
    for passes, module, row in zip(settings, modules, rows, strict=True):
        found = autopar.simulate(module.plan, model, inputs, traced=module.compiled.traced,
                                 passes=passes)  # fmt: skip
        row["predicted_hidden"] = max(0.0, sum(found.hidden_s)) / sum(found.comm_s)
    return rows


def compare(name: str, pins: Any, world: int, settings: list[list[str]], rounds: int) -> Any:
    """A row for each set of passes, over all ranks and rounds."""
    ranks = on_ranks(measure, world, "cpu", name, pins, settings, rounds)
    found = []
    for passes, *rows in zip(settings, *ranks, strict=True):
        flight_s = sum(sum(row["flight_s"]) for row in rows)
        exposed_s = sum(sum(row["exposed_s"]) for row in rows)
        found.append(
            {
                "passes": passes,
                "collectives": rows[0]["calls"],
                "flight_s": flight_s / world / rounds,
                "exposed_s": exposed_s / world / rounds,
                "hidden": 1 - exposed_s / flight_s,
                "predicted_hidden": rows[0]["predicted_hidden"],
                "step_s": statistics.median(rows[0]["step_s"]),
            }
        )
    return found


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """Print one plan's table."""
    heads = (
        "passes",
        "collectives",
        "in flight ms",
        "exposed ms",
        "hidden",
        "predicted",
        "step ms",
    )
    table = Table(*heads, title=title)
    for row in rows:
        table.add_row(
            ", ".join(row["passes"]) or "none",
            str(row["collectives"]),
            f"{1e3 * row['flight_s']:.1f}",
            f"{1e3 * row['exposed_s']:.1f}",
            f"{row['hidden']:.1%}",
            f"{row['predicted_hidden']:.1%}",
            f"{1e3 * row['step_s']:.1f}",
        )
    Console(width=110).print(table)


def main() -> None:
    """Print one table per model and plan; write benchmarks/results/overlap.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world-size", type=int, default=4, choices=[4, 8])
    parser.add_argument("--models", nargs="*", default=["llama"])
    parser.add_argument("--plans", nargs="*", default=list(PINS), choices=list(PINS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--each", action="store_true", help="each pass alone as well")
    parser.add_argument("--json", type=Path, default=RESULTS / "overlap.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    settings = [[], ["late"], list(autopar.PASSES)]
    if options.each:
        settings[1:2] = [[name] for name in autopar.PASSES]
    results = []
    for name in options.models:
        for plan in options.plans:
            rows = compare(name, PINS[plan], options.world_size, settings, options.rounds)
            show(f"{name}, {plan}, {options.world_size} ranks", rows)
            results.append({"model": name, "plan": plan, "rows": rows})
    text = {**provenance(), "world_size": options.world_size, "results": results}
    options.json.write_text(json.dumps(text, indent=1))


if __name__ == "__main__":
    main()
