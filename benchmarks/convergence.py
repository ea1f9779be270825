"""ViT on real images, trained by one process and by 2D, 2.5D and 3D tensor parallelism.

    python -m benchmarks.convergence          # writes benchmarks/results/convergence.{json,png}

The images are scikit-learn's digits (8 × 8, 10 classes). For each seed every plan trains the same
model from the same weights on the same batches, so the curves should coincide up to rounding, and
test accuracies should differ by less than seeds do: the convergence figure of Wang et al. 2021
(arXiv 2105.14500), on data that ships with a package.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers as hf
from torch.distributed.device_mesh import init_device_mesh

import autopar
from benchmarks.provenance import provenance

RESULTS = Path(__file__).parent / "results"
PLANS: dict[str, tuple[int, dict[str, Any] | None]] = {
    "one process": (1, None),  # the plain module, without autopar
    "2D on 4": (4, {"tensor": {"mode": "2d", "size": 4}}),
    "2.5D on 8": (8, {"tensor": {"mode": "2.5d", "size": 8, "depth": 2}}),
    "3D on 8": (8, {"tensor": {"mode": "3d", "size": 8}}),
}
BATCH = 128
TRAIN, TEST = 11 * BATCH, 3 * BATCH
LEARNING_RATE = 3e-3

Images = tuple[torch.Tensor, torch.Tensor]


def digits() -> tuple[Images, Images]:
    """Train and test sets: images `(N, 1, 8, 8)` in [0, 1], and labels `(N,)`."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.tensor(data.target)
    # the same split for all seeds, so that they differ by weights and order only
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:TRAIN], order[TRAIN : TRAIN + TEST]
    return (images[train], labels[train]), (images[test], labels[test])


def build(seed: int) -> torch.nn.Module:
    """A ViT of two layers on 16 patches."""
    torch.manual_seed(seed)
    config = hf.ViTConfig(
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        image_size=8,
        patch_size=2,
        num_channels=1,
        num_labels=10,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.1,  # at 0.02 a model this narrow learns slowly
    )
    model: torch.nn.Module = hf.ViTForImageClassification(config)
    return model


def accuracy(model: torch.nn.Module, test: Images) -> float:
    """Share of test images whose label is predicted."""
    right = 0
    model.eval()
    with torch.no_grad():
        for images, labels in zip(test[0].split(BATCH), test[1].split(BATCH), strict=True):
            logits = model(pixel_values=images, labels=labels).logits
            logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
            right += int((logits.argmax(-1) == labels).sum())
    model.train()
    return right / len(test[0])


def train(model: torch.nn.Module, seed: int, epochs: int) -> dict[str, Any]:
    """Train with the batches of one seed."""
    (images, labels), test = digits()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=epochs * TRAIN // BATCH, pct_start=0.2
    )
    losses: list[float] = []
    accuracies: list[float] = []
    seconds = 0.0
    for epoch in range(epochs):
        order = torch.randperm(TRAIN, generator=torch.Generator().manual_seed(1000 * seed + epoch))
        started = time.perf_counter()
        for rows in order.split(BATCH):
            loss = model(pixel_values=images[rows], labels=labels[rows]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(float(f"{float(loss):.7g}"))
        seconds += time.perf_counter() - started
        accuracies.append(accuracy(model, test))
    return {
        "seed": seed,
        "losses": losses,
        "test_accuracies": accuracies,
        "train_seconds": round(seconds, 1),
    }


def run_rank(name: str, seeds: int, epochs: int, out: Path) -> None:
    """All seeds of one plan, on this rank of a process group."""
    ranks, constraints = PLANS[name]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    (images, labels), _ = digits()
    batch = {"pixel_values": images[:BATCH], "labels": labels[:BATCH]}
    runs: list[dict[str, Any]] = []
    shape: tuple[int, ...] = (1,)
    chosen: dict[str, Any] = {"constraints": constraints}
    for seed in range(seeds):
        model = build(seed).train()
        if constraints is not None:
            mesh = init_device_mesh("cpu", (ranks,))
            model = autopar.parallelize(model, mesh, batch, **chosen)
            chosen = {"plan": model.plan}  # solved once
            shape = model.plan.mesh_shape
        runs.append(train(model, seed, epochs))
    if dist.get_rank() == 0:
        out.write_text(json.dumps({"ranks": ranks, "mesh": shape, "runs": runs}))
    dist.destroy_process_group()


def launch(name: str, seeds: int, epochs: int) -> dict[str, Any]:
    """`run_rank` in as many processes as the plan has ranks."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "result.json"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc-per-node={PLANS[name][0]}", "-m", "benchmarks.convergence", "--child", name,
            "--seeds", str(seeds), "--epochs", str(epochs), "--out", str(out),
        ]  # fmt: skip
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit(f"{name} failed:\n{done.stderr}")
        found: dict[str, Any] = json.loads(out.read_text())
    return found


def summary(found: dict[str, Any], single: dict[str, Any]) -> dict[str, Any]:
    """Final accuracies, and how far the losses are from those of one process."""
    finals = [run["test_accuracies"][-1] for run in found["runs"]]
    apart = [
        max(abs(a - b) / abs(b) for a, b in zip(run["losses"], other["losses"], strict=True))
        for run, other in zip(found["runs"], single["runs"], strict=True)
    ]
    return {
        "test_accuracy_mean": statistics.mean(finals),
        "test_accuracy_min": min(finals),
        "test_accuracy_max": max(finals),
        "largest_relative_loss_difference": max(apart),
    }


def plot(results: dict[str, Any], path: Path) -> None:
    """Training loss by step and test accuracy by epoch; a colour per plan, a line per seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6))
    # later plans are drawn thinner, so that curves that coincide stay visible
    for index, (name, found) in enumerate(results.items()):
        style = {"color": f"C{index}", "linewidth": 5 - 1.4 * index, "alpha": 0.75}
        for run in found["runs"]:
            label = name if run is found["runs"][0] else None
            left.plot(range(1, len(run["losses"]) + 1), run["losses"], label=label, **style)
            accuracies = run["test_accuracies"]
            right.plot(range(1, len(accuracies) + 1), accuracies, label=label, **style)
    left.set(xlabel="step", ylabel="training loss")
    right.set(xlabel="epoch", ylabel="test accuracy")
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main() -> None:
    """Run every plan in processes of its own, print and plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--child", choices=list(PLANS), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run_rank(options.child, options.seeds, options.epochs, options.out)
        return
    RESULTS.mkdir(exist_ok=True)
    results: dict[str, Any] = {}
    for name in PLANS:
        started = time.perf_counter()
        results[name] = found = launch(name, options.seeds, options.epochs)
        found.update(summary(found, results["one process"]))
        found["wall_seconds"] = round(time.perf_counter() - started)
        print(
            f"{name:12s} mesh {found['mesh']} test accuracy {found['test_accuracy_mean']:.4f} "
            f"({found['test_accuracy_min']:.4f} to {found['test_accuracy_max']:.4f}), losses "
            f"within {found['largest_relative_loss_difference']:.1e} of one process, "
            f"{found['wall_seconds']} s",
            flush=True,
        )
    about = {
        **provenance(),
        "ranks": "gloo, one thread a rank",
        "model": "ViT, 2 layers, width 64, 4 heads; AdamW, one-cycle learning rate",
        "batch": BATCH,
        "epochs": options.epochs,
        "seeds": options.seeds,
    }
    text = json.dumps({**about, "plans": results})
    (RESULTS / "convergence.json").write_text(text + "\n")
    plot(results, RESULTS / "convergence.png")


if __name__ == "__main__":
    main()
