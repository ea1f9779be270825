"""Train a small GPT-2 on every rank of a gloo mesh, with a plan that autopar chooses.

    torchrun --nproc-per-node 1 examples/train_gpt2.py --reference losses.json
    torchrun --nproc-per-node 4 examples/train_gpt2.py --compare losses.json

The first writes the losses of one process, the second trains on four ranks and fails unless its
losses are the same to 1e-5. `examples/demo.py` runs both. Dropout is on: the masks do not depend
on the mesh. The text is the source code of Python's standard library, as bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import GPT2Config, GPT2LMHeadModel

import autopar

STEPS = 30
CHECK_STEPS = 5  # of the run without dropout, against the plain module
TOLERANCE = 1e-5
BATCH, LENGTH = 8, 128
FILES = ("argparse.py", "ast.py", "datetime.py", "os.py", "pathlib.py", "statistics.py")

Batch = dict[str, Tensor]
Show = Callable[[int, float], None]


def build_model(dropout: float) -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=4,
        n_embd=256,
        n_head=4,
        vocab_size=256,
        n_positions=LENGTH,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        resid_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # the default, which transformers warns about
    return model


def make_batches(count: int) -> list[Batch]:
    """Global batches, the same on every rank: random windows of the library's source."""
    library = Path(os.__file__).parent
    text = b"".join(path.read_bytes() for name in FILES if (path := library / name).is_file())
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(0, len(data) - LENGTH, (count, BATCH), generator=generator)
    windows = data[starts[:, :, None] + torch.arange(LENGTH)]
    return [{"input_ids": rows, "labels": rows} for rows in windows]


def train(model: nn.Module, batches: list[Batch], show: Show) -> list[float]:
    """An ordinary training loop: nothing in it knows of the mesh."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    model.train()
    losses = []
    for step, batch in enumerate(batches):
        loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        show(step, losses[-1])
    return losses


def train_with_bar(title: str, model: nn.Module, batches: list[Batch]) -> list[float]:
    """`train` with a progress bar on rank 0."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    tail = (TimeElapsedColumn(), TextColumn("loss {task.fields[loss]:.4f}"))
    quiet = dist.get_rank() != 0
    with Progress(*columns, *tail, disable=quiet, console=Console()) as progress:
        task = progress.add_task(title, total=len(batches), loss=float("nan"))
        started = time.perf_counter()
        losses = train(model, batches, lambda _, loss: progress.update(task, advance=1, loss=loss))
        seconds = time.perf_counter() - started
    if not quiet:
        print(f"{title}: {seconds / len(batches):.2f} s a step")
    return losses


def run_all() -> dict[str, list[float]]:
    """Losses with dropout, and of a few steps without, on the mesh of this world."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ranks = "1 process" if mesh.size() == 1 else f"{mesh.size()} ranks"
    batches = make_batches(STEPS)
    parallel = autopar.parallelize(build_model(0.1), mesh, batches[0], seed=0)
    if dist.get_rank() == 0 and mesh.size() > 1:
        print(parallel.plan.summary(), flush=True)
    losses = {"dropout": train_with_bar(f"{ranks}, dropout 0.1", parallel, batches)}
    few = batches[:CHECK_STEPS]
    if mesh.size() == 1:
        losses["plain"] = train_with_bar("plain module, no dropout", build_model(0.0), few)
    else:
        plain = autopar.parallelize(build_model(0.0), mesh, few[0], seed=0)
        losses["plain"] = train_with_bar(f"{ranks}, no dropout", plain, few)
    return losses


def compare(title: str, ours: list[float], reference: list[float]) -> float:
    """Print the losses side by side; the largest relative difference."""
    table = Table("step", "4 ranks", "reference", "relative difference", title=title)
    differences = [abs(a - b) / abs(b) for a, b in zip(ours, reference, strict=True)]
    for step, (a, b, difference) in enumerate(zip(ours, reference, differences, strict=True)):
        table.add_row(str(step), f"{a:.7f}", f"{b:.7f}", f"{difference:.1e}")
    Console(width=80).print(table)
    worst = max(differences)
    print(f"{title}: largest relative difference {worst:.2e} (bound {TOLERANCE:.0e})", flush=True)
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a small GPT-2 with an automatic plan.")
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--reference", type=Path, help="write this run's losses here")
    group.add_argument("--compare", type=Path, help="losses of the reference run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    losses = run_all()
    worst = 0.0
    if dist.get_rank() == 0:
        if options.reference:
            options.reference.write_text(json.dumps(losses))
        else:
            reference = json.loads(options.compare.read_text())
            titles = {
                "plain": "No dropout, against the plain module",
                "dropout": "Dropout 0.1, against one process",
            }
            worst = max(compare(titles[k], losses[k], reference[k]) for k in titles)
    dist.barrier()
    dist.destroy_process_group()
    return int(not worst <= TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
