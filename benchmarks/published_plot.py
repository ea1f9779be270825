"""Plot of published runs: predicted against published step time, one colour per source."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.published import Outcome

__all__ = ["plot"]


def plot(found: Sequence[Outcome], path: Path) -> None:
    """Write a PNG or SVG, by the ending of `path`."""
    sources: dict[str, list[Outcome]] = defaultdict(list)
    for o in found:
        if o.predicted_s and o.measured_s:
            sources[str(o.row.get("source", "")).split(" ")[0]].append(o)
    figure, axes = plt.subplots(figsize=(6, 5), layout="constrained")
    for name, rows in sources.items():
        measured = [o.measured_s for o in rows]
        axes.scatter(measured, [o.predicted_s for o in rows], s=9, label=f"{name} ({len(rows)})")
    ends = [min(o.measured_s for s in sources.values() for o in s if o.measured_s),
            max(o.measured_s for s in sources.values() for o in s if o.measured_s)]  # fmt: skip
    for share, style in ((1.0, "-"), (0.8, ":"), (1.2, ":")):
        axes.plot(ends, [share * end for end in ends], style, color="grey", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="published step time (s)",
             ylabel="predicted step time (s)")  # fmt: skip
    axes.set_title("dotted: 20% less and more", fontsize=9)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
