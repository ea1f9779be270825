"""Idle share of pipeline schedules: the papers' formulas, simulated, and measured on gloo ranks.

Equal stages, B = 2F and I = W = F, so that only the schedule is compared; the simulation has no
transfers. The formulas are in `autopar/core/schedule.py`; the one of zero-bubble holds from m >= p.
What is measured, and how, is in `benchmarks/bubble.py`.

Usage: python -m benchmarks.pipeline [--measure 2 4] [--json]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from autopar.core.schedule import actions, in_flight
from autopar.cost_model.pipeline import simulate_pipeline
from benchmarks import bubble

SECONDS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
SIZES = ((2, 2), (2, 8), (4, 4), (4, 8), (4, 32), (8, 8), (8, 64))
SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zero-bubble", 1))


def formula(schedule: str, p: int, m: int, v: int) -> float:
    """The idle share of p ranks with m microbatches and v chunks."""
    return (p - 1) / ((3 if schedule == "zero-bubble" else v) * m + p - 1)


def with_measured(found: list[dict[str, Any]], ranks: Sequence[int], seconds: float) -> None:
    """Add the measured share to the rows of some numbers of ranks, with up to 8 microbatches."""
    for p in ranks:
        mine = [row for row in found if row["ranks"] == p and row["microbatches"] <= 8]
        keys = ("schedule", "microbatches", "chunks")
        shares = bubble.measured(p, [{key: row[key] for key in keys} for row in mine], seconds)
        for row, share in zip(mine, shares, strict=True):
            row["measured"] = share


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
    parser.add_argument(
        "--measure", type=int, nargs="*", default=[2, 4], help="numbers of ranks to measure"
    )
    parser.add_argument(
        "--seconds", type=float, default=0.05, help="of a forward; longer on a busy machine"
    )
    arguments = parser.parse_args()
    found = rows()
    with_measured(found, arguments.measure, arguments.seconds)
    if arguments.json:
        print(json.dumps(found))
        return
    print(
        f"{'schedule':12} {'p':>3} {'m':>4} {'v':>3} {'simulated':>10} {'formula':>9} "
        f"{'measured':>9} in flight"
    )
    for row in found:
        share = f"{row['measured']:.2%}" if "measured" in row else ""
        print(
            f"{row['schedule']:12} {row['ranks']:>3} {row['microbatches']:>4} {row['chunks']:>3} "
            f"{row['simulated']:>10.2%} {row['formula']:>9.2%} "
            f"{share:>9} {row['in_flight']:>9}"
        )


if __name__ == "__main__":
    main()
