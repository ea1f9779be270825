"""Where and when a benchmark was run, kept with its results."""

from __future__ import annotations

import datetime
import os

import torch

from autopar.cost_model.measure import cpu_name

__all__ = ["provenance"]


def provenance() -> dict[str, str | int]:
    """Date, versions and processor; `load` is of the last minute, in runnable processes."""
    return {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "cpu": cpu_name(),
        "cores": os.cpu_count() or 1,
        "load": f"{os.getloadavg()[0]:.2f}",
    }
