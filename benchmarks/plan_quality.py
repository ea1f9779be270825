"""The chosen plan beside hand-written ones, priced by the same cost model under the same limit.

    python -m benchmarks.plan_quality [--rows llama3-8b@32x8 …] [--json FILE]

A hand-written plan is a set of constraints; what it leaves open is still chosen, in its favour.
"""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import autopar
from autopar.core.constraints import Constraints
from autopar.core.graph import TracedModel
from autopar.search.pipelining import plan_step
from autopar.search.scheduling import scheduled
from autopar.tracer.trace import trace
from benchmarks.planner import fusion_of
from benchmarks.planner_rows import ROWS, Row
from benchmarks.provenance import provenance

DEFAULT = [
    "gpt2-1.5b@8", "llama3-8b@8", "llama3-8b@32x8", "llama3-70b@32x8", "llama3-405b@64x8",
    "mixtral-8x7b@32x8", "vit-22b@32x8", "t5-11b@32x8", "gpt3-175b@32x8",
]  # fmt: skip


_STAGES = 4  # of hand-written pipelines, with as many microbatches as serve best
_DEEP = 16  # of those of tensor parallel nodes, where there are nodes enough


def hand_written(mesh: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    """Constraints of the usual recipes on a mesh whose last axis is a node."""
    devices, node = math.prod(mesh), mesh[-1]
    tensor = {"tensor": {"mode": "1d", "size": node}, "sequence": "megatron"}
    plans: dict[str, dict[str, Any]] = {
        "DDP": {"data": devices, "zero": 0},
        "ZeRO-1": {"data": devices, "zero": 1},
        "FSDP": {"data": devices, "zero": 3},
    }
    if devices == node:
        plans["Megatron TP+SP"] = tensor
    else:
        plans["Megatron TP+SP, DDP"] = {"data": devices // node, **tensor, "zero": 0}
        plans["Megatron TP+SP, ZeRO-1"] = {"data": devices // node, **tensor, "zero": 1}
        plans["TP+SP, FSDP"] = {"data": devices // node, **tensor, "zero": 3}
    stages = {"pipeline": {"size": _STAGES, "schedule": "1f1b"}}
    plans["PP, ZeRO-1"] = {**stages, "data": devices // _STAGES, "zero": 1}
    if devices > node:
        groups = devices // node // _STAGES
        plans["PP, TP+SP, ZeRO-1"] = {**stages, "data": groups, **tensor, "zero": 1}
        if devices // node >= _DEEP:
            deep = {"pipeline": {"size": _DEEP, "schedule": "1f1b"}, "zero": 1}
            groups = devices // node // _DEEP
            plans[f"PP of {_DEEP}, TP+SP, ZeRO-1"] = {**deep, "data": groups, **tensor}
    return plans


def trace_row(row: Row) -> TracedModel:
    """The folded graph of a row's model."""
    with torch.device("meta"):
        model = row.build().to(row.dtype).train()
    inputs = row.inputs()
    if "pixel_values" in inputs:
        inputs["pixel_values"] = inputs["pixel_values"].to(row.dtype)
    return trace(model, inputs, fold=True)


def price(traced: TracedModel, row: Row, wanted: dict[str, Any] | None) -> dict[str, Any]:
    """Predicted seconds and peak of the best plan under constraints."""
    cluster = autopar.Cluster.from_profile(
        row.profile, nodes=row.nodes, devices_per_node=row.devices_per_node, mesh_shape=row.mesh
    )
    try:
        plan = plan_step(
            traced, cluster, constraints=Constraints.parse(wanted), fusion=fusion_of(cluster)
        )
        plan = scheduled(plan, traced)
    except autopar.InfeasiblePlanError as error:
        return {"result": "does not fit", "needs_gib": (error.required_bytes or 0) / 2**30}
    except autopar.ConstraintError as error:
        return {"result": f"cannot hold: {error}"}
    return {
        "result": "plan",
        "step_s": plan.predicted.step_time_s,
        "comm_s": plan.predicted.exposed_time_s,
        "pipeline": _shape(plan),
        "peak_gib": plan.predicted.peak_memory_bytes / 2**30,
        "gap": plan.solver.gap,
    }


def _shape(plan: autopar.Plan) -> str:
    p = plan.pipeline
    return f"{p.size} ranks, {p.microbatches} turns, {p.schedule}" if p else ""


def compare(name: str) -> dict[str, Any]:
    """Predictions of autopar's plan and of every hand-written one for a row."""
    row = ROWS[name]
    traced = trace_row(row)
    results = {"autopar": price(traced, row, None)}
    for plan, wanted in hand_written(row.mesh).items():
        results[plan] = price(traced, row, wanted)
    return results


def _table(name: str, results: dict[str, Any]) -> Table:
    table = Table(
        "plan", "step (s)", "exposed (s)", "peak (GiB)", "× autopar", "pipeline", title=name
    )
    chosen = results["autopar"].get("step_s")
    for plan, found in results.items():
        if found["result"] != "plan":
            needs = found.get("needs_gib")
            table.add_row(plan, found["result"][:60], "", f"needs {needs:.1f}" if needs else "")
            continue
        ratio = f"{found['step_s'] / chosen:.3f}" if chosen else ""
        cells = [found[k] for k in ("step_s", "comm_s", "peak_gib")]
        table.add_row(plan, *(f"{x:.4g}" for x in cells), ratio, found["pipeline"])
    return table


def main() -> None:
    """Print one table per row; `--json FILE` keeps each as a line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    rows = f"model@mesh; default: {' '.join(DEFAULT)}"
    parser.add_argument("--rows", nargs="*", default=DEFAULT, metavar="ROW", help=rows)
    parser.add_argument("--json", metavar="FILE", help="a line for each row, as it comes")
    options = parser.parse_args()
    unknown = [name for name in options.rows if name not in ROWS]
    if unknown:
        parser.error(f"no row {unknown[0]!r}; there are {' '.join(ROWS)}")
    if options.json:
        with open(options.json, "w") as file:
            file.write(json.dumps(provenance()) + "\n")
    for name in options.rows:
        results = compare(name)
        Console(width=110).print(_table(name, results))
        if options.json:
            with open(options.json, "a") as file:
                file.write(json.dumps({"row": name, "plans": results}) + "\n")


if __name__ == "__main__":
    main()
