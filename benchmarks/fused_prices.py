"""How near the solver's compute seconds and bytes are to those of the program that will run fused.

    python -m benchmarks.fused_prices [--rows gpt2-1.5b@8 llama3-8b@8 …]

Each row is solved twice, in one piece: with ops priced one by one, and with ops priced as they will
be fused. Each plan's program is emitted, fused and simulated. The error is that of the solver's
seconds of compute against the simulator's. The solver prices no copies that pack shards, so some of
it is left. Peak memory stands beside what is live in the program, with parameters, optimizer states
and the batch.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from rich.console import Console
from rich.table import Table

import autopar
from autopar.codegen.emit import emit
from autopar.codegen.passes.lifetimes import Lifetimes
from autopar.codegen.shares import fused_shares
from autopar.core.constraints import Constraints
from autopar.cost_model.simulator import simulate
from autopar.solver.fit import UNLIMITED
from autopar.solver.offers import Offers
from autopar.solver.solve import solve
from benchmarks.plan_quality import trace_row
from benchmarks.planner import fusion_of
from benchmarks.planner_rows import ROWS

DEFAULT = ["gpt2-1.5b@8", "llama3-8b@8", "llama3-8b@32x8", "llama3-70b@32x8", "gpt3-175b@32x8"]
PINS: dict[str, Any] = {"checkpoint": "none"}


def compare(name: str) -> list[list[str]]:
    """Solver's and program's milliseconds of compute and bytes for both prices, as table rows."""
    row = ROWS[name]
    traced = trace_row(row)
    cluster = autopar.Cluster.from_profile(
        row.profile, nodes=row.nodes, devices_per_node=row.devices_per_node, mesh_shape=row.mesh
    )
    fusion = fusion_of(cluster)
    found = []
    for title, wanted in (("one by one", None), ("fused", fusion)):
        started = time.process_time()
        offers = Offers(cluster, fused_shares(traced, wanted) if wanted else None)
        pins = Constraints.parse(PINS)
        plan = solve(traced, cluster, constraints=pins, memory_limit=UNLIMITED, offers=offers)
        cpu_s = time.process_time() - started
        program = emit(traced, plan, [0] * len(plan.mesh_shape), fusion=fusion)
        simulated = simulate(program.joint.graph, cluster)
        solver_s = plan.predicted.compute_time_s
        cells = (1e3 * solver_s, 1e3 * simulated.compute_s, 1e3 * simulated.step_s)
        error = solver_s / simulated.compute_s - 1
        peak = plan.predicted.peak_memory_bytes
        beside = sum(plan.predicted.memory[kind] for kind in ("parameters", "optimizer", "inputs"))
        held = beside + Lifetimes(program.joint.graph).peak_bytes
        sizes = (f"{peak / 2**30:.1f}", f"{held / 2**30:.1f}", f"{peak / held - 1:+.1%}")
        seconds = (*(f"{x:.1f}" for x in cells), f"{error:+.1%}")
        found.append([name, title, *seconds, *sizes, f"{cpu_s:.1f}"])
    return found


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="*", default=DEFAULT, choices=list(ROWS))
    table = Table(
        "row", "ops priced", "solver (ms)", "simulator (ms)", "its step (ms)", "error",
        "peak (GiB)", "in the program", "error", "CPU (s)",
    )  # fmt: skip
    for name in parser.parse_args().rows:
        for cells in compare(name):
            table.add_row(*cells)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
