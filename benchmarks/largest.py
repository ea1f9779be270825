"""The largest GPT-2-style model that fits: chosen automatically, and by FSDP, 1D or 2D alone.

    python -m benchmarks.memory --largest [--devices 4 16] [--gb 16] [--ways 2d] [--json FILE]

Models have width h, h / 128 layers (at least 4), heads of 64 and GPT-2's vocabulary; the batch is
one sequence of 1024 tokens per device; fp32 masters and AdamW's states, bf16 compute. Nothing is
allocated: each model is traced on the meta device, folded, and the planner is asked for the least
memory that it finds a plan for, recomputation included. Widths are multiples of 512, bisected.

A way other than the automatic one is a set of constraints, without states on the host; what they
leave open is chosen in its favour. "on-device" is the automatic one without states on the host.
With 4 devices, the same search is then run on a scaled-down model and limit, and the model that is
predicted to fit is trained on 4 gloo ranks: its measured peak stands beside the limit.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import transformers as hf
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.core.constraints import Constraints
from autopar.core.graph import TracedModel
from autopar.cost_model.ranks import on_ranks
from autopar.errors import InfeasiblePlanError
from autopar.solver.solve import solve
from autopar.tracer.trace import trace
from benchmarks.provenance import provenance

__all__ = ["add_arguments", "least_bytes", "run"]

DEVICES, GIGABYTES = (1, 4, 16, 64), (16, 40, 80)
WAYS = ("automatic", "on-device", "fsdp", "1d", "2d")
_STEP, _WIDEST, _LENGTH = 512, 48, 1024
_RANKS, _LIMIT_MB = 4, 16
_SMALL = {"step": 16, "widest": 40, "length": 32, "vocab": 512, "head": 16, "batch": 8}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this part."""
    parser.add_argument("--largest", action="store_true", help="the largest model that fits")
    parser.add_argument("--devices", type=int, nargs="*", default=DEVICES, choices=DEVICES)
    parser.add_argument("--gb", type=int, nargs="*", default=GIGABYTES, help="10^9 bytes a device")
    parser.add_argument("--ways", nargs="*", default=WAYS, choices=WAYS)


def model_of(width: int) -> tuple[int, Callable[[], nn.Module]]:
    """Layers of a model, and what builds it."""
    layers = max(4, width // 128)
    config = hf.GPT2Config(
        n_layer=layers, n_embd=width, n_head=width // 64, n_positions=_LENGTH, attn_pdrop=0.0,
        embd_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    return layers, lambda: hf.GPT2LMHeadModel(config)


def pins(way: str, devices: int) -> Constraints:
    """What a way is pinned to."""
    if way == "automatic":
        return Constraints()
    pinned: dict[str, Any] = {"offload": "none"}
    if way == "fsdp":
        pinned |= {"data": devices, "zero": 3}
    elif way != "on-device":
        pinned |= {"tensor": {"mode": way, "size": devices}}
    return Constraints.parse(pinned)


def least_bytes(traced: TracedModel, cluster: autopar.Cluster, wanted: Constraints) -> float:
    """The least peak that the planner finds a plan for; infinite where the shapes do not allow it.

    Args:
        traced: the step.
        cluster: whose devices are taken.
        wanted: what is pinned.
    """
    try:
        plan = solve(traced, cluster, constraints=wanted, memory_limit=1)
    except InfeasiblePlanError as error:
        return math.inf if error.required_bytes is None else float(error.required_bytes)
    return float(plan.predicted.peak_memory_bytes)


class Search:
    """Least bytes by devices, way and width, each found once."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, str, int], float] = {}
        self.traced: dict[tuple[int, int], TracedModel] = {}
        self.parameters: dict[int, int] = {}

    def trace(self, devices: int, width: int) -> TracedModel:
        if (devices, width) not in self.traced:
            with torch.device("meta"):
                model = model_of(width)[1]()
            self.parameters[width] = sum(p.numel() for p in model.parameters())
            ids = torch.zeros(devices, _LENGTH, dtype=torch.long, device="meta")
            inputs = {"input_ids": ids, "labels": ids}
            found = trace(model.train(), inputs, fold=True, precision="bf16")
            self.traced[devices, width] = found
        return self.traced[devices, width]

    def least(self, devices: int, way: str, width: int) -> float:
        key = (devices, way, width)
        if key not in self.known:
            side = math.isqrt(devices)
            cluster = autopar.Cluster.from_profile(
                "a100-80g", nodes=max(1, devices // 8), devices_per_node=min(devices, 8),
                mesh_shape=(side, side) if devices > 1 else (1,),
            )  # fmt: skip
            traced = self.trace(devices, width)
            self.known[key] = least_bytes(traced, cluster, pins(way, devices))
        return self.known[key]

    def largest(self, devices: int, way: str, limit: float) -> int:
        """The greatest width that fits, 0 where none does."""
        return bisect(lambda n: self.least(devices, way, n * _STEP) <= limit, _WIDEST) * _STEP


def bisect(fits: Callable[[int], bool], most: int) -> int:
    """The greatest n of 1 … `most` that fits, if smaller ones do; 0 if 1 does not."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def run(options: argparse.Namespace, console: Console) -> None:
    """Print each row as it comes, then the table; with 4 devices, train the scaled-down model."""
    search, rows = Search(), []
    for devices in options.devices:
        for gigabytes in sorted(options.gb):
            row: dict[str, Any] = {"devices": devices, "gb": gigabytes}
            for way in options.ways:
                if devices == 1 and way not in ("automatic", "on-device"):
                    continue
                width = search.largest(devices, way, gigabytes * 1e9)
                peak = search.known.get((devices, way, width))
                layers = model_of(width)[0] if width else 0
                billions = search.parameters.get(width, 0) / 1e9
                row[way] = {"width": width, "layers": layers, "billions": billions, "peak": peak}
            rows.append(row)
            console.print(*_line(row, options.ways))
    table = Table("devices", "GB each", *options.ways, title="largest model, 10^9 parameters")
    for row in rows:
        table.add_row(*_line(row, options.ways))
    console.print(table)
    real = None
    if _RANKS in options.devices:
        real = trained_at_a_limit(_LIMIT_MB * 10**6)
        console.print(
            f"on {_RANKS} gloo ranks, limit {_LIMIT_MB} MB: width {real['width']}, "
            f"{real['parameters'] / 1e6:.2f}e6 parameters, predicted "
            f"{real['predicted'] / 1e6:.2f} MB, measured {real['measured'] / 1e6:.2f} MB"
        )
        if real["measured"] > _LIMIT_MB * 10**6:
            raise SystemExit("the measured peak is above the limit")
    if options.json:
        about = {**provenance(), "rows": rows, "real": real}
        options.json.write_text(json.dumps(about, indent=1) + "\n")


def _line(row: dict[str, Any], ways: tuple[str, ...]) -> list[str]:
    cells = [str(row["devices"]), str(row["gb"])]
    for way in ways:
        found = row.get(way)
        text = "-" if found is None else f"{found['billions']:.2f} ({found['width']})"
        cells.append(text)
    return cells


# --- the same on gloo ranks ----------------------------------------------------------------------
def small(width: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A scaled-down model of four layers, and its batch."""
    torch.manual_seed(0)
    config = hf.GPT2Config(
        n_layer=4, n_embd=width, n_head=width // _SMALL["head"], n_positions=_SMALL["length"],
        vocab_size=_SMALL["vocab"], attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    shape = (_SMALL["batch"], _SMALL["length"])
    ids = torch.randint(0, _SMALL["vocab"], shape, generator=generator)
    return hf.GPT2LMHeadModel(config).train(), {"input_ids": ids, "labels": ids.clone()}


def run_rank(rank: int, device: str, width: int, limit: int) -> dict[str, int]:
    """One rank's part: plan under the limit, train, measure."""
    from benchmarks.memory import measure, predicted_of

    model, inputs = small(width)
    parameters = sum(p.numel() for p in model.parameters())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallel = autopar.parallelize(model, mesh, inputs, memory_limit=limit, cache=False)
    _, peak = measure(parallel, inputs)
    return {"predicted": predicted_of(parallel), "measured": peak, "parameters": parameters}


def trained_at_a_limit(limit: int) -> dict[str, int]:
    """Find the widest scaled-down model that fits, and train it on gloo ranks."""
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=_RANKS)

    def fits(number: int) -> bool:
        model, inputs = small(number * _SMALL["step"])
        return least_bytes(trace(model, inputs), cluster, Constraints()) <= limit

    width = bisect(fits, _SMALL["widest"]) * _SMALL["step"]
    if not width:
        raise SystemExit(f"no scaled-down model fits {limit} bytes")
    ranks = on_ranks(run_rank, _RANKS, "cpu", width, limit)
    worst: dict[str, int] = max(ranks, key=lambda r: r["measured"])
    return {"limit": limit, "width": width, **worst}
