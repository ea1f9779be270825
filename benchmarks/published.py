"""Published training runs beside what the cost model predicts for them.

    python -m benchmarks.published --runs FILE [--json] [--plot FILE] [--jobs N]

Each row's model is built from its sizes, two of its blocks are traced on meta and planned under
the row's parallel configuration as constraints on a profile of its hardware, and the priced blocks
are put together with the simulated pipeline schedule. A row that cannot be predicted is listed with
the reason and counted as skipped.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError
from benchmarks.published_predict import Predictor
from benchmarks.published_rows import RowError, job, measured_seconds
from benchmarks.published_schema import count, normal
from benchmarks.step_cost import step_cost

__all__ = ["Outcome", "line", "outcomes", "scores"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A row with its prediction.

    Attributes:
        row: as published, with the names of `published_schema`.
        predicted_s, measured_s: step times; None where there is none.
        predicted_bytes: peak of the fullest device.
        fits: the prediction is below the device's memory.
        skipped: why there is no prediction, or "".
        bound: "host" where issuing a block's ops takes longer than they do, else "device".
    """

    row: Mapping[str, Any]
    predicted_s: float | None = None
    measured_s: float | None = None
    predicted_bytes: float = 0.0
    fits: bool = True
    skipped: str = ""
    bound: str = ""


def outcomes(rows: Sequence[Mapping[str, Any]], jobs: int = 1) -> list[Outcome]:
    """Predict every row, in `jobs` processes; rows of one model are predicted by one of them."""
    if jobs > 1:
        parts = _parts(rows, jobs)
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(len(parts), context, initializer=gc.freeze) as pool:
            done = list(pool.map(outcomes, [[rows[i] for i in part] for part in parts]))
        by_index = {i: o for part, some in zip(parts, done, strict=True)
                    for i, o in zip(part, some, strict=True)}  # fmt: skip
        return [by_index[i] for i in range(len(rows))]
    predictor = Predictor()
    found = []
    for given in rows:
        row = normal(given)
        try:
            wanted = job(row)
            layers = predictor.layers(wanted)
            cost = step_cost(layers, wanted.recipe, wanted.cluster)
        except (RowError, AutoparError, RuntimeError, ValueError, ArithmeticError) as error:
            reason = str(error).partition("\n")[0]
            found.append(Outcome(row, skipped=f"{type(error).__name__}: {reason}"))
            continue
        forward = layers.block[0].forward
        found.append(
            Outcome(
                row,
                cost.step_s,
                measured_seconds(row),
                cost.peak_bytes,
                cost.peak_bytes <= wanted.cluster.memory_bytes,
                bound="host" if forward.host_s > forward.device_s + forward.comm_s else "device",
            )
        )
    return found


def _parts(rows: Sequence[Mapping[str, Any]], jobs: int) -> list[list[int]]:
    """Indices of rows for each process: models in turn, the one with most rows first."""
    models: dict[str, list[int]] = defaultdict(list)
    for i, row in enumerate(map(normal, rows)):
        sizes = (row.get("shape"), row.get("seq_len"), row.get("micro_batch"))
        models[json.dumps(sizes, sort_keys=True, default=str)].append(i)
    parts: list[list[int]] = [[] for _ in range(min(jobs, len(models)))]
    for model in sorted(models.values(), key=len, reverse=True):
        min(parts, key=len).extend(model)
    return parts


def scores(found: Sequence[Outcome]) -> dict[str, Any]:
    """Mean absolute percentage error, ranking and regret, as fractions; None without such rows.

    Rows of a group have equal model, GPUs, global batch and sequence; groups of fewer than four do
    not count. Kendall's tau is weighted by the size of the group, regret is the mean over groups.
    """
    timed = [o for o in found if o.predicted_s and o.measured_s]
    groups: dict[tuple[str, ...], list[Outcome]] = defaultdict(list)
    for o in timed:
        key = ("model", "gpus", "global_batch", "seq_len")
        groups[tuple(str(o.row.get(k)) for k in key)].append(o)
    large = [g for g in groups.values() if len(g) >= 4]
    weight = sum(len(g) for g in large)
    errors = [abs(_ratio(o) - 1) for o in timed]
    oom = [o for o in found if (o.row.get("measured") or {}).get("oom") and not o.skipped]
    return {
        "mape": sum(errors) / len(errors) if errors else None,
        "kendall_tau": sum(_tau(g) * len(g) for g in large) / weight if large else None,
        "top1_regret": sum(map(_regret, large)) / len(large) if large else None,
        "n": len(timed),
        "skipped": sum(bool(o.skipped) for o in found),
        "groups": len(large),
        "oom": len(oom),
        "oom_right": sum(not o.fits for o in oom),
    }


def _ratio(o: Outcome) -> float:
    assert o.predicted_s is not None and o.measured_s is not None
    return o.predicted_s / o.measured_s


def _tau(group: Sequence[Outcome]) -> float:
    """Kendall's tau-b: concordant less discordant pairs, ties left out of the norm."""
    concordant = discordant = tied_x = tied_y = 0
    for i, a in enumerate(group):
        for b in group[:i]:
            x = (a.predicted_s or 0) - (b.predicted_s or 0)
            y = (a.measured_s or 0) - (b.measured_s or 0)
            concordant += x * y > 0
            discordant += x * y < 0
            tied_x += x == 0
            tied_y += y == 0
    pairs = len(group) * (len(group) - 1) / 2
    norm = ((pairs - tied_x) * (pairs - tied_y)) ** 0.5
    return (concordant - discordant) / norm if norm else 0.0


def _regret(group: Sequence[Outcome]) -> float:
    """How much slower the row that is predicted fastest is than the fastest."""
    chosen = min(group, key=lambda o: o.predicted_s or 0)
    return (chosen.measured_s or 0) / min(o.measured_s or 0 for o in group) - 1


def summary(found: Sequence[Outcome]) -> dict[str, Any]:
    """Scores over all rows, per source, and for one node and several."""
    sets: dict[str, list[Outcome]] = defaultdict(list)
    for o in found:
        sets[str(o.row.get("source", ""))].append(o)
        if (gpus := _gpus(o)) is not None:
            sets["multi-node" if gpus[0] > gpus[1] else "single-node"].append(o)
    return {**scores(found), "sets": {name: scores(rows) for name, rows in sets.items()}}


def _gpus(o: Outcome) -> tuple[int, int] | None:
    """GPUs of a row and of its nodes; None where it does not say."""
    try:
        gpus = count(o.row.get("gpus"), "gpus")
        per_node = count(o.row["hardware"].get("gpus_per_node"), "gpus_per_node", 8)
    except RowError:
        return None
    return (gpus, per_node) if gpus else None


def by_group(found: Sequence[Outcome]) -> dict[str, dict[str, tuple[int, float, float]]]:
    """Number of rows, mean signed error and mean absolute error, by what may explain them."""
    groups: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for o in found:
        if o.predicted_s and o.measured_s:
            parallel = o.row["parallel"]
            keys = {
                "hardware": o.row["hardware"].get("gpu"),
                "framework": o.row.get("framework"),
                "tp": parallel.get("tp") or 1,
                "pp": parallel.get("pp") or 1,
                "recomputation": o.row.get("activation_ckpt"),
                "precision": o.row.get("precision"),
                "bound by": o.bound,
            }
            for kind, value in keys.items():
                groups[kind][str(value)].append(_ratio(o) - 1)
    return {
        kind: {
            value: (len(e), sum(e) / len(e), sum(map(abs, e)) / len(e))
            for value, e in sorted(values.items())
        }
        for kind, values in groups.items()
    }


def line(o: Outcome) -> str:
    """What the command prints of a row."""
    row, parallel = o.row, o.row["parallel"]
    sizes = " ".join(
        f"{k}{parallel[k]}"
        for k in ("fsdp", "dp", "tp", "pp", "cp")
        if str(parallel.get(k) or 1) != "1"
    )
    text = f"{row.get('id')!s:26.26} {row.get('gpus')!s:>5} {sizes:20.20} "
    if o.skipped:
        return text + "skipped: " + o.skipped
    measured = row["measured"]
    if measured.get("oom"):
        text += f"published: out of memory; predicted: {'fits' if o.fits else 'does not fit'}"
    elif o.measured_s:
        text += f"{o.predicted_s:10.4f} {o.measured_s:10.4f} {_ratio(o) - 1:+8.1%}"
    gib = measured.get("peak_mem_gib")
    text += f" {o.predicted_bytes / 2**30:8.1f} GiB"
    if gib:
        text += f" (published {gib}, {o.predicted_bytes / 2**30 / gib - 1:+.1%})"
    return text


def _runs(read: Any) -> Sequence[Any]:
    """The rows of a file: a list, or what a mapping has under "runs" or "rows".

    What a mapping has under "common" holds for rows that say nothing else of it.
    """
    common: Any = {}
    if isinstance(read, Mapping):
        common = read.get("common", {})
        read = read.get("runs", read.get("rows"))
    if not isinstance(read, list) or not isinstance(common, Mapping):
        raise SystemExit('the file holds no list of runs: {"runs": [...]}')
    return [{**common, **row} if isinstance(row, Mapping) else row for row in read]


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=Path, required=True, help="file of published runs")
    parser.add_argument("--json", action="store_true", help="last line: the scores as JSON")
    parser.add_argument("--plot", type=Path, help="write a plot of predicted against published")
    parser.add_argument("--jobs", type=int, default=_cores(), help="processes; default: cores")
    arguments = parser.parse_args()
    gc.freeze()  # what is imported needs no look at each collection
    started = time.perf_counter()
    found = outcomes(_runs(json.loads(arguments.runs.read_text())), arguments.jobs)
    seconds = time.perf_counter() - started
    print(f"{'row':26} {'GPUs':>5} {'ranks':20} {'predicted':>10} {'published':>10} {'error':>8}")
    for o in found:
        print(line(o))
    for kind, values in by_group(found).items():
        for value, (number, mean, absolute) in values.items():
            print(f"{kind:14} {value:52.52} {number:4} rows {mean:+8.1%} mean {absolute:8.1%} MAPE")
    result = summary(found)
    for name, values in {"all": result, **result["sets"]}.items():
        scored = (
            f"{key} {values[key]:.3g}" if values[key] is not None else f"{key} -"
            for key in ("mape", "kendall_tau", "top1_regret")
        )
        counted = (f"{key} {values[key]}" for key in ("n", "groups", "skipped", "oom", "oom_right"))
        shown = ", ".join((*scored, *counted))
        print(f"{name[:60]}: {shown}")
    print(f"{len(found)} rows in {seconds:.1f} s")
    if arguments.plot is not None:
        from benchmarks.published_plot import plot

        plot(found, arguments.plot)
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
