"""What the tutorials share: modes, command line, data, training loop, progress, last line.

A tutorial is an `Example`: its modes are configurations by name, each a set of constraints for
`autopar.parallelize`. Its script calls `main(example)` under torchrun.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import GPT2Config, GPT2LMHeadModel, ViTConfig, ViTForImageClassification

import autopar

FILES = ("argparse.py", "ast.py", "datetime.py", "os.py", "pathlib.py", "statistics.py")

Batch = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """A configuration of a tutorial.

    Attributes:
        about: one line for the help.
        constraints: what is pinned; sizes must be written out.
        precision: "fp32", "bf16" or "fp16".
    """

    about: str
    constraints: Mapping[str, Any] = field(default_factory=dict)
    precision: str = "fp32"

    @property
    def ranks(self) -> int:
        """Ranks that pipeline, tensor and sequence take together."""
        parts = (self.constraints.get(key, {}) for key in ("pipeline", "tensor", "sequence"))
        return math.prod(part.get("size", 1) for part in parts)

    def on(self, world: int) -> dict[str, Any]:
        """The constraints, and data parallel (ZeRO only if asked) over the ranks that are left.

        Raises:
            ValueError: the world is no multiple of `ranks`.
        """
        if world % self.ranks:
            raise ValueError(
                f"needs {self.ranks} ranks or a multiple of them, this world has {world}; "
                f"start it with torchrun --nproc_per_node {self.ranks}"
            )
        data = world // self.ranks
        rest = {"data": data, "zero": 0} if data > 1 else {}
        return {**rest, **self.constraints}


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A tutorial: what is trained, on what, and the configurations that it shows.

    Attributes:
        about: for the help.
        modes: by name; the first is the default.
        model: builds the unmodified module.
        batches: so many global batches, the same on every rank.
        optimizer: of parameters.
        scheduler: of an optimizer and a number of steps, if the tutorial has one.
        scaling: settings of the loss scaler in fp16.
        clip: largest norm of all gradients together, if they are clipped.
    """

    about: str
    modes: Mapping[str, Mode]
    model: Callable[[], nn.Module]
    batches: Callable[[int], list[Batch]]
    optimizer: Callable[[Any], Optimizer]
    scheduler: Callable[[Optimizer, int], LRScheduler] | None = None
    scaling: Mapping[str, float] = field(default_factory=dict)
    clip: float | None = None


# --- models and data


def tiny_vit(layers: int) -> nn.Module:
    """A ViT for the digits: 16 patches and the class token, random weights."""
    torch.manual_seed(0)
    config = ViTConfig(
        num_hidden_layers=layers,
        hidden_size=64,
        intermediate_size=256,
        num_attention_heads=4,
        image_size=8,
        patch_size=2,
        num_channels=1,
        num_labels=10,
    )
    return ViTForImageClassification(config)


def tiny_gpt(layers: int, length: int) -> nn.Module:
    """A GPT-2 on bytes, without dropout; its head is its embedding. Random weights."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=layers,
        n_embd=64,
        n_head=4,
        vocab_size=256,
        n_positions=length,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # the default, which transformers warns about
    return model


def digits(count: int, size: int) -> list[Batch]:
    """Batches of scikit-learn's handwritten digits: pixels (size, 1, 8, 8) in [-1, 1], labels."""
    data = load_digits()
    images = torch.from_numpy(data.images).float()[:, None] / 8 - 1
    labels = torch.from_numpy(data.target).long()
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, len(labels), (count, size), generator=generator)
    return [{"pixel_values": images[r], "labels": labels[r]} for r in rows]


def source_text(count: int, size: int, length: int) -> list[Batch]:
    """Batches of windows (size, length) of the standard library's source code, as bytes."""
    library = Path(os.__file__).parent
    text = b"".join((library / name).read_bytes() for name in FILES)
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(0, len(data) - length, (count, size), generator=generator)
    windows = data[starts[:, :, None] + torch.arange(length)]
    return [{"input_ids": rows, "labels": rows} for rows in windows]


# --- the run


def parse(example: Example, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line: `--mode NAME` or `--auto`, `--steps`, `--precision`, `--memory-limit`."""
    parser = argparse.ArgumentParser(
        description=example.about,
        epilog="modes: " + "; ".join(f"{name}: {m.about}" for name, m in example.modes.items()),
    )
    choice = parser.add_mutually_exclusive_group()
    default = next(iter(example.modes))
    choice.add_argument("--mode", choices=tuple(example.modes), default=default)
    choice.add_argument("--auto", action="store_true", help="pin nothing: the solver chooses")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument(
        "--precision", choices=("fp32", "bf16", "fp16"), help="default: that of the mode"
    )
    parser.add_argument(
        "--memory-limit", type=float, metavar="MIB", help="of each rank; default: the machine's"
    )
    return parser.parse_args(arguments)


def train(example: Example, options: argparse.Namespace) -> tuple[list[float], autopar.Plan]:
    """Train on the ranks of the process group.

    Returns:
        The loss of each step, and the plan that ran.

    Raises:
        ValueError: the mode does not fit the number of ranks.
    """
    mode = example.modes[options.mode]
    world = dist.get_world_size()
    batches = example.batches(options.steps)
    model = autopar.parallelize(
        example.model().train(),
        init_device_mesh("cpu", (world,)),
        batches[0],
        constraints=None if options.auto else mode.on(world),
        memory_limit=int(options.memory_limit * 2**20) if options.memory_limit else None,
        precision=options.precision or mode.precision,
        seed=0,
    )
    return _loop(example, model, batches), model.plan


def _loop(example: Example, model: autopar.ParallelModule, batches: list[Batch]) -> list[float]:
    optimizer = example.optimizer(model.parameters())
    scheduler = example.scheduler(optimizer, len(batches)) if example.scheduler else None
    scaler = autopar.LossScaler(model, **example.scaling, enabled=model.plan.precision == "fp16")
    losses: list[float] = []
    with _progress() as progress:
        for batch in progress.track(batches, description="training"):
            scale = scaler.get_scale()
            loss = model.train_step(**batch)
            scaler.unscale_(optimizer)
            if example.clip is not None:
                model.clip_grad_norm_(example.clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
            losses.append(loss.item())
            note = f"  loss scale {scale:g}" if scaler.is_enabled() else ""
            progress.console.print(f"step {len(losses)}  loss {losses[-1]:.4f}{note}")
    return losses


def _progress() -> Progress:
    """A bar on rank 0; the other ranks print nothing."""
    quiet = dist.get_rank() != 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(quiet=quiet, highlight=False)
    return Progress(*columns, TimeElapsedColumn(), console=console, disable=quiet)


def last_line(name: str, plan: autopar.Plan) -> str:
    """Mode, pipeline, mesh of a stage, forms of the weights, predicted step."""
    p = plan.pipeline
    parts = [f"mode {name}"]
    if p is None:
        parts.append("no pipeline")
    else:
        cuts = f", cut at {', '.join(p.cuts)}" if p.cuts else ""
        parts.append(
            f"pipeline of {p.size} ranks, {len(p.stages)} stages, {p.microbatches} microbatches, "
            f"{p.schedule}, bubble {p.bubble:.0%}{cuts}"
        )
    axes = zip(plan.axis_names, plan.mesh_shape, strict=True)
    parts.append("mesh " + " × ".join(f"{axis}={size}" for axis, size in axes))
    forms = Counter(m for part in (p.stages if p else (plan,)) for m in part.modes.values())
    parts.append("weights " + ", ".join(f"{n}× {form}" for form, n in forms.most_common()))
    parts.append(f"recomputation {plan.checkpoint}, {plan.precision}")
    parts.append(f"predicted step {plan.predicted.step_time_s * 1e3:.2f} ms")
    return "plan: " + "; ".join(parts)


def main(example: Example, arguments: Sequence[str] | None = None) -> int:
    """Run a tutorial on the ranks that torchrun started; 2 if the mode does not fit them."""
    options = parse(example, arguments)
    if "WORLD_SIZE" not in os.environ:
        print(f"start this with: torchrun --nproc_per_node 4 {sys.argv[0]}", file=sys.stderr)
        return 2
    if not options.auto:
        try:
            example.modes[options.mode].on(int(os.environ["WORLD_SIZE"]))
        except ValueError as error:
            if os.environ["RANK"] == "0":
                print(f"--mode {options.mode} {error}", file=sys.stderr)
            return 2
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    _, plan = train(example, options)
    if dist.get_rank() == 0:
        print(last_line("auto" if options.auto else options.mode, plan), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0
