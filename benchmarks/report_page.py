"""The page of a large plan: bytes of plan, page and trace, and how long the page takes to open.

    python -m benchmarks.report_page                     # Llama-3 405B on 512 devices
    python -m benchmarks.report_page --row llama3-8b@8 --out plan.html

Times are of headless Chromium on this machine: from handing over the page until its script has
drawn everything and the layout is done (`inner`), and of a whole process that starts, opens the
page and saves a screenshot of it (`process`).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import torch

import autopar
from autopar.report.page import render_page
from benchmarks.planner_rows import ROWS
from tests.browser import browser, inspect

_TURNS = 5


def main() -> None:
    """Print one line a figure; `--out` keeps the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--row", default="llama3-405b@64x8", choices=list(ROWS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    row = ROWS[options.row]
    with torch.device("meta"):
        model = row.build().to(row.dtype)
    cluster = autopar.Cluster.from_profile(
        row.profile, nodes=row.nodes, devices_per_node=row.devices_per_node, mesh_shape=row.mesh
    )
    plan = autopar.plan(model.train(), cluster, row.inputs())
    with tempfile.TemporaryDirectory() as folder:
        saved, traced = Path(folder) / "plan.json", Path(folder) / "trace.json.gz"
        plan.save(saved)
        ranks = plan.to_trace(traced)
        stages = plan.pipeline.stages if plan.pipeline is not None else (plan,)
        ops = sum(len(stage.nodes) for stage in stages)
        print(f"{options.row}: {ops} ops, {len(plan.parameters)} parameters")
        print(f"plan.json      {saved.stat().st_size / 1e6:.2f} MB")
        print(f"trace.json.gz  {traced.stat().st_size / 1e6:.2f} MB, {ranks} ranks")
        started = time.perf_counter()
        page = render_page(plan)
        print(f"page           {len(page.encode()) / 1e6:.2f} MB, "
              f"rendered in {time.perf_counter() - started:.2f} s")  # fmt: skip
        if browser() is None:
            print("no Chromium is installed: opening times are left open")
        else:
            _open(page, Path(folder))
    if options.out is not None:
        options.out.write_text(page, encoding="utf-8")


def _open(page: str, folder: Path) -> None:
    inner = [inspect(page)["opened_ms"] / 1e3 for _ in range(_TURNS)]
    path = folder / "page.html"
    path.write_text(page, encoding="utf-8")
    program = browser()
    assert program is not None
    process = []
    for _ in range(_TURNS):
        command = [program, "--headless=new", "--no-sandbox", "--disable-gpu",
                   f"--user-data-dir={folder}/profile", "--window-size=1280,1000",
                   f"--screenshot={folder}/page.png", path.as_uri()]  # fmt: skip
        started = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        process.append(time.perf_counter() - started)
    for name, seconds in (("inner", inner), ("process", process)):
        low, high = min(seconds), max(seconds)
        print(f"open, {name:8} median {statistics.median(seconds):.2f} s "
              f"({low:.2f} to {high:.2f}) of {_TURNS}")  # fmt: skip
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    print(f"{version.stdout.strip()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
