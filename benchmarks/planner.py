"""Planner speed: seconds for trace and solve, memory, problem size and gap, per model and mesh.

The total is what `autopar.plan` takes: the chosen plan's program is written and simulated in it,
for what its communication hides and what is cut into pieces (`schedule_s`).

Pipelines are in the search; the last column is what was chosen of them. Ops are priced as they
would be fused on the devices; `--unfused` prices them one by one.

    python -m benchmarks.planner                      # nine rows
    python -m benchmarks.planner --rows all           # every model × mesh
    python -m benchmarks.planner --rows gpt-3b-p100x4 llama3-70b@32x8

Models are built on the meta device, all but the LSTM from transformers configs; nothing is
downloaded.
"""

from __future__ import annotations

import argparse
import json
import math
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
from autopar.codegen.fusion import Fusion
from autopar.core.collector import paused_collector
from autopar.core.constraints import Constraints
from autopar.core.plan import PipelinePlan
from autopar.search.pipelining import plan_step
from autopar.search.scheduling import scheduled
from autopar.tracer.trace import trace
from benchmarks.provenance import provenance

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


def _gpt2(layers: int, hidden: int, heads: int, length: int = 1024) -> Callable[[], nn.Module]:
    config = hf.GPT2Config(n_layer=layers, n_embd=hidden, n_head=heads, n_positions=length)
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


def _resnet(third: int, second: int = 4) -> Callable[[], nn.Module]:
    config = hf.ResNetConfig(depths=[3, second, third, 3])  # the default is ResNet-50
    return lambda: hf.ResNetForImageClassification(config)


def _swin(third: int, width: int) -> Callable[[], nn.Module]:
    heads = [width // 32 * 2**i for i in range(4)]
    config = hf.SwinConfig(depths=[2, 2, third, 2], embed_dim=width, num_heads=heads)
    return lambda: hf.SwinForImageClassification(config)


class _Recurrent(nn.Module):
    """A language model of four layers of an LSTM."""

    def __init__(self, vocab: int = 32768, width: int = 2048) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.LSTM(width, width, 4, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.layers(self.embed(input_ids))[0])
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def _mixtral() -> nn.Module:
    config = hf.MixtralConfig(max_position_embeddings=8192)  # its defaults are 8x7B
    return hf.MixtralForCausalLM(config)


def _gemma3() -> nn.Module:
    """The language model of Gemma 3 27B: five local layers to each global one."""
    config = hf.Gemma3TextConfig(
        hidden_size=5376,
        intermediate_size=21504,
        num_hidden_layers=62,
        num_attention_heads=32,
        num_key_value_heads=16,
        head_dim=128,
    )
    return hf.Gemma3ForCausalLM(config)


def _t5() -> nn.Module:
    config = hf.T5Config(
        d_model=1024,
        d_kv=128,
        d_ff=65536,
        num_layers=24,
        num_heads=128,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return hf.T5ForConditionalGeneration(config)


def _pairs(batch: int, length: int) -> Callable[[], Inputs]:
    """Source and target, each half as long as `length`."""
    return _tokens(batch, length // 2)


_P100_4 = {"profile": "p100", "nodes": 1, "devices_per_node": 4, "mesh": (4,)}
_P100_16 = {"profile": "p100", "nodes": 4, "devices_per_node": 4, "mesh": (4, 4)}
_F16 = torch.float16

# model, its inputs for a batch, and sequences (images) per device
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Callable[[], Inputs]], float]] = {
    "gpt2-1.5b": (_gpt2(48, 1600, 25), lambda b: _tokens(b, 1024), 2),
    "llama3-8b": (_llama(32, 4096, 14336, 32, 8), lambda b: _tokens(b, 4096), 1),
    "llama3-70b": (_llama(80, 8192, 28672, 64, 8), lambda b: _tokens(b, 4096), 0.25),
    "llama3-405b": (_llama(126, 16384, 53248, 128, 8), lambda b: _tokens(b, 4096), 0.0625),
    "mixtral-8x7b": (_mixtral, lambda b: _tokens(b, 4096), 1),
    "vit-22b": (_vit(48, 6144, 48), lambda b: _images(b, 224), 4),
    "t5-11b": (_t5, lambda b: _pairs(b, 4096), 0.5),
    "gpt3-175b": (_gpt2(96, 12288, 96, 2048), lambda b: _tokens(b, 2048), 0.125),
    "gemma3-27b": (_gemma3, lambda b: _tokens(b, 4096), 0.5),
    # the defaults of the rest are the models as released
    "gpt-oss-120b": (
        lambda: hf.GptOssForCausalLM(hf.GptOssConfig()),
        lambda b: _tokens(b, 4096),
        0.5,
    ),
    "deepseek-v3": (
        lambda: hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config()),
        lambda b: _tokens(b, 4096),
        0.25,
    ),
    # blocks are equal within stages: few of them, and many
    "resnet-50": (_resnet(6), lambda b: _images(b, 224), 4),
    "resnet-152": (_resnet(36, 8), lambda b: _images(b, 224), 4),
    "swin-t": (_swin(6, 96), lambda b: _images(b, 224), 4),
    "swin-l": (_swin(18, 192), lambda b: _images(b, 224), 4),
    "lstm-4x2048": (_Recurrent, lambda b: _tokens(b, 4096), 8),
}
MESHES: dict[str, tuple[int, ...]] = {
    "8": (8,),
    "32x8": (32, 8),
    "64x8": (64, 8),
    "4x4x4": (4, 4, 4),
    "16x8x8": (16, 8, 8),
}


def _grid() -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for name, (build, inputs, share) in MODELS.items():
        for text, mesh in MESHES.items():
            devices = math.prod(mesh)
            rows[f"{name}@{text}"] = Row(
                build=build,
                inputs=inputs(max(int(devices * share), 8)),
                profile="h100-sxm",
                nodes=devices // 8,
                devices_per_node=8,
                mesh=mesh,
            )
    return rows


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
    "llama3-405b-16-layers@64x8": Row(
        build=_llama(16, 16384, 53248, 128, 8), inputs=_tokens(32, 4096), profile="h100-sxm",
        nodes=64, devices_per_node=8, mesh=(64, 8),
    ),
    **_grid(),
}  # fmt: skip
DEFAULT = [
    "gpt-3b-p100x4", "vit-3b-p100x4", "gpt-12b-p100x16", "vit-12b-p100x16",
    "llama3-8b@8", "llama3-8b@32x8", "llama3-8b@16x8x8", "llama3-405b-16-layers@64x8",
    "llama3-405b@64x8",
]  # fmt: skip


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
        with paused_collector():  # as in autopar.plan
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
            "ilp_s": plan.solver.seconds,
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


def _described(pipeline: PipelinePlan | None) -> str:
    """Ranks × chunks, microbatches and schedule."""
    if pipeline is None:
        return "none"
    ranks = f"{pipeline.size}×{pipeline.chunks}" if pipeline.chunks > 1 else f"{pipeline.size}"
    plural = "s" * (pipeline.size > 1)
    return f"{ranks} rank{plural}, {pipeline.microbatches} microbatches, {pipeline.schedule}"


def _in_child(name: str, options: argparse.Namespace) -> dict[str, Any]:
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
    "total_s", "trace_s", "solve_s", "schedule_s", "ilp_s", "rss_gib", "result", "objective_s",
    "bound_s", "gap", "peak_gib", "limit_gib", "needs_gib", "variables", "pipeline",
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
        found = {"load": load} | _in_child(name, options)
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
