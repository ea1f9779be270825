"""Every model class of transformers that a tiny configuration builds: plan it, run it, compare.

`python -m tests.hf_sweep [--only REGEX] [--json outcomes.jsonl] [--write docs/models.md]`. Each
class has a process of its own, forked from one that has torch and transformers loaded. Two plans
of two ranks: the batch split on the whole mesh, and a free plan that may use 60% of the memory of
one device (or, where nothing so small is found, the least that some plan needs). Both run on
virtual ranks and are compared with the eager module: outputs, every gradient, every buffer.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import multiprocessing
import os
import re
import resource
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopar.core.constraints import Constraints
from autopar.cost_model import Cluster
from autopar.errors import AutoparError, InfeasiblePlanError, UnsupportedOpWarning
from autopar.solver.solve import solve
from autopar.tracer.trace import trace
from autopar.verification import verify
from tests.hf_table import table
from tests.hf_tiny import NotBuiltError, build, classes

BOUND_FLOAT64 = 1e-9
BOUND_FLOAT32 = 1e-4
BOUNDS = (BOUND_FLOAT64, BOUND_FLOAT32)
PLANS = ("data", "free")
BUILD_SECONDS = 10.0
CPU_SECONDS = 30
WALL_SECONDS = 600.0  # other work on the machine does not count


@dataclass(kw_only=True)
class Outcome:
    """What became of one class.

    `status` is exact, refused, "not built", "not run" (it takes too long) or wrong; `plans` the
    plans that were compared; `error` their largest relative error; `bound` what it was held to;
    `no_rule` the ops that ran replicated for want of a rule.
    """

    name: str
    status: str
    detail: str = ""
    error: float = 0.0
    bound: float = 0.0
    seconds: float = 0.0
    plans: list[str] = field(default_factory=list)
    no_rule: dict[str, int] = field(default_factory=dict)


def _bound(traced: Any) -> float:
    """Float32 is inside where the model itself casts to it, whatever it is made of."""
    for node in traced.graph.nodes:
        if node.op == "call_function" and not node.all_input_nodes:
            continue  # a constant, such as a mask of ones
        value = node.meta.get("val")
        for leaf in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(leaf, torch.Tensor) and leaf.dtype in (
                torch.float32,
                torch.bfloat16,
                torch.float16,
                torch.complex64,
            ):
                return BOUND_FLOAT32
    return BOUND_FLOAT64


def _cluster(devices: int) -> Cluster:
    return Cluster.from_profile("cpu-gloo", devices_per_node=devices, mesh_shape=(devices,))


def _plans(traced: Any, kinds: Sequence[str]) -> Iterator[tuple[str, Any]]:
    if "data" in kinds:
        split = Constraints(data=2)
        yield "data", solve(traced, _cluster(2), constraints=split)
    if "free" not in kinds:
        return
    whole = solve(traced, _cluster(1)).predicted.peak_memory_bytes
    try:
        yield "free", solve(traced, _cluster(2), memory_limit=int(0.6 * whole))
    except InfeasiblePlanError as error:
        least = error.required_bytes
        yield "free", solve(traced, _cluster(2), memory_limit=least)


def _ignore(outcome: Outcome) -> None:
    """No one waits for what is known so far."""


def check(
    name: str, kinds: Sequence[str] = PLANS, tell: Callable[[Outcome], None] = _ignore
) -> Outcome:
    """Build, trace, plan, run and compare one class, in this process.

    `tell` is called after each plan with the outcome as it is then.
    """
    torch.manual_seed(0)
    started = time.process_time()
    outcome = Outcome(name=name, status="not built")
    try:
        model, inputs = build(name)
        spent = time.process_time() - started
        if spent > BUILD_SECONDS:
            raise NotBuiltError(f"takes {spent:.0f} s to build and run once")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            outcome.status = "wrong"
            wide = next(model.parameters()).dtype is torch.float64
            with _Wide() if wide else nullcontext():
                _run(outcome, model, inputs, kinds, tell)
    except NotBuiltError as error:
        outcome.detail = str(error)
    except AutoparError as error:
        outcome.status = "refused"
        outcome.detail = " ".join(str(error).split("\n  ")[:2])
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = (str(error).strip().splitlines() or [""])[0]
        outcome.detail = f"{type(error).__name__}: {text} ({frame.filename}:{frame.lineno})"
        if os.environ.get("HF_SWEEP_TRACEBACK"):
            traceback.print_exc()
    outcome.seconds = time.process_time() - started
    if outcome.status != "not built":
        for warning in caught:
            if issubclass(warning.category, UnsupportedOpWarning):
                op = str(warning.message).split(" on ")[0]
                outcome.no_rule[op] = outcome.no_rule.get(op, 0) + 1
    return outcome


def _zero_buffers(model: torch.nn.Module, inputs: dict[str, Any]) -> set[str]:
    """Buffers that one step leaves at zero but for rounding: the mean of a centred activation."""
    stepped = copy.deepcopy(model)
    with torch.no_grad():
        stepped(**inputs)
    return {
        name
        for name, b in stepped.named_buffers()
        if b.is_floating_point() and float(b.norm()) < 1e-12
    }


def _run(
    outcome: Outcome,
    model: Any,
    inputs: dict[str, Any],
    kinds: Sequence[str],
    tell: Callable[[Outcome], None],
) -> None:
    zero = _zero_buffers(model, inputs)
    traced = trace(model, inputs, training=True)
    outcome.bound = _bound(traced)
    for kind, plan in _plans(traced, kinds):
        found = verify(plan, model, inputs, traced=traced)
        buffers = {k: v for k, v in found.buffers.items() if k not in zero}
        worst, error = replace(found, buffers=buffers).worst
        if error >= outcome.error:
            outcome.error, outcome.detail = error, f"{kind}: {worst}"
        outcome.plans.append(kind)
        same = outcome.error <= outcome.bound
        tell(replace(outcome, status="exact" if same else "wrong"))
    outcome.status = "exact" if outcome.error <= outcome.bound else "wrong"


class _Wide(TorchFunctionMode):
    """Computes in float64 what the model's own code casts to float32, or makes without a dtype."""

    def __enter__(self) -> Any:
        self._before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        torch.set_default_dtype(self._before)
        super().__exit__(*args)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args, kwargs = pytree.tree_map(_widened, (tuple(args), kwargs or {}))
        return func(*args, **kwargs)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def _child(name: str, kinds: Sequence[str], pipe: Any) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
    pipe.send(asdict(check(name, kinds, lambda outcome: pipe.send(asdict(outcome)))))
    pipe.close()
    os._exit(0)  # what a fork of a thread has to clean up is its parent's


def sweep_one(name: str, kinds: Sequence[str] = PLANS) -> Outcome:
    """`check` in a process of its own, with a time limit."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_child, args=(name, kinds, theirs))
    started = time.perf_counter()
    process.start()
    theirs.close()
    known: Outcome | None = None
    late = f"longer than {WALL_SECONDS:.0f} s"
    try:
        while ours.poll(max(0.0, started + WALL_SECONDS - time.perf_counter())):
            known = Outcome(**ours.recv())
    except EOFError:
        process.join()
        if process.exitcode == 0 and known is not None:
            return known
        late = f"longer than {CPU_SECONDS} s of CPU"
        if process.exitcode not in (-signal.SIGXCPU, -signal.SIGKILL):
            known = Outcome(name=name, status="wrong")
            late = f"the process died with exit code {process.exitcode}"
    finally:
        process.kill()
        process.join()
    known = known or Outcome(name=name, status="not run")
    detail = "; ".join(filter(None, (known.detail, late)))
    return replace(known, detail=detail, seconds=time.perf_counter() - started)


def in_turn(names: Iterable[str]) -> list[str]:
    """The names with the kinds of class taken in turn, so that any beginning has all of them."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(re.split("For(?=[A-Z])", name)[-1], []).append(name)
    common = [kind for kind, found in kinds.items() if len(found) > 2]
    rest = [n for kind, found in kinds.items() if kind not in common for n in found]
    groups = [*(kinds[kind] for kind in common), rest]
    return [n for row in itertools.zip_longest(*groups) for n in row if n is not None]


def sweep(
    names: Sequence[str], jobs: int = 2, progress: Any = None, kinds: Sequence[str] = PLANS
) -> list[Outcome]:
    """All the outcomes, in the order of the names."""
    torch.set_num_threads(1)
    build("LlamaForCausalLM")  # loads what nearly every class needs, before the first fork

    def one(name: str) -> Outcome:
        outcome = sweep_one(name, kinds)
        if progress is not None:
            progress(outcome)
        return outcome

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, names))


def _print(outcome: Outcome) -> None:
    rules = " ".join(outcome.no_rule)
    print(
        f"{outcome.status:9} {outcome.name:45} {outcome.seconds:5.1f} s "
        f"{outcome.error:.1e} {outcome.detail[:300]} {rules}",
        flush=True,
    )


def page_of(outcomes: Sequence[Outcome]) -> str:
    """`docs/models.md`."""
    return table(
        outcomes,
        listed=classes(),
        bounds=BOUNDS,
        build_seconds=BUILD_SECONDS,
        cpu_seconds=CPU_SECONDS,
    )


def _kept(path: Path | None) -> dict[str, Outcome]:
    """The outcomes that earlier runs left; of several of one class, the last."""
    if path is None or not path.exists():
        return {}
    outcomes = [Outcome(**json.loads(line)) for line in path.read_text().splitlines()]
    return {o.name: o for o in outcomes}


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="regular expression of class names")
    parser.add_argument("--more", action="store_true", help="classes of transformers' other lists")
    parser.add_argument("--plans", default="data,free")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path, help="outcomes, a line each; what it has is not rerun")
    parser.add_argument("--again", default="^$", help="regular expression of statuses to rerun")
    parser.add_argument("--write", type=Path, help="the table to write")
    args = parser.parse_args()
    if args.more and args.write:
        parser.error("the page is of the classes without --more")
    kept = _kept(args.json)
    names = [n for n in in_turn(classes(args.more)) if re.search(args.only, n)]
    names = [n for n in names if n not in kept or re.search(args.again, kept[n].status)]

    def progress(outcome: Outcome) -> None:
        _print(outcome)
        kept[outcome.name] = outcome
        if args.json:
            with args.json.open("a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")

    if names:
        sweep(names, args.jobs, progress, args.plans.split(","))
    outcomes = list(kept.values())
    if args.write:
        page = page_of(outcomes)
        args.write.write_text(page)
    counts = Counter(o.status for o in outcomes)
    print(dict(counts))
    sys.exit(1 if counts["wrong"] else 0)


if __name__ == "__main__":
    main()
