"""Predictions from folded programs, held to whole ones, with the buckets chosen and the widest.

    python -m benchmarks.buckets [--rows ROW ...]

A plan is made for each row of `benchmarks.planner`. The program of all blocks is simulated, of the
plan as it is, and with buckets as large as latency alone asks for. Rows must be plans in one piece.
"""

from __future__ import annotations

import argparse
import platform
from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table

import autopar
from autopar.core.constraints import Constraints
from autopar.core.plan import BucketBytes, Plan
from autopar.search.pipelining import plan_step
from autopar.search.scheduling import scheduled
from autopar.tracer.trace import trace
from benchmarks.planner import fusion_of
from benchmarks.planner_rows import ROWS, Row

DEFAULT = [
    *("gpt2-1.5b@8", "gpt2-1.5b@32x8", "gpt2-1.5b@64x8", "gpt2-1.5b@16x8x8"),
    *("llama3-8b@8", "llama3-8b@32x8", "llama3-8b@16x8x8"),
]


def _widest(plan: Plan) -> tuple[BucketBytes, ...]:
    """Buckets as latency asks for them, whatever is copied."""
    cluster = autopar.Cluster.from_dict(plan.cluster)
    return tuple(replace(b, num_bytes=cluster.bucket_bytes(b.kind, b.axis)) for b in plan.buckets)


def _measure(name: str, row: Row, table: Table) -> None:
    with torch.device("meta"):
        model = row.build().to(row.dtype).train()
    inputs = row.inputs()
    if "pixel_values" in inputs:
        inputs["pixel_values"] = inputs["pixel_values"].to(row.dtype)
    cluster = autopar.Cluster.from_profile(
        row.profile, nodes=row.nodes, devices_per_node=row.devices_per_node, mesh_shape=row.mesh
    )
    folded, whole = trace(model, inputs, fold=True), trace(model, inputs)
    found = plan_step(folded, cluster, constraints=Constraints(), fusion=fusion_of(cluster))
    plan = scheduled(found, folded)
    if plan.pipeline is not None:
        raise SystemExit(f"{name} is a pipeline; give rows of plans in one piece")
    predicted = plan.predicted
    table.add_row(
        name,
        "as predicted",
        f"{predicted.step_time_s - predicted.update_s:.4g}",
        f"{predicted.packing_s:.3g}",
        f"{predicted.exposed_time_s:.3g}",
    )
    wide = replace(plan, buckets=_widest(plan))
    for kind, each in (("the program", plan), ("with the widest buckets", wide)):
        seen = autopar.simulate(each, model, inputs, traced=whole)
        parts = (f"{s:.3g}" for s in (seen.packing_s, sum(seen.exposed_s)))
        table.add_row("", kind, f"{seen.step_s:.4g}", *parts)
    table.add_section()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="*", default=DEFAULT, choices=list(ROWS), metavar="ROW")
    options = parser.parse_args()
    table = Table(title=f"buckets, torch {torch.__version__}, {platform.machine()}")
    for column in ("row", "", "step without update (s)", "packing (s)", "exposed (s)"):
        table.add_column(column)
    for name in options.rows:
        _measure(name, ROWS[name], table)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
