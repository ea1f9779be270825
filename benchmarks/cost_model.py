"""Predicted beside measured: single ops and collectives, whole training steps, peak memory.

    python -m benchmarks.cost_model [--worlds 1 2 4] [--models [gpt2 …]] [--quick]

For each world size the machine is measured first, with that many ranks at once. Then

* ops and collectives of shapes that were not used in that: held out, and drawn at random; then
  those of the profile once more, to see by how much the machine's pace changed meanwhile;
* steps of small transformers models under several plans: the simulator's seconds, the update
  included, beside a wall clock's, barrier to barrier, in turns;
* the predicted peak beside the bytes of live tensors.

Another program's load adds to a wall clock and never takes away, so the least of the turns is
shown beside the median, and the spread of the turns says how noisy the machine was. On one rank
the CPU's own clock gives seconds without that load. Cores also change their speed between the
measuring of the machine and that of a step: in each turn some of the ops that curves are made of
run once more, and "pace" is how much longer they take now, on the CPU's own clock. Errors are given
as they are and with the prediction at that pace. `--models` without names: ops alone. Writes
results/cost_model.{json,png} and the profiles beside it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from scipy.stats import kendalltau
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.core.placement import local_shape
from autopar.core.plan import Plan
from autopar.cost_model import Cluster, CollectiveKind, compute_seconds
from autopar.cost_model.catalogue import load_profile
from autopar.cost_model.collective_timing import measure_collectives
from autopar.cost_model.compute import OpCost
from autopar.cost_model.measure import measure_profile, write_profile
from autopar.cost_model.memory import dtype_bytes
from autopar.cost_model.probe import Probe
from autopar.cost_model.probes import geometric_mean, held_out_probes, probes
from autopar.cost_model.ranks import on_ranks
from autopar.cost_model.simulator import simulate
from autopar.cost_model.timing import median_seconds
from benchmarks.contenders import Contender
from benchmarks.models import build
from benchmarks.op_shapes import random_probes
from benchmarks.provenance import provenance

RESULTS = Path(__file__).parent / "results"
REFERENCE = (3, 5)  # groups of probes
HELD_OUT_BYTES = (3 << 10, 40 << 10, 600 << 10, 3 << 20, 10 << 20)
TENSOR = {"tensor": {"mode": "1d", "size": 2}}
PLANS: dict[int, dict[str, Any]] = {
    1: {"whole": {}, "recompute": {"checkpoint": "full"}},
    2: {"data": {"data": 2, "zero": 0}, "zero 3": {"data": 2, "zero": 3}, "tensor": TENSOR},
    4: {
        "data": {"data": 4, "zero": 0},
        "zero 3": {"data": 4, "zero": 3},
        "tensor": {"tensor": {"mode": "1d", "size": 4}},
        "data, tensor": {"data": 2, **TENSOR},
    },
}
SIX = ("gpt2", "llama", "bert", "vit", "resnet", "t5")


# --- on the ranks


def ops_of_rank(rank: int, device: str, profile: str, rounds: int) -> dict[str, list[list[Any]]]:
    """Label, class, predicted and measured seconds of ops and collectives, by set.

    The sets: "held out" and "random" shapes, and "again": the profile's own shapes once more, of
    which the error is what the machine's pace changed by since the profile was measured.
    """
    world = dist.get_world_size()
    cluster = Cluster.from_profile(profile, devices_per_node=world)
    share = max(1.0, world / (os.cpu_count() or 1))
    sets: dict[str, list[list[Any]]] = {}
    for name, make in (("held out", held_out_probes), ("random", random_probes), ("again", probes)):
        found = list(make(device, "float32"))
        dist.barrier()
        seconds = median_seconds([p.run for p in found], device, rounds)
        pairs = [(p, share * s / p.steps) for p, s in zip(found, seconds, strict=True)]
        if name == "again":
            sets[name] = _points(cluster, pairs)
        else:
            sets[name] = [
                [p.label, p.op_class, _predicted(cluster, p, p.work, p.num_bytes), s]
                for p, s in pairs
            ]
    if world > 1:
        for sample in measure_collectives(device, world, HELD_OUT_BYTES, rounds):
            predicted = cluster.collective_seconds(CollectiveKind(sample.kind), sample.num_bytes, 0)
            label = f"{sample.kind} {sample.num_bytes}"
            sets["held out"].append([label, "collective", predicted, sample.seconds])
    return sets


def _predicted(cluster: Cluster, probe: Probe, work: float, num_bytes: float) -> float:
    flops = work if probe.unit == "flops" else 0.0
    moved = round(num_bytes if probe.unit == "flops" else work)
    cost = OpCost(op_class=probe.op_class, flops=flops, bytes=moved, dtype=probe.dtype)
    return compute_seconds(cluster, cost)


def _points(cluster: Cluster, pairs: list[tuple[Probe, float]]) -> list[list[Any]]:
    """The points of the profile's curves: the ops of one count alike."""
    points: dict[tuple[str, int], list[tuple[Probe, float]]] = defaultdict(list)
    for probe, seconds in pairs:
        points[probe.op_class, probe.group].append((probe, seconds))
    rows: list[list[Any]] = []
    for (op_class, group), found in points.items():
        work = geometric_mean([p.work for p, _ in found])
        predicted = _predicted(cluster, found[0][0], work, 0.0)
        measured = geometric_mean([s for _, s in found])
        rows.append([f"{op_class} {group}", op_class, predicted, measured])
    return rows


def _reference(device: str, cluster: Cluster) -> Callable[[], float]:
    """How much longer than their curves say some ops take now: their geometric mean."""
    share = max(1.0, dist.get_world_size() / (os.cpu_count() or 1))
    found = [p for p in probes(device, "float32", plain=True) if p.group in REFERENCE]

    def pace() -> float:
        dist.barrier()
        seconds = median_seconds([p.run for p in found], device, 1)
        logs = [
            math.log(share * s / _predicted(cluster, p, p.work, p.num_bytes))
            for p, s in zip(found, seconds, strict=True)
        ]
        return math.exp(statistics.mean(logs))

    return pace


def _local_bytes(plan: Plan) -> list[tuple[int, str]]:
    found = []
    for name, layout in plan.parameters.items():
        count = dtype_bytes(plan.dtypes[name])
        for size in local_shape(plan.shapes[name], layout, plan.mesh_shape):
            count *= size
        found.append((count, plan.dtypes[name]))
    return found


def steps_of_rank(
    rank: int, device: str, name: str, profile: str, plans: dict[str, Any], rounds: int
) -> list[dict[str, Any]]:
    """Predicted and measured seconds and bytes of one model under several plans."""
    world = dist.get_world_size()
    cluster = Cluster.from_profile(profile, devices_per_node=world)
    mesh = init_device_mesh(device, (world,))
    ways, rows = [], []
    for plan_name, constraints in plans.items():
        model, inputs = build(name)
        try:
            parallel = autopar.parallelize(
                model, mesh, inputs, cluster=cluster, constraints=constraints
            )
        except autopar.ConstraintError as error:
            rows.append({"model": name, "plan": plan_name, "refused": str(error)})
            continue
        step = parallel.compiled
        plan = step.plan
        found = simulate(
            step.program.joint.graph,
            cluster.with_mesh_shape(plan.mesh_shape, plan.axis_names),
            parameter_bytes=_local_bytes(plan),
            optimizer="adamw",
        )
        ways.append(Contender(plan_name, parallel, lambda p=parallel, x=inputs: p.train_step(**x)))
        held = sum(x.numel() * x.element_size() for x in inputs.values())
        rows.append(
            {
                "model": name,
                "world": world,
                "plan": plan_name,
                "solver_s": plan.predicted.step_time_s,
                "predicted_s": found.total_s,
                "phases_s": found.by_phase(),
                "hidden_s": sum(found.hidden_s),
                "predicted_bytes": plan.predicted.peak_memory_bytes - held,
            }
        )
    for way in ways:
        way.run()
    reference, paces = _reference(device, cluster), []
    for _ in range(rounds):
        paces.append(reference())
        for way in ways:
            way.timed()
    measured = iter(ways)
    for row in rows:
        if "refused" not in row:
            way = next(measured)
            row["pace"] = statistics.median(paces)
            row["median_s"] = statistics.median(way.seconds)
            row["least_s"] = min(way.seconds)
            row["spread"] = (max(way.seconds) - min(way.seconds)) / row["median_s"]
            row["cpu_s"] = statistics.median(way.cpu_seconds)
            row["measured_bytes"] = way.peak_bytes()
    return rows


# --- tables


def median_error(rows: list[list[Any]]) -> float:
    """Median of |predicted - measured| / measured."""
    return statistics.median(abs(p - m) / m for _, _, p, m in rows)


def ops_table(world: int, name: str, rows: list[list[Any]]) -> dict[str, float]:
    """Median errors per class, printed: of the ops, and with the collectives."""
    by_class: dict[str, list[list[Any]]] = defaultdict(list)
    for row in rows:
        by_class[row[1]].append(row)
    errors = {name: median_error(found) for name, found in by_class.items()}
    ops = [row for row in rows if row[1] != "collective"]
    errors |= {"ops": median_error(ops), "all": median_error(rows)}
    by_class["ops"] = ops
    table = Table("class", "shapes", "median error", title=f"{name} shapes, {world} rank(s)")
    for name, error in errors.items():
        table.add_row(name, str(len(by_class.get(name, rows))), f"{error:.1%}")
    Console(width=100).print(table)
    return errors


def steps_table(world: int, rows: list[dict[str, Any]]) -> None:
    table = Table(
        "model", "plan", "solver ms", "predicted ms", "median ms", "least ms", "CPU ms", "spread",
        "pace", "predicted MiB", "live MiB", title=f"training steps, {world} rank(s)",
    )  # fmt: skip
    for row in rows:
        if "refused" in row:
            table.add_row(row["model"], row["plan"], "refused: " + row["refused"][:40])
            continue
        times = [row[k] for k in ("solver_s", "predicted_s", "median_s", "least_s", "cpu_s")]
        table.add_row(
            row["model"], row["plan"], *(f"{1e3 * t:.1f}" for t in times), f"{row['spread']:.0%}",
            f"{row['pace']:.2f}", f"{row['predicted_bytes'] / 2**20:.1f}",
            f"{row['measured_bytes'] / 2**20:.1f}",
        )  # fmt: skip
    Console(width=120).print(table)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Errors of steps and memory, and how well plans of a model are ranked."""
    rows = [row for row in rows if "refused" not in row]
    found: dict[str, Any] = {"steps": len(rows)}
    for clock in ("median_s", "least_s", "cpu_s"):
        error = [abs(r["predicted_s"] - r[clock]) / r[clock] for r in rows]
        found[f"mape_{clock}"] = statistics.mean(error)
        paced = [abs(r["pace"] * r["predicted_s"] - r[clock]) / r[clock] for r in rows]
        found[f"mape_{clock}_at_pace"] = statistics.mean(paced)
        taus = []
        for model in {r["model"] for r in rows}:
            same = [r for r in rows if r["model"] == model]
            if len(same) > 2:
                pair = [r["predicted_s"] for r in same], [r[clock] for r in same]
                taus.append(float(kendalltau(*pair).statistic))
        found[f"kendall_tau_{clock}"] = statistics.mean(taus) if taus else None
    over = [r["predicted_bytes"] / r["measured_bytes"] - 1 for r in rows]
    found |= {"memory_worst_under": min(over), "memory_worst_over": max(over)}
    found["memory_within_5_percent"] = sum(-0.02 <= x <= 0.05 for x in over) / len(over)
    found["median_spread"] = statistics.median(r["spread"] for r in rows)
    return found


def plot(everything: dict[str, Any], path: Path) -> None:
    """Predicted against measured for ops and for steps, and the phases of predicted steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(16, 5))
    for world, found in everything["worlds"].items():
        ops = [row for row in found["ops"]["held out"] if row[1] != "collective"]
        left.scatter([r[3] for r in ops], [r[2] for r in ops], s=8, label=f"ops, {world} rank(s)")
        sent = [row for row in found["ops"]["held out"] if row[1] == "collective"]
        if sent:
            left.scatter(
                [r[3] for r in sent], [r[2] for r in sent], s=20, marker="x",
                label=f"collectives, {world} ranks",
            )  # fmt: skip
        steps = [row for row in found["steps"] if "refused" not in row]
        middle.errorbar(
            [r["median_s"] for r in steps], [r["predicted_s"] for r in steps],
            xerr=[[r["median_s"] - r["least_s"] for r in steps], [0 for _ in steps]],
            fmt="o", markersize=4, label=f"{world} rank(s), median and least",
        )  # fmt: skip
        if world == "1":
            middle.scatter(
                [r["cpu_s"] for r in steps], [r["predicted_s"] for r in steps], marker="x",
                color="black", label="1 rank, the CPU's clock",
            )  # fmt: skip
    for axes, title in ((left, "held-out ops and collectives"), (middle, "training steps")):
        low, high = axes.get_xlim()
        low = max(low, 1e-6)
        axes.plot([low, high], [low, high], color="grey", linewidth=0.8)
        axes.set(xscale="log", yscale="log", xlabel="measured (s)", ylabel="predicted (s)")
        axes.set_title(title)
        axes.legend(fontsize=8)
    world, found = list(everything["worlds"].items())[-1]
    steps = [row for row in found["steps"] if "refused" not in row]
    bottom = [0.0] * len(steps)
    names = [f"{r['model']}\n{r['plan']}" for r in steps]
    for phase in ("forward", "backward", "exposed communication", "optimizer"):
        heights = [r["phases_s"].get(phase, 0.0) for r in steps]
        right.bar(names, heights, bottom=bottom, label=phase)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    right.set_title(f"predicted seconds by phase, {world} rank(s)")
    right.tick_params(axis="x", labelsize=5, rotation=90)
    right.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def run_world(world: int, models: list[str], quick: bool, folder: Path) -> dict[str, Any]:
    """Measure, then predict and measure again."""
    rounds = 3 if quick else 7
    path = folder / f"profile_cpu_{world}.toml"
    measured = measure_profile(
        f"cpu-{world}", base=load_profile("cpu-gloo"), ranks=world, rounds=rounds,
        dtypes=["float32"], group_sizes=[n for n in (2, 4) if world % n == 0],
    )  # fmt: skip
    write_profile(measured, path)
    ranks = on_ranks(ops_of_rank, world, "cpu", str(path), rounds)
    ops = {
        name: [
            [label, kind, predicted, statistics.median(rank[name][i][3] for rank in ranks)]
            for i, (label, kind, predicted, _) in enumerate(rows)
        ]
        for name, rows in ranks[0].items()
    }
    errors = {name: ops_table(world, name, rows) for name, rows in ops.items()}
    plans = dict(list(PLANS[world].items())[: 2 if quick else 9])
    steps: list[dict[str, Any]] = []
    for name in models:
        found = on_ranks(steps_of_rank, world, "cpu", name, str(path), plans, rounds)
        for row, *others in zip(*found, strict=True):
            if "refused" not in row:
                row["measured_bytes"] = max(x["measured_bytes"] for x in (row, *others))
                for key in ("cpu_s", "pace"):
                    row[key] = statistics.mean(x[key] for x in (row, *others))
        steps += found[0]
    result: dict[str, Any] = {"ops": ops, "op_errors": errors}
    if steps:
        steps_table(world, steps)
        result |= {"steps": steps, "summary": summary(steps)}
        Console(width=100).print(result["summary"])
    return result


def main() -> None:
    """Measure every world size; print tables and write results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", nargs="*", type=int, default=[1, 2, 4], choices=list(PLANS))
    parser.add_argument("--models", nargs="*", default=list(SIX), help="none: ops alone")
    parser.add_argument("--quick", action="store_true", help="fewer turns, two plans a model")
    parser.add_argument("--out", type=Path, default=RESULTS / "cost_model.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    RESULTS.mkdir(exist_ok=True)
    everything: dict[str, Any] = {
        **provenance(),
        "quick": options.quick,
        "worlds": {},
    }
    for world in options.worlds:
        found = run_world(world, options.models, options.quick, options.out.parent)
        everything["worlds"][str(world)] = {**found, "load_after": os.getloadavg()[0]}
        options.out.write_text(json.dumps(everything, indent=1))
    if options.models:
        plot(everything, options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
