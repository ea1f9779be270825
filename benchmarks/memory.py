"""Peak memory per rank, measured on gloo ranks, beside the predicted one.

    python -m benchmarks.memory [--models gpt2 llama] [--only pipeline] [--fused] [--json FILE]
    python -m benchmarks.memory --largest [--devices 4] [--gb 16]

The first form runs each plan on four ranks: ZeRO stage × recomputation × microbatches, then
pipelines. Measured is the most that is live after any op of the second training step: parameters,
AdamW's states, the batch, activations and gradients. Beside it stand what parameters and states
take alone, measured, and what they would take if each were split over all ranks that may (theory).
It ends with an error where a prediction is more than 5% above what was measured or 2% below.

The second form is described in `benchmarks/largest.py`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers as hf
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.core.plan import Plan
from autopar.cost_model.ranks import on_ranks
from autopar.runtime.live import LiveBytes
from autopar.runtime.pipeline import PipelinedStep
from benchmarks import largest
from benchmarks.provenance import provenance

__all__ = ["measure", "predicted_of"]

WORLD = 4
ABOVE, BELOW = 0.05, 0.02
_VOCAB, _BATCH, _LENGTH = 512, 16, 32
MODELS = ("gpt2", "llama")
_AT_ONCE = 6  # rows that one start of the ranks runs


def build(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Four layers of width 192, whose weights and activations weigh about the same."""
    torch.manual_seed(0)
    if name == "gpt2":
        shape = hf.GPT2Config(
            n_layer=4, n_embd=192, n_head=4, vocab_size=_VOCAB, n_positions=_LENGTH,
            attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        model: nn.Module = hf.GPT2LMHeadModel(shape)
    else:
        model = hf.LlamaForCausalLM(
            hf.LlamaConfig(
                num_hidden_layers=4,
                hidden_size=192,
                intermediate_size=512,
                num_attention_heads=4,
                num_key_value_heads=4,
                vocab_size=_VOCAB,
                max_position_embeddings=_LENGTH,
            )
        )
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, _VOCAB, (_BATCH, _LENGTH), generator=generator)
    return model.train(), {"input_ids": ids, "labels": ids.clone()}


def grid() -> list[dict[str, Any]]:
    """Constraints of the rows without pipelines."""
    kinds = ("none", "selective", "full")
    return [
        {"data": WORLD, "zero": zero, "checkpoint": kind}
        | ({"pipeline": {"size": 1, "microbatches": turns}} if turns > 1 else {})
        for turns, kind, zero in itertools.product((1, 4), kinds, range(4))
    ]


def pipelines() -> list[dict[str, Any]]:
    """Constraints of the rows with pipelines."""
    two = {"size": 2, "microbatches": 4}
    return [
        {"pipeline": {**two, "schedule": "gpipe"}, "tensor": "1d"},
        {"pipeline": {**two, "schedule": "1f1b"}, "tensor": "1d"},
        {"pipeline": {**two, "schedule": "gpipe"}, "data": 2, "zero": 1},
        {"pipeline": {**two, "schedule": "1f1b"}, "data": 2, "zero": 1},
        {"pipeline": {**two, "schedule": "1f1b"}, "data": 2, "zero": 3, "checkpoint": "full"},
        {"pipeline": {**two, "schedule": "interleaved", "chunks": 2}, "tensor": "1d"},
        {"pipeline": {**two, "schedule": "interleaved", "chunks": 2}, "data": 2, "zero": 1},
        {"pipeline": {**two, "schedule": "zero-bubble"}, "tensor": "1d", "checkpoint": "full"},
        {"pipeline": {"size": 4, "microbatches": 4, "schedule": "gpipe"}},
        {"pipeline": {"size": 4, "microbatches": 8, "schedule": "1f1b"}},
        {"pipeline": {"size": 4, "microbatches": 8, "schedule": "zero-bubble"}},
    ]


def predicted_of(parallel: autopar.ParallelModule) -> int:
    """Predicted peak of this rank."""
    plan: Plan = parallel.plan
    step = parallel.first_step
    if not isinstance(step, PipelinedStep):
        return plan.predicted.peak_memory_bytes
    return step.pipeline.peaks[step.mesh.rank]


def measure(parallel: autopar.ParallelModule, inputs: dict[str, Any]) -> tuple[int, int]:
    """Bytes of parameters and AdamW's states, and the peak of the step after they were made."""
    optimizer = torch.optim.AdamW(parallel.parameters())
    parallel.train_step(**inputs)
    optimizer.step()
    optimizer.zero_grad()
    live = LiveBytes()
    states = [list(state.values()) for state in optimizer.state.values()]
    live.hold([list(parallel.parameters()), states])
    kept = live.peak_bytes
    live.hold([list(parallel.buffers()), inputs])
    with live:
        parallel.train_step(**inputs)
    return kept, live.peak_bytes


def run_rank(rank: int, device: str, name: str, chosen: Any, fused: bool) -> list[dict[str, Any]]:
    """One rank's part of some rows."""
    return [_row(name, constraints, fused) for constraints in chosen]


def _row(name: str, constraints: dict[str, Any], fused: bool) -> dict[str, Any]:
    model, inputs = build(name)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    options: dict[str, Any] = {"constraints": constraints, "cache": False, "fusion": fused}
    parallel = autopar.parallelize(model, mesh, inputs, **options)
    split = constraints.get("zero", 0) > 0 or "tensor" in constraints
    ways = math.prod(parallel.plan.mesh_shape) if split else 1
    theory = sum(math.prod(p.shape) * p.element_size() * 3 for p in parallel.parameters()) // ways
    kept, peak = measure(parallel, inputs)
    return {
        "predicted": predicted_of(parallel),
        "measured": peak,
        "states": kept,
        "states_theory": theory,
    }


def name_of(constraints: dict[str, Any]) -> str:
    """A row's title."""
    pipeline = constraints.get("pipeline", {})
    parts = []
    if pipeline.get("size", 1) > 1:
        parts.append(f"PP{pipeline['size']} {pipeline['schedule']}")
    if "tensor" in constraints:
        parts.append("TP2")
    if "data" in constraints:
        parts.append(f"DP{constraints['data']} ZeRO-{constraints['zero']}")
    return ", ".join([*parts, f"m={pipeline.get('microbatches', 1)}"])


def rows(
    models: list[str], chosen: list[dict[str, Any]], fused: bool, show: Any
) -> list[dict[str, Any]]:
    """Run the plans; a pipeline has one row for each of its ranks."""
    found = []
    for name, first in itertools.product(models, range(0, len(chosen), _AT_ONCE)):
        some = chosen[first : first + _AT_ONCE]
        ranks = on_ranks(run_rank, WORLD, "cpu", name, some, fused)
        for constraints, results in zip(some, zip(*ranks, strict=True), strict=True):
            for row in _of_stages(name, constraints, results):
                found.append(row)
                show(row)
    return found


def _of_stages(
    name: str, constraints: dict[str, Any], results: Sequence[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Of the ranks of each pipeline rank, the one that peaks highest."""
    size = constraints.get("pipeline", {}).get("size", 1)
    for stage in range(size):
        share = results[stage * WORLD // size : (stage + 1) * WORLD // size]
        row = max(share, key=lambda r: r["measured"])
        about = {"model": name, "plan": name_of(constraints), "stage": stage}
        about["checkpoint"] = constraints.get("checkpoint", "none")
        yield {**about, **row, "constraints": constraints}


def _line(row: dict[str, Any]) -> list[str]:
    sizes = [
        f"{row[key] / 1e6:.2f}" for key in ("states", "states_theory", "predicted", "measured")
    ]
    over = row["predicted"] / row["measured"] - 1
    return [row["model"], row["plan"], row["checkpoint"], str(row["stage"]), *sizes, f"{over:+.1%}"]


_COLUMNS = ("model", "plan", "recomputed", "stage", "states", "theory", "predicted", "measured",
            "error")  # fmt: skip


def main() -> None:
    """Print each row as it comes, then the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="*", default=["gpt2"], choices=MODELS)
    parser.add_argument("--only", choices=["grid", "pipeline"], help="a part of the rows")
    parser.add_argument("--fused", action="store_true", help="with fused kernels, as on GPUs")
    parser.add_argument("--json", type=Path, help="write the rows")
    largest.add_arguments(parser)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    console = Console(width=120)
    if options.largest:
        largest.run(options, console)
        return
    chosen = {"grid": grid(), "pipeline": pipelines()}.get(options.only, [*grid(), *pipelines()])
    found = rows(options.models, chosen, options.fused, lambda row: console.print(*_line(row)))
    table = Table(title=f"peak of a rank of {WORLD}, MB (10^6 bytes)")
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column in _COLUMNS[:3] else "right")
    for row in found:
        table.add_row(*_line(row))
    console.print(table)
    if options.json:
        about = {**provenance(), "ranks": WORLD, "rows": found}
        options.json.write_text(json.dumps(about, indent=1) + "\n")
    wrong = [r for r in found if not -BELOW <= r["predicted"] / r["measured"] - 1 <= ABOVE]
    if wrong:
        raise SystemExit(f"{len(wrong)} of {len(found)} predictions are off by more than allowed")


if __name__ == "__main__":
    main()
