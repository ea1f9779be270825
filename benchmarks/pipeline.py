"""Idle share of pipeline schedules: simulated beside the papers' formulas.

Equal stages, B = 2F and I = W = F, no transfers, so that only the schedule is compared. The
formulas are in `autopar/core/schedule.py`; the one of zero-bubble holds from m >= p.

Usage: python -m benchmarks.pipeline [--json]
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from autopar.core.schedule import actions, in_flight
from autopar.cost_model.pipeline import simulate_pipeline

SECONDS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
SIZES = ((2, 2), (2, 8), (4, 4), (4, 8), (4, 32), (8, 8), (8, 64))
SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zero-bubble", 1))


def formula(schedule: str, p: int, m: int, v: int) -> float:
    """The idle share of p ranks with m microbatches and v chunks."""
    return (p - 1) / ((3 if schedule == "zero-bubble" else v) * m + p - 1)


def rows() -> list[dict[str, Any]]:
    """One row per schedule and size."""
    found = []
    for schedule, chunks in SCHEDULES:
        for p, m in SIZES:
            orders = actions(schedule, p, m, chunks)
            result = simulate_pipeline(orders, [SECONDS] * (p * chunks))
            found.append(
                {
                    "schedule": schedule,
                    "ranks": p,
                    "microbatches": m,
                    "chunks": chunks,
                    "simulated": result.bubble_fraction,
                    "formula": formula(schedule, p, m, chunks),
                    "in_flight": max(in_flight(orders).ranks),
                }
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    found = rows()
    if arguments.json:
        print(json.dumps(found))
        return
    print(f"{'schedule':12} {'p':>3} {'m':>4} {'v':>3} {'simulated':>10} {'formula':>9} in flight")
    for row in found:
        print(
            f"{row['schedule']:12} {row['ranks']:>3} {row['microbatches']:>4} {row['chunks']:>3} "
            f"{row['simulated']:>10.2%} {row['formula']:>9.2%} {row['in_flight']:>9}"
        )


if __name__ == "__main__":
    main()
