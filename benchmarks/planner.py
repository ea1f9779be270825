"""Planner speed: seconds for trace and solve, memory, problem size and gap, per model and mesh.

The total is what `autopar.plan` takes: the chosen plan's program is written and simulated in it,
for what its communication hides and what is cut into pieces (`schedule_s`). Of solving,
`candidates_s` is making candidates, their prices and the problems of all searches, `ilp_s` solving
these; the rest is weighing plans, simulating programs and bounding pipelines.

Pipelines are in the search; the last column is what was chosen of them. Ops are priced as they
would be fused on the devices; `--unfused` prices them one by one.

    python -m benchmarks.planner                      # nine rows
    python -m benchmarks.planner --rows all           # every model × mesh
    python -m benchmarks.planner --rows gpt-3b-p100x4 llama3-70b@32x8
    python -m benchmarks.planner_depth                # seconds by depth, with a plot
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import autopar
from autopar.codegen.fusion import Fusion
from autopar.core.collector import paused_collector
from autopar.core.constraints import Constraints
from autopar.core.plan import PipelinePlan
from autopar.search.pipelining import plan_step
from autopar.search.scheduling import scheduled
from autopar.solver.build import build_problem
from autopar.solver.discrete.ilp import solve_problem
from autopar.tracer.trace import trace
from benchmarks.planner_rows import DEFAULT, ROWS, Row
from benchmarks.provenance import provenance

__all__ = ["fusion_of", "in_child", "measure"]


def fusion_of(cluster: autopar.Cluster) -> Fusion:
    """What fuses by default on a cluster's devices."""
    return Fusion.parse(None, torch.device(cluster.device_type))


def measure(row: Row, fused: bool = True, time_limit: float | None = None) -> dict[str, Any]:
    """Plan one row in this process."""
    with torch.device("meta"):
        row.build()  # imports what transformers needs for it: no part of planning
        started = time.perf_counter()
        model = row.build().to(row.dtype)
    model.train()
    inputs = row.inputs()
    if "pixel_values" in inputs:
        inputs["pixel_values"] = inputs["pixel_values"].to(row.dtype)
    built = time.perf_counter()
    traced = trace(model, inputs, fold=True)
    traced_at = time.perf_counter()
    cluster = autopar.Cluster.from_profile(
        row.profile, nodes=row.nodes, devices_per_node=row.devices_per_node, mesh_shape=row.mesh
    )
    found: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    try:
        fusion = fusion_of(cluster) if fused else None
        with paused_collector(), _clocked(build_problem, solve_problem) as spent:
            plan = plan_step(
                traced, cluster, constraints=Constraints(), fusion=fusion, seconds=time_limit
            )
            solved = time.perf_counter()
            step_s = scheduled(plan, traced).predicted.step_time_s
        found |= {
            "result": "plan",
            "schedule_s": time.perf_counter() - solved,
            "scheduled_step_s": step_s,
            "step_s": plan.predicted.step_time_s,
            "peak_gib": plan.predicted.peak_memory_bytes / 2**30,
            "limit_gib": plan.memory_limit_bytes / 2**30,
            "gap": plan.solver.gap,
            "status": plan.solver.status,
            "objective_s": plan.solver.objective,
            "bound_s": plan.solver.bound,
            "candidates_s": spent["build_problem"],
            "ilp_s": spent["solve_problem"],
            "variables": plan.solver.variables,
            "pipeline": _described(plan.pipeline),
        }
    except autopar.InfeasiblePlanError as error:
        found |= {
            "result": "infeasible",
            "limit_gib": (error.memory_limit_bytes or 0) / 2**30,
            "needs_gib": (error.required_bytes or 0) / 2**30,
        }
    ended = time.perf_counter()
    return found | {
        "build_s": built - started,
        "trace_s": traced_at - built,
        "solve_s": ended - traced_at - found.get("schedule_s", 0.0),
        "total_s": ended - started,
        "cpu_s": time.process_time(),
        "rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


@contextmanager
def _clocked(*functions: Callable[..., Any]) -> Iterator[dict[str, float]]:
    """Seconds that calls of some of autopar's functions take, by name."""
    spent = {function.__name__: 0.0 for function in functions}

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[function.__name__] += time.perf_counter() - started

        return run

    modules = [m for name, m in sys.modules.items() if name.startswith("autopar.")]
    places = [(m, f) for m in modules for f in functions if getattr(m, f.__name__, None) is f]
    for module, function in places:
        setattr(module, function.__name__, timed(function))
    try:
        yield spent
    finally:
        for module, function in places:
            setattr(module, function.__name__, function)


def _described(pipeline: PipelinePlan | None) -> str:
    """Ranks × chunks, microbatches and schedule."""
    if pipeline is None:
        return "none"
    ranks = f"{pipeline.size}×{pipeline.chunks}" if pipeline.chunks > 1 else f"{pipeline.size}"
    plural = "s" * (pipeline.size > 1)
    return f"{ranks} rank{plural}, {pipeline.microbatches} microbatches, {pipeline.schedule}"


def in_child(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure in a fresh process, so that peak memory is the row's own; a failure is a result."""
    command = [sys.executable, "-m", "benchmarks.planner", "--child", name]
    command += ["--unfused"] if options.unfused else []
    command += ["--time-limit", str(options.time_limit)] if options.time_limit else []
    timeout = options.timeout
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout)
    except subprocess.TimeoutExpired:
        return {"result": f"no answer in {timeout:.0f} s"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"result": f"failed ({done.returncode}): {last}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


_COLUMNS = (
    "total_s", "trace_s", "solve_s", "candidates_s", "ilp_s", "schedule_s", "rss_gib", "result",
    "objective_s", "bound_s", "gap", "peak_gib", "limit_gib", "needs_gib", "variables", "pipeline",
)  # fmt: skip


def _cells(found: dict[str, Any]) -> list[str]:
    cells = [found.get(c, "") for c in _COLUMNS]
    return [f"{x:.3g}" if isinstance(x, float) else str(x)[:60] for x in cells]


def main() -> None:
    """Print each row as it comes, then the table; `--json FILE` keeps each as a line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    rows = f"model@mesh, or all; default: {' '.join(DEFAULT)}"
    parser.add_argument("--rows", nargs="*", default=DEFAULT, metavar="ROW", help=rows)
    parser.add_argument("--json", metavar="FILE", help="a line for each row, as it comes")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for each row")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="as of autopar.plan")
    parser.add_argument("--unfused", action="store_true", help="price ops one by one")
    parser.add_argument("--child", help=argparse.SUPPRESS)  # one row, in this process
    options = parser.parse_args()
    unknown = [name for name in options.rows if name not in ROWS and options.rows != ["all"]]
    if unknown:
        parser.error(f"no row {unknown[0]!r}; there are {' '.join(ROWS)}")
    if options.child:
        row = ROWS[options.child]
        print(json.dumps(measure(row, not options.unfused, options.time_limit)))
        return
    names = list(ROWS) if options.rows == ["all"] else options.rows
    table = Table(title=f"planner, {os.cpu_count()} cores, {platform.machine()}")
    table.add_column("row")
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    if options.json:
        with open(options.json, "w") as file:
            file.write(json.dumps(provenance()) + "\n")
    for name in names:
        load = os.getloadavg()[0]
        found = {"load": load} | in_child(name, options)
        cells = _cells(found)
        told = (f"{c}={x}" for c, x in zip(_COLUMNS, cells, strict=True) if x)
        print(name, *told, flush=True)
        table.add_row(name, *cells)
        if options.json:
            with open(options.json, "a") as file:
                file.write(json.dumps({"row": name} | found) + "\n")
    Console(width=180).print(table)


if __name__ == "__main__":
    main()
