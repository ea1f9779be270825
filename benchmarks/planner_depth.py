"""Seconds of planning by depth and phase: equal blocks are traced and planned once.

    python -m benchmarks.planner_depth [--json FILE] [--plot FILE]

Blocks of Llama-3 8B on 32 x 8 devices, whose plans are in one piece, of Llama-3 405B on 64 x 8,
whose plans are pipelines, and of an XLM on 32 x 8, whose parts are in four lists; 8 to 126 of them.
Each is planned in a process of its own, without the cache. Printed are seconds by phase, and their
sum over that of 16 blocks.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from rich.console import Console
from rich.table import Table

from benchmarks.planner import in_child
from benchmarks.planner_rows import DEEP, DEPTHS
from benchmarks.provenance import provenance

__all__ = ["plot"]

_RESULTS = Path(__file__).parent / "results"
_PHASES = {"trace_s": "trace", "solve_s": "solve", "schedule_s": "schedule of the chosen plan"}
_BASE = 16  # blocks


def measured() -> dict[str, dict[int, dict[str, Any]]]:
    """What `planner` says of each model and number of blocks."""
    options = argparse.Namespace(unfused=False, time_limit=None, timeout=900.0)
    found = {
        f"{name}@{mesh}": {n: in_child(f"{name}-{n}-layers@{mesh}", options) for n in DEPTHS}
        for name, (_, mesh, _) in DEEP.items()
    }
    for name, rows in found.items():
        for depth, row in rows.items():
            if row["result"] != "plan":
                raise SystemExit(f"{depth} blocks of {name}: {row['result']}")
    return found


def plot(found: dict[str, dict[int, dict[str, Any]]], path: Path) -> None:
    """Stacked seconds of the phases over the number of blocks, for each model."""
    figure, panels = plt.subplots(1, len(found), figsize=(4.5 * len(found), 3.6), squeeze=False)
    for axes, (name, rows) in zip(panels[0], found.items(), strict=True):
        depths = [str(n) for n in rows]
        bottom = [0.0] * len(rows)
        for phase, label in _PHASES.items():
            heights = [row[phase] for row in rows.values()]
            axes.bar(depths, heights, bottom=bottom, label=label)
            bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
        axes.set(title=name, xlabel="blocks", ylabel="seconds")
        axes.margins(y=0.3)  # for the legend
    panels[0][0].legend(fontsize=8, loc="upper left")
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main() -> None:
    """Print the seconds, keep them and plot them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--json", type=Path, default=_RESULTS / "planner_depth.json", help="default: %(default)s")
    add("--plot", type=Path, default=_RESULTS / "planner_depth.png", help="default: %(default)s")
    options = parser.parse_args()
    found = measured()
    table = Table("blocks of", "blocks", *_PHASES.values(), "of 16 blocks'", "pipeline")
    for name, rows in found.items():
        base_s = _total_s(rows[_BASE])
        for depth, row in rows.items():
            seconds = (f"{row[phase]:.2f}" for phase in _PHASES)
            ratio = f"{_total_s(row) / base_s:.2f}"
            table.add_row(name, str(depth), *seconds, ratio, row["pipeline"])
    Console(width=140).print(table)
    options.json.write_text(json.dumps({**provenance(), "rows": found}, indent=1) + "\n")
    plot(found, options.plot)


def _total_s(row: dict[str, Any]) -> float:
    return sum(row[phase] for phase in _PHASES)


if __name__ == "__main__":
    main()
