"""Planner speed: seconds for trace and solve, memory, problem size and gap, per model and mesh.

    python -m benchmarks.planner                      # the small rows
    python -m benchmarks.planner --rows gpt-3b-p100x4 gpt-12b-p100x16

Models are built from transformers configs on the meta device; nothing is downloaded.
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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from rich.console import Console
from rich.table import Table
from torch import nn

import autopar
from autopar.core.constraints import Constraints
from autopar.solver.solve import solve
from autopar.tracer.trace import trace

Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement: a model, a batch and a cluster."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    profile: str
    nodes: int
    devices_per_node: int
    mesh: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16


def _tokens(batch: int, length: int) -> Callable[[], Inputs]:
    def make() -> Inputs:
        ids = torch.zeros(batch, length, dtype=torch.long, device="meta")
        return {"input_ids": ids, "labels": ids}

    return make


def _images(batch: int, size: int) -> Callable[[], Inputs]:
    def make() -> Inputs:
        pixels = torch.zeros(batch, 3, size, size, device="meta")
        return {
            "pixel_values": pixels,
            "labels": torch.zeros(batch, dtype=torch.long, device="meta"),
        }

    return make


def _gpt2(layers: int, hidden: int, heads: int) -> Callable[[], nn.Module]:
    config = hf.GPT2Config(n_layer=layers, n_embd=hidden, n_head=heads, n_positions=1024)
    return lambda: hf.GPT2LMHeadModel(config)


def _llama(layers: int, hidden: int, ffn: int, heads: int, kv: int) -> Callable[[], nn.Module]:
    config = hf.LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        vocab_size=128256,
        max_position_embeddings=8192,
    )
    return lambda: hf.LlamaForCausalLM(config)


def _vit(layers: int, hidden: int, heads: int) -> Callable[[], nn.Module]:
    config = hf.ViTConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_attention_heads=heads,
        image_size=224,
        patch_size=16,
    )
    return lambda: hf.ViTForImageClassification(config)


_P100_4 = {"profile": "p100", "nodes": 1, "devices_per_node": 4, "mesh": (4,)}
_P100_16 = {"profile": "p100", "nodes": 4, "devices_per_node": 4, "mesh": (4, 4)}
_F16 = torch.float16

ROWS: dict[str, Row] = {
    "gpt-3b-p100x4": Row(
        build=_gpt2(40, 2496, 26), inputs=_tokens(16, 1024), dtype=_F16, **_P100_4
    ),
    "vit-3b-p100x4": Row(
        build=_vit(40, 2496, 26), inputs=_images(16, 224), dtype=_F16, **_P100_4
    ),
    "gpt-12b-p100x16": Row(
        build=_gpt2(40, 4992, 52), inputs=_tokens(16, 1024), dtype=_F16, **_P100_16
    ),
    "vit-12b-p100x16": Row(
        build=_vit(40, 4992, 52), inputs=_images(16, 224), dtype=_F16, **_P100_16
    ),
    "gpt2-1.5b-h100x8": Row(
        build=_gpt2(48, 1600, 25), inputs=_tokens(8, 1024), profile="h100-sxm", nodes=1,
        devices_per_node=8, mesh=(8,),
    ),
    "llama3-8b-h100x8": Row(
        build=_llama(32, 4096, 14336, 32, 8), inputs=_tokens(8, 4096), profile="h100-sxm",
        nodes=1, devices_per_node=8, mesh=(8,),
    ),
    "llama3-8b-h100x32x8": Row(
        build=_llama(32, 4096, 14336, 32, 8), inputs=_tokens(256, 4096), profile="h100-sxm",
        nodes=32, devices_per_node=8, mesh=(32, 8),
    ),
}  # fmt: skip


def measure(row: Row) -> dict[str, Any]:
    """Plan one row in this process."""
    started = time.perf_counter()
    with torch.device("meta"):
        model = row.build().to(row.dtype)
    model.train()
    inputs = row.inputs()
    if "pixel_values" in inputs:
        inputs["pixel_values"] = inputs["pixel_values"].to(row.dtype)
    built = time.perf_counter()
    traced = trace(model, inputs)
    traced_at = time.perf_counter()
    cluster = autopar.Cluster.from_profile(
        row.profile, nodes=row.nodes, devices_per_node=row.devices_per_node, mesh_shape=row.mesh
    )
    found: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    try:
        plan = solve(traced, cluster, constraints=Constraints())
        found |= {
            "result": "plan",
            "step_s": plan.predicted.step_time_s,
            "peak_gib": plan.predicted.peak_memory_bytes / 2**30,
            "limit_gib": plan.memory_limit_bytes / 2**30,
            "gap": plan.solver.gap,
            "status": plan.solver.status,
            "variables": plan.solver.variables,
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
        "solve_s": ended - traced_at,
        "total_s": ended - started,
        "rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def _in_child(name: str) -> dict[str, Any]:
    """Measure in a fresh process, so that peak memory is the row's own."""
    command = [sys.executable, "-m", "benchmarks.planner", "--child", name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Print the table; `--json FILE` keeps it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--json")
    parser.add_argument("--child", choices=list(ROWS))
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(ROWS[options.child])))
        return
    results = {name: _in_child(name) for name in options.rows}
    table = Table(title=f"planner, {os.cpu_count()} cores, {platform.machine()}")
    columns = ("total_s", "trace_s", "solve_s", "rss_gib", "result", "step_s", "peak_gib",
               "limit_gib", "needs_gib", "gap", "variables")  # fmt: skip
    table.add_column("row")
    for column in columns:
        table.add_column(column, justify="right")
    for name, found in results.items():
        cells = [found.get(c, "") for c in columns]
        table.add_row(name, *(f"{x:.3g}" if isinstance(x, float) else str(x) for x in cells))
    Console(width=180).print(table)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"torch": torch.__version__, "rows": results}, file, indent=1)


if __name__ == "__main__":
    main()
