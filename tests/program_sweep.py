"""Random programs under random plans, compared with eager: `program_text.py` writes the programs.

    python -m tests.program_sweep [--seeds A B] [--plans N] [--refused] [--shrink]

Each program is planned with random settings on a random mesh, half of the time for random seconds
of every way to run an op, so that plans are unlike each other and hardly ever the best ones. They
run a step on virtual ranks, on other inputs and buffers than those of the trace: outputs, every
gradient and every buffer are compared. Printed are wrong numbers and errors that are no
`AutoparError`, with `--refused` these too; `--shrink` drops statements while a failure remains.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import logging
import math
import random
import signal
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import torch

from autopar.codegen.fusion import Fusion
from autopar.core.constraints import Constraints
from autopar.core.plan import Plan
from autopar.cost_model import Cluster
from autopar.errors import AutoparError, InfeasiblePlanError
from autopar.planning import may_fold
from autopar.solver.candidates import Pricer
from autopar.solver.solve import StepSearch
from autopar.step_plans import StepPlans
from autopar.tracer.repeats import find_repeats
from autopar.tracer.trace import trace
from autopar.verification import verify
from tests.program_text import Program, is_valid, write

BOUND = 1e-9
BOUND_FLOAT32 = 1e-4  # of programs with a cast
SECONDS = 120  # for a plan and its run
MESHES = ((2,), (4,), (2, 2), (3,), (2,), (2, 2), (2,), (2, 2), (2, 3), (2, 4))
PINS: tuple[dict[str, Any], ...] = (
    {}, {}, {}, {"data": 2}, {"zero": 1}, {"zero": 2}, {"zero": 3}, {"data": 2, "zero": 3},
    {"tensor": {"mode": "1d", "size": 2}}, {"tensor": "1d"}, {"tensor": {"mode": "2d", "size": 4}},
    {"data": 2, "tensor": {"mode": "1d", "size": 2}, "zero": 3}, {"sequence": "megatron"},
    {"sequence": "ulysses"}, {"sequence": "ring"}, {"sequence": {"mode": "megatron", "size": 2}},
    {"tensor": {"mode": "2.5d", "size": 8}}, {"tensor": {"mode": "3d", "size": 8}},
    {"pipeline": {"size": 2}}, {"pipeline": {"size": 1, "microbatches": 2}},
    {"pipeline": {"size": 2, "microbatches": 2}}, {"pipeline": {"size": 3, "microbatches": 2}},
    {"pipeline": {"size": 2, "microbatches": 2, "schedule": "gpipe"}},
    {"pipeline": {"size": 2, "microbatches": 2, "schedule": "interleaved", "chunks": 2}},
    {"pipeline": {"size": 2, "microbatches": 2, "schedule": "zero-bubble"}},
    {"pipeline": {"size": 2, "microbatches": 2, "schedule": "automatic"}},
    {"pipeline": {"size": 1, "microbatches": 2}, "zero": 1},
    {"pipeline": {"size": 2, "microbatches": 2}, "data": 2, "zero": 2},
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How a program is planned."""

    mesh: tuple[int, ...]
    pins: dict[str, Any]
    limit: float | None = None
    prices: int | None = None
    passes: tuple[str, ...] | None = None


def settings(seed: int, source: str) -> Iterator[Setting]:
    """Settings of a seed, without end."""
    drawn = random.Random(seed)
    attention = "scaled_dot" in source
    pinned = [p for p in PINS if attention or "sequence" not in p]
    while True:
        pins = copy.deepcopy(drawn.choice(pinned))
        mesh = drawn.choice([m for m in MESHES if _fits(m, pins)])
        if drawn.random() < 0.2:
            pins["checkpoint"] = drawn.choice(("none", "selective", "full", "host"))
        if drawn.random() < 0.4 and not pins:
            stored = [drawn.choice(("R", "S0", "S1")) for _ in mesh]
            pins["params"] = {drawn.choice(("*.weight", "blocks.*.weight", "*p1*")): stored}
        limit = drawn.choice((None, None, None, None, 0.7, 0.4))
        prices = drawn.randrange(1000) if drawn.random() < 0.6 else None
        passes = drawn.choice(((), (), None))
        yield Setting(mesh=mesh, pins=pins, limit=limit, prices=prices, passes=passes)


def _fits(mesh: tuple[int, ...], pins: Mapping[str, Any]) -> bool:
    """True if the pinned sizes divide the devices of a mesh."""
    sizes = [pin["size"] for pin in pins.values() if isinstance(pin, dict) and "size" in pin]
    return math.prod(mesh) % math.prod((*sizes, pins.get("data", 1))) == 0


@contextlib.contextmanager
def random_prices(seed: int | None) -> Iterator[None]:
    """Each way to run an op takes seconds of its own."""
    if seed is None:
        yield
        return

    def compute(self: Pricer, call: Any, candidates: Any, share: Any = None) -> Any:
        op = f"{seed} {call.target} {call.operands} {call.outputs}"
        drawn = (random.Random(f"{op} {c}").uniform(-3, 1) for c in candidates)
        return priced(self, call, candidates, share) * np.array([10.0**x for x in drawn])

    priced = Pricer.compute
    with mock.patch.object(Pricer, "compute", compute):
        yield


def cluster_of(mesh: tuple[int, ...]) -> Cluster:
    """Devices that compute slowly beside what they send, so that work is split."""
    size = int(np.prod(mesh))
    cluster = Cluster.from_profile("cpu-gloo", devices_per_node=size, mesh_shape=mesh)
    link = replace(cluster.intra, latency_s=1e-9, base_latency_s=1e-9, bandwidth=1e13)
    device = replace(cluster.device, memory_bandwidth=1e5)
    return replace(cluster, intra=link, inter=link, device=device)


class Runs:
    """The traces of a program, and what became of its plans."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.model = program.build()
        self.traces: dict[bool, Any] = {}
        self.bound = BOUND_FLOAT32 if ".float()" in program.source() else BOUND

    def traced(self, fold: bool) -> Any:
        if fold not in self.traces:
            inputs = self.program.inputs()
            self.traces[fold] = trace(self.model, inputs, training=True, fold=fold)
        return self.traces[fold]

    def plan(self, setting: Setting) -> Plan:
        """The plan of a setting; of a limit that is too small, that of the least one."""
        constraints = Constraints.parse(setting.pins)
        traced = self.traced(may_fold(self.model, constraints, find_repeats(self.model)))
        if not may_fold(self.model, constraints, traced.repeats):
            traced = self.traced(False)
        cluster = cluster_of(setting.mesh)
        fusion = Fusion.parse(None, torch.device("cpu"))
        steps = StepPlans(traced, cluster, constraints, "adamw", False, fusion)

        def within(limit: int | None) -> Plan:
            if "pipeline" in setting.pins:
                return steps.under(limit)
            search = StepSearch(traced, cluster, constraints=constraints, memory_limit=limit)
            search.glance()
            return search.soon() or search.run().plan

        with random_prices(setting.prices):
            plan = within(None)
            if setting.limit is None:
                return plan
            most = plan.predicted.peak_memory_bytes
            try:
                return within(int(setting.limit * most))
            except InfeasiblePlanError as error:
                return within(error.required_bytes)

    def error(self, plan: Plan, setting: Setting) -> tuple[str, float]:
        """What differs most in the second step, of other inputs and buffers than were traced."""
        model = copy.deepcopy(self.model)
        with torch.no_grad():
            model(**self.program.inputs(0))
        found = verify(
            plan, model, self.program.inputs(1), traced=self.traced(False), passes=setting.passes
        )
        return found.worst


def outcome(runs: Runs, setting: Setting) -> tuple[str, str]:
    """exact, refused, wrong, crash or hang; and what there is to tell."""
    signal.signal(signal.SIGALRM, _late)
    signal.alarm(SECONDS)
    try:
        name, error = runs.error(runs.plan(setting), setting)
        return ("exact", "") if error <= runs.bound else ("wrong", f"{name} {error:.2g}")
    except AutoparError as error:
        kind = "crash" if "defect of autopar" in str(error) else "refused"
        return kind, f"{type(error).__name__}: {' '.join(str(error).split())}"
    except TimeoutError as error:
        return "hang", _told(error)
    except Exception as error:
        return "crash", _told(error)
    finally:
        signal.alarm(0)


def _told(error: Exception) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "autopar" in f.filename]
    frame = frames[-1]
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text} ({frame.filename.split('autopar/')[-1]}:{frame.lineno})"


def _late(*_: Any) -> None:
    raise TimeoutError(f"no end within {SECONDS} s")


def shrunk(program: Program, setting: Setting, kind: str, text: str) -> Program:
    """The program with as few statements and blocks as fail alike."""

    def fails(smaller: Program) -> bool:
        if not is_valid(smaller):
            return False
        got, told = outcome(Runs(smaller), setting)
        return got == kind and (kind == "wrong" or told[:40] == text[:40])

    changed = True
    while changed:
        changed = False
        for field in ("after", "block", "before", "block_init", "init"):
            for index in reversed(range(len(getattr(program, field)))):
                lines = getattr(program, field)
                smaller = replace(program, **{field: (*lines[:index], *lines[index + 1 :])})
                if fails(smaller):
                    program, changed = smaller, True
        for blocks in range(1, program.blocks):
            smaller = replace(program, blocks=blocks)
            if fails(smaller):
                program, changed = smaller, True
                break
    return program


def _print(program: Program, setting: Setting) -> None:
    print(f"  {setting}\n{program.source().partition('% size')[2]}", flush=True)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 20), metavar=("A", "B"))
    parser.add_argument("--plans", type=int, default=4, help="of each program")
    parser.add_argument("--refused", action="store_true", help="print refusals, too")
    parser.add_argument("--shrink", action="store_true", help="drop statements of what fails")
    parser.add_argument("--seconds", type=float, default=500, help="begin no program after them")
    args = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    counts: Counter[str] = Counter()
    started = time.monotonic()
    for seed in range(*args.seeds):
        if time.monotonic() - started > args.seconds:
            break
        program = write(seed)
        runs = Runs(program)
        known: set[str] = set()
        done = 0
        tried = itertools.islice(settings(seed, program.source()), 3 * args.plans)
        for number, setting in enumerate(tried):
            if done == args.plans:
                break
            began = time.monotonic()
            kind, text = outcome(runs, setting)
            if (spent := time.monotonic() - began) > 15:
                print(f"# seed {seed} plan {number}: {spent:.0f} s", flush=True)
            done += kind != "refused"
            counts[kind] += 1
            if kind == "exact" or (kind == "refused" and not args.refused) or text in known:
                continue
            known.add(text)
            print(f"{kind} seed {seed} plan {number}: {text[:600]}", flush=True)
            if kind != "refused" and args.shrink:
                _print(shrunk(program, setting, kind, text), setting)
    print(f"# seeds {args.seeds[0]} to {seed}: {dict(counts)}", flush=True)


if __name__ == "__main__":
    main()
