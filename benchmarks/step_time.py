"""Step time of autopar's plan beside torch's own parallel ways, on real processes.

    python -m benchmarks.step_time --world-size 4 [--models llama vit] [--profile FILE.toml]

All ways run in the same processes, in turns, from the same weights, with the same AdamW, on the
same global batch; losses must agree. Seconds are medians over the turns, barrier to barrier, with
the update. Peak memory is that of live tensors (what DDP's reducer allocates in C++ is not seen).
Bytes are those on the loopback device per rank, so another program's traffic counts too; the
least of all turns is shown. On one rank the others are the eager module and torch.compile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import autopar
from autopar.cost_model.catalogue import load_profile
from autopar.cost_model.measure import measure_profile, write_profile
from autopar.cost_model.ranks import on_ranks
from benchmarks.contenders import contenders
from benchmarks.provenance import provenance

RESULTS = Path(__file__).parent / "results"


def run_rank(
    rank: int, device: str, name: str, profile: str, rounds: int, constraints: Any
) -> list[dict[str, Any]]:
    """One rank's part: all contenders in turns."""
    world = dist.get_world_size()
    cluster = autopar.Cluster.from_profile(profile, devices_per_node=world)
    ways = contenders(name, cluster, constraints)
    losses = [[way.run() for _ in range(2)] for way in ways]
    for _ in range(rounds):
        for way in ways:
            way.timed()
    rows = []
    for way, loss in zip(ways, losses, strict=True):
        whole = torch.tensor(loss)
        if way.name in ("DDP", "FSDP2", "TP+FSDP2"):  # the loss of a share of the batch
            dist.all_reduce(whole)
            whole /= world
        rows.append(
            {
                "way": way.name,
                "median_s": statistics.median(way.seconds),
                "least_s": min(way.seconds),
                "most_s": max(way.seconds),
                "cpu_s": statistics.median(way.cpu_seconds),
                "peak_bytes": way.peak_bytes(),
                "sent_bytes": min(way.sent),
                "losses": whole.tolist(),
                "note": way.note,
            }
        )
    return rows


def compare(name: str, world: int, profile: str, rounds: int, constraints: Any) -> dict[str, Any]:
    """Rows of one model, and autopar's seconds over the best other's."""
    ranks = on_ranks(run_rank, world, "cpu", name, profile, rounds, constraints)
    rows = ranks[0]
    for row, *others in zip(*ranks, strict=True):
        row["peak_bytes"] = max(x["peak_bytes"] for x in (row, *others))
        row["cpu_s"] = statistics.mean(x["cpu_s"] for x in (row, *others))
    reference = torch.tensor(rows[0]["losses"])
    for row in rows:
        error = float((torch.tensor(row["losses"]) - reference).abs().max())
        if error > 1e-3:
            raise SystemExit(f"{name}: {row['way']} has other losses, off by {error:.2e}")
    best = min(row["median_s"] for row in rows[1:])
    least = min(row["least_s"] for row in rows[1:])
    return {
        "model": name,
        "world_size": world,
        "rounds": rounds,
        "rows": rows,
        "ratio": rows[0]["median_s"] / best,
        "ratio_least": rows[0]["least_s"] / least,
    }


def show(found: dict[str, Any]) -> None:
    """Print one model's table."""
    title = (
        f"{found['model']} on {found['world_size']} rank(s): autopar / best other = "
        f"{found['ratio']:.3f} (medians), {found['ratio_least']:.3f} (least)"
    )
    table = Table(
        "way", "median ms", "least to most", "CPU ms", "peak MiB", "sent MiB", title=title
    )
    for row in found["rows"]:
        table.add_row(
            f"{row['way']} {row['note']}",
            f"{1e3 * row['median_s']:.1f}",
            f"{1e3 * row['least_s']:.0f} to {1e3 * row['most_s']:.0f}",
            f"{1e3 * row['cpu_s']:.1f}",
            f"{row['peak_bytes'] / 2**20:.1f}",
            f"{row['sent_bytes'] / 2**20:.2f}",
        )
    Console(width=110).print(table)


def main() -> None:
    """Print one table per model; write benchmarks/results/step_time_N.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--models", nargs="*", default=["llama", "vit", "wide"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--profile", help="measured profile (default: measure now)")
    parser.add_argument("--constraints", type=json.loads, help="pin autopar's plan (JSON)")
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/step_time_N.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    world = options.world_size
    RESULTS.mkdir(exist_ok=True)
    profile = options.profile
    if profile is None:
        profile = str(RESULTS / f"step_time_profile_{world}.toml")
        measured = measure_profile(
            f"cpu-{world}", base=load_profile("cpu-gloo"), ranks=world, dtypes=["float32"]
        )
        write_profile(measured, Path(profile))
    results = []
    for name in options.models:
        found = compare(name, world, profile, options.rounds, options.constraints)
        show(found)
        results.append(found)
    out = options.json or RESULTS / f"step_time_{world}.json"
    out.write_text(json.dumps({**provenance(), "results": results}, indent=1))


if __name__ == "__main__":
    main()
