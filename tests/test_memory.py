"""Memory limits: plans obey them, an impossible one says what would do, rows never undercount."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from autopar.codegen.fusion import Fusion
from autopar.codegen.microbatch import localise
from autopar.codegen.shares import fused_shares
from autopar.core.constraints import Constraints, assign_mesh
from autopar.core.flights import flights
from autopar.core.schedule import actions
from autopar.cost_model import Cluster
from autopar.errors import InfeasiblePlanError
from autopar.solver.build import StepProblem, build_problem
from autopar.solver.discrete.ilp import solve_problem
from autopar.solver.discrete.problem import Assignment
from autopar.solver.liveness import Liveness
from autopar.solver.microbatch import split_in_time
from autopar.solver.pins import Pins
from autopar.solver.price import Decision, price
from autopar.solver.read_step import build_step
from autopar.solver.row_at import RowAt
from autopar.solver.solve import solve
from autopar.solver.step import Step
from autopar.tracer.trace import trace
from tests import handwritten, zoo
from tests.program_sweep import cluster_of, random_prices

MODELS = {**zoo.MODELS, "mlp": lambda: (handwritten.Mlp(), handwritten.vectors())}
CLUSTER = Cluster.from_profile("cpu-gloo", devices_per_node=4)


@pytest.mark.parametrize(
    ("name", "checkpoint"),
    [
        ("mlp", "none"),
        pytest.param("gpt2", None, marks=pytest.mark.slow),
        pytest.param("resnet", "none", marks=pytest.mark.slow),
    ],
)
def test_impossible_limit_names_one_that_does(name: str, checkpoint: str | None) -> None:
    model, inputs = MODELS[name]()
    traced = trace(model, inputs)
    wanted = Constraints(checkpoint=checkpoint)
    with pytest.raises(InfeasiblePlanError, match="smallest limit") as caught:
        solve(traced, CLUSTER, memory_limit=1000, constraints=wanted)
    least = caught.value.required_bytes
    assert str(least) in str(caught.value)
    found = solve(traced, CLUSTER, memory_limit=least, constraints=wanted)
    assert found.predicted.peak_memory_bytes <= least
    free = solve(traced, CLUSTER, constraints=wanted)
    between = (least + free.predicted.peak_memory_bytes) // 2
    middle = solve(traced, CLUSTER, memory_limit=between, constraints=wanted)
    assert middle.predicted.peak_memory_bytes <= between
    assert free.solver.objective <= middle.solver.objective
    assert middle.solver.objective <= found.solver.objective * (1 + 1e-9)
    for plan in (free, middle, found):
        assert plan.solver.bound <= plan.solver.objective * (1 + 1e-9)


def decided(step: Step, built: StepProblem, chosen: Assignment) -> Decision:
    """What the states that are chosen say of each op and parameter."""
    states = {n: chosen[built.classes[n]] for n in (*step.ops, *step.parameters)}
    return Decision(
        {n: built.candidates[built.classes[n]][states[n]] for n in step.ops},
        {n: built.storages[built.classes[n]][states[n]] for n in step.parameters},
    )


@pytest.mark.parametrize(
    ("name", "mesh", "turns"),
    [
        ("gpt2", (4,), 1),
        ("gpt2", (2, 2), 1),
        ("resnet", (4,), 1),
        ("resnet", (2, 2), 1),
        ("gpt2", (4,), 2),
        ("llama", (2, 2), 4),
    ],
)
@pytest.mark.parametrize("fused", [False, True])
def test_rows_are_never_below_the_priced_peak(
    name: str, mesh: tuple[int, ...], turns: int, fused: bool
) -> None:
    model, inputs = zoo.MODELS[name]()
    traced = trace(model, inputs)
    shares = fused_shares(traced, Fusion.parse(True, torch.device("cuda"))) if fused else None
    if turns > 1:
        traced = localise(traced, split_in_time(traced, CLUSTER, turns), turns).body
    cluster = CLUSTER.with_mesh_shape(mesh, tuple(f"a{i}" for i in range(len(mesh))))
    step = build_step(traced, shares)
    wanted = Constraints()
    pins = Pins(wanted, assign_mesh(wanted, mesh), traced, step)
    built = build_problem(step, cluster, pins, "adamw")
    liveness = Liveness(step, built, "adamw", cluster.device.allocation_granularity_bytes)
    rng = np.random.default_rng(0)
    for _ in range(4):
        # random costs lead to plans that no sane cost would choose
        costs = {
            node: np.where(np.isfinite(cost), cost + rng.random(len(cost)) * cost.max(), np.inf)
            for node, cost in built.problem.costs.items()
        }
        noisy = type(built.problem)(costs, built.problem.edges)
        chosen = solve_problem(noisy, exact=False).chosen
        priced = price(step, cluster, decided(step, built, chosen), "adamw")
        row = liveness.row(priced.peak_at).value(chosen)
        assert priced.peak.peak_bytes <= row <= 1.5 * priced.peak.peak_bytes
        reduced = [
            (RowAt(index, schedule.sums), total)
            for schedule in priced.footprint.schedules
            for index, _, total, _ in schedule.levels()
            if index >= len(step.ops)
        ]
        assert len(reduced) == (len(step.gradients) * len(priced.footprint.schedules)) * (turns > 1)
        for at, total in reduced:
            assert total <= liveness.row(at).value(chosen)


@pytest.mark.parametrize("turns", [2, 4])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero-bubble"])
def test_rows_of_few_microbatches_do_not_count_all_at_once(schedule: str, turns: int) -> None:
    """The first backward finds no sums, the last one no microbatch that waits."""
    model, inputs = zoo.gpt2(layers=2)
    traced = trace(model, inputs)
    traced = localise(traced, split_in_time(traced, CLUSTER, turns), turns).body
    first = flights(actions(schedule, 2, turns))[0]
    step = build_step(replace(traced, flight=first))
    wanted = Constraints()
    pins = Pins(wanted, assign_mesh(wanted, CLUSTER.mesh_shape), traced, step)
    built = build_problem(step, CLUSTER, pins, "sgd")
    liveness = Liveness(step, built, "sgd", CLUSTER.device.allocation_granularity_bytes)
    chosen = solve_problem(built.problem, exact=False).chosen
    footprint = price(step, CLUSTER, decided(step, built, chosen), "sgd").footprint
    seen = set()
    for schedule_of in footprint.schedules:
        for part, top in schedule_of.tops.items():
            total = top.num_bytes + sum(schedule_of.of_others(part).values())
            row = liveness.row(RowAt(top.index, schedule_of.sums)).value(chosen)
            assert total <= row <= 1.02 * total
            seen.add((schedule_of.sums, part))
    assert len(seen) > 4


class Gated(torch.nn.Module):
    """What a product makes is read by way of two views."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.ModuleList(torch.nn.Linear(64, 256) for _ in range(3))
        self.down = torch.nn.ModuleList(torch.nn.Linear(128, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            gate, value = up(x).split(128, -1)
            x = x + down(torch.sigmoid(gate) * value)
        return x.square().mean()


@pytest.mark.parametrize("mesh", [(4,), (2, 2)])
def test_rows_count_what_views_of_copies_hold(mesh: tuple[int, ...]) -> None:
    """A copy once, whichever of the outputs is read, and what it is a copy of no longer."""
    traced = trace(Gated(), {"x": torch.randn(32, 64)})
    cluster = CLUSTER.with_mesh_shape(mesh, tuple(f"a{i}" for i in range(len(mesh))))
    step, wanted = build_step(traced), Constraints()
    pins = Pins(wanted, assign_mesh(wanted, mesh), traced, step)
    built = build_problem(step, cluster, pins, "adamw")
    liveness = Liveness(step, built, "adamw", cluster.device.allocation_granularity_bytes)
    rng = np.random.default_rng(0)
    free = {pair: np.where(np.isfinite(m), 0.0, np.inf) for pair, m in built.problem.edges.items()}
    for _ in range(10):
        costs = {n: np.where(np.isfinite(c), rng.random(len(c)), np.inf)
                 for n, c in built.problem.costs.items()}  # fmt: skip
        chosen = solve_problem(type(built.problem)(costs, free), exact=False).chosen
        priced = price(step, cluster, decided(step, built, chosen), "adamw")
        row = liveness.row(priced.peak_at).value(chosen)
        assert priced.peak.peak_bytes <= row <= 1.2 * priced.peak.peak_bytes


class Tables(torch.nn.Module):
    """Microseconds of compute: splitting it costs many times what it takes whole."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Parameter(torch.randn(4, 16, 8))
        self.deep = torch.nn.Parameter(torch.randn(1, 3, 8, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x[:, None] @ self.wide
        return hidden.square().mean() + (hidden[:, :3] @ self.deep).square().mean()


@pytest.mark.parametrize("share", [0.7, 0.4])
def test_a_model_far_cheaper_than_its_collectives_is_split_for_memory(share: float) -> None:
    traced = trace(Tables(), (torch.randn(8, 6, 16),))
    whole = solve(traced, CLUSTER, constraints=Constraints(checkpoint="none"))
    limit = int(share * whole.predicted.peak_memory_bytes)
    assert solve(traced, CLUSTER, memory_limit=limit).predicted.peak_memory_bytes <= limit


class Sum(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = (
            torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
            for _ in range(4)
        )
        self.blocks = torch.nn.ModuleList(blocks).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().sum()


@pytest.mark.parametrize("limit", [300, 8000])
def test_the_limit_that_an_error_names_does_not_depend_on_the_one_that_was_asked_for(
    limit: int,
) -> None:
    traced = trace(Sum(), (torch.randn(8, 8, dtype=torch.float64),))
    with random_prices(0):
        with pytest.raises(InfeasiblePlanError) as caught:
            solve(traced, cluster_of((2, 2)), memory_limit=limit)
        least = caught.value.required_bytes
        found = solve(traced, cluster_of((2, 2)), memory_limit=least)
    assert least is not None
    assert found.predicted.peak_memory_bytes <= least


def test_the_limit_that_an_error_names_holds_where_rows_count_more_than_plans_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By their bounds, plans just within a limit may seem to be too large."""
    monkeypatch.setattr("autopar.solver.fit._ABSURD", 0.0)
    traced = trace(handwritten.Mlp(), handwritten.vectors())
    with pytest.raises(InfeasiblePlanError) as caught:
        solve(traced, CLUSTER, memory_limit=1000)
    least = caught.value.required_bytes
    found = solve(traced, CLUSTER, memory_limit=least)
    assert found.predicted.peak_memory_bytes == least
    assert found.solver.bound <= found.solver.objective


def test_the_least_limit_is_that_of_the_best_way_to_recompute() -> None:
    """Others are not looked at to the end where their rows say that they take more."""
    model, inputs = zoo.gpt2(layers=2)
    traced = trace(model, inputs)
    cluster = Cluster.from_profile("h100-sxm", devices_per_node=2)

    def least(**pins: str) -> int:
        wanted = Constraints(**pins)
        with pytest.raises(InfeasiblePlanError) as caught:
            solve(traced, cluster, memory_limit=1000, constraints=wanted)
        assert caught.value.required_bytes is not None
        return caught.value.required_bytes

    each = [least(checkpoint=c, offload=o) for c in ("none", "full") for o in ("none", "optimizer")]
    assert len(set(each)) == len(each)
    assert least() <= min(each)
