"""The search counts gathers of parameters and reductions of gradients beside compute."""

from __future__ import annotations

import gc
import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from torch import fx, nn

import autopar
from autopar.codegen.emit import written
from autopar.codegen.passes.order import link
from autopar.codegen.passes.sends import is_start
from autopar.core.block_kinds import Checkpoint
from autopar.core.collector import collect_many, paused_collector
from autopar.core.constraints import Constraints, assign_mesh
from autopar.core.graph import TracedModel
from autopar.core.plan import Plan
from autopar.cost_model import Cluster
from autopar.cost_model.simulator import simulate
from autopar.search.doubts import Doubts
from autopar.search.one_piece import OnePiece
from autopar.solver.build import build_problem
from autopar.solver.discrete.problem import ChoiceProblem
from autopar.solver.fit import UNLIMITED
from autopar.solver.known import Variants
from autopar.solver.meshes import meshes
from autopar.solver.met_plans import CLOSE
from autopar.solver.offers import Offers
from autopar.solver.overlap import (
    _LAST,
    ALL,
    EXPOSED,
    Found,
    Least,
    NotBelow,
    Weights,
    _next,
    counted_seconds,
    least,
)
from autopar.solver.pins import Pins, with_roles
from autopar.solver.read_step import build_step
from autopar.solver.rules.notes import note_places
from autopar.solver.solve import Solved, StepSearch, solve
from autopar.solver.sums import SumSearch
from autopar.solver.variant import Variant
from autopar.tracer.trace import trace
from tests.test_host_memory import on_host
from tests.test_host_recompute import deep


class Product(nn.Module):
    """One product, few enough states to try all."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x).mean()


def _product(rows: int, width: int) -> TracedModel:
    with torch.device("meta"):
        return trace(Product(width), (torch.empty(rows, width),))


def _sums(traced: TracedModel, cluster: Cluster, weights: Weights) -> ChoiceProblem:
    wanted = Constraints()
    step = replace(build_step(traced), weights=weights)
    roles = assign_mesh(wanted, cluster.mesh_shape)
    return build_problem(step, cluster, Pins(wanted, roles, traced, step), "adamw").problem


@pytest.mark.parametrize("weights", [Weights(0.01, 0.99), Weights(1.0, 0.1), Weights(0.3, 1.0)])
def test_other_weights_are_other_sums_of_the_same_terms(weights: Weights) -> None:
    """What a search takes over from one that counts otherwise is what it would build itself."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
        batch = (torch.empty(32, 64), torch.empty(32, 64))
    traced = trace(model, batch, loss_fn=nn.functional.mse_loss)
    cluster = Cluster.from_profile("h100-sxm", nodes=2, devices_per_node=2, mesh_shape=(2, 2))
    roles, optimizer = assign_mesh(Constraints(), cluster.mesh_shape), "adamw"
    step = build_step(traced)
    pins = Pins(Constraints(), roles, traced, step)
    built = build_problem(step, cluster, pins, optimizer)
    again = built.weighted(weights).problem
    wanted = _sums(traced, cluster, weights)
    assert list(again.costs) == list(wanted.costs)
    assert list(again.edges) == list(wanted.edges)
    for key, cost in wanted.costs.items():
        assert np.array_equal(again.costs[key], cost)
    for pair, matrix in wanted.edges.items():
        assert np.array_equal(again.edges[pair], matrix)
    costs = any((again.costs[k] != built.problem.costs[k]).any() for k in again.costs)
    edges = any((again.edges[k] != built.problem.edges[k]).any() for k in again.edges)
    # bringing the loss to all ranks may hide, too, and is a cost of the op that makes it; moves of
    # parameters and gradients copy, which is compute
    assert (costs, edges) == (min(weights) < 1, min(weights) < 1)


class _Line(NamedTuple):
    """A plan of so many seconds of ops, of collectives that may hide, and of others."""

    compute_s: float
    hideable_s: float
    total_s: float


def _searched(best: SimpleNamespace, limited: bool) -> Any:
    """A search that has found a plan, which a limit has bound or not."""
    memory = SimpleNamespace(best=best, free=None if limited else best, has_limit=limited)
    return SimpleNamespace(search=SimpleNamespace(memory=memory))


@pytest.mark.parametrize(("limited", "stops"), [(True, True), (True, False), (False, True)])
def test_sums_end_with_the_first_where_its_plan_is_doubtful(limited: bool, stops: bool) -> None:
    plans = [_Line(1.0, 4.0, 5.0), _Line(3.0, 1.0, 5.5)]
    asked: list[Found] = []

    def search(weights: Weights, enough_s: float, below_s: float) -> Found:
        found = min(
            plans,
            key=lambda p: weights.compute * p.compute_s + weights.hideable * p.hideable_s,
        )
        best = SimpleNamespace(price=found)
        variant = _searched(best, limited)
        seen.append(weights)
        enough.append(enough_s)
        return Found(variant, 0.7 if len(seen) == 1 else 0.6)

    def stop(found: Found) -> bool:
        asked.append(found)
        return stops

    seen: list[Weights] = []
    enough: list[float] = []
    bound = least(search, EXPOSED, stop).bound
    assert bound == 0.7
    assert enough == [0.0, *[0.7] * (len(seen) - 1)]  # below the best bound, none is raised
    assert len(asked) == limited  # of an unlimited step, sums are soon searched
    assert (len(seen) == 1) == (limited and stops)


def test_sums_end_where_a_search_finds_none_less_than_known_plans() -> None:
    """A search that is not exact may find worse ones forever."""
    plans = [_Line(1.0, 4.0, 5.0), _Line(3.0, 1.0, 5.5), _Line(4.0, 4.0, 9.0)]
    asked: list[float] = []

    def search(weights: Weights, enough_s: float, below_s: float) -> Found:
        best = SimpleNamespace(price=plans[min(len(asked), 2)])
        asked.append(enough_s)
        variant = _searched(best, limited=False)
        return Found(variant, 0.5)

    found = least(search, EXPOSED)
    assert len(asked) == 3
    assert found.variant.search.memory.best.price in plans[:2]


@pytest.mark.parametrize(("below_s", "asked_s"), [(9.0, [9.0, 4.4]), (4.2, [4.2, 4.2])])
def test_later_sums_must_be_below_the_best_plan(below_s: float, asked_s: list[float]) -> None:
    """Where one has no plan that is, the search ends with what that says of all plans."""
    plan = _Line(1.0, 4.0, 5.4)
    asked: list[float] = []

    def search(weights: Weights, enough_s: float, below_s: float) -> Found:
        asked.append(below_s)
        if len(asked) > 1:
            raise NotBelow(4.1)
        variant = _searched(SimpleNamespace(price=plan), limited=True)
        return Found(variant, 1.8)

    found = least(search, EXPOSED, below_s=below_s)
    assert counted_seconds(cast(Any, plan), EXPOSED) == pytest.approx(4.4)
    assert asked == pytest.approx(asked_s)
    assert found.variant.search.memory.best.price is plan
    assert found.bound == 4.1 and found.t > 0


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("first", [0.0, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", range(5))
def test_the_greatest_bound_is_found_from_anywhere(seed: int, first: float, limited: bool) -> None:
    """With each sum solved exactly, from any t that the search begins with."""
    rng = np.random.default_rng(seed)
    ops_s, beside_s, others_s = rng.uniform(0.1, 4.0, (3, 12))
    plans = [_Line(c, h, c + h + o) for c, h, o in zip(ops_s, beside_s, others_s, strict=True)]
    seen: list[float] = []

    def value(plan: _Line, weights: Weights) -> float:
        others = plan.total_s - plan.compute_s - plan.hideable_s
        return others + weights.compute * plan.compute_s + weights.hideable * plan.hideable_s

    def search(weights: Weights, enough_s: float, below_s: float) -> Found:
        seen.append(weights.t)
        found = min(plans, key=lambda p: value(p, weights))
        best = SimpleNamespace(price=found)
        variant = _searched(best, limited)
        return Found(variant, value(found, weights))

    found = least(search, EXPOSED, first=first)
    best = found.variant.search.memory.best
    assert best is not None
    counted = [counted_seconds(cast(Any, plan), EXPOSED) for plan in plans]
    shown = counted_seconds(best.price, EXPOSED)
    assert seen[0] == pytest.approx(first) and found.t in [pytest.approx(t) for t in seen]
    assert found.bound <= min(counted) * (1 + 1e-9)
    assert shown >= min(counted)
    if not limited:  # the greatest of all sums, or near enough to the plan
        grid = [Weights(1 - t, EXPOSED + t * (1 - EXPOSED)) for t in np.linspace(0, 0.99, 397)]
        greatest = max(min(value(p, w) for p in plans) for w in grid)
        assert found.bound >= min(greatest * 0.999, shown * 0.99)


def test_a_limit_is_looked_at_first_where_the_free_step_is_fastest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Meshes whose steps are too slow without a limit are not searched with one."""
    with torch.device("meta"):
        model = nn.Sequential(*(Product(2048).up for _ in range(2)))
        batch = (torch.empty(1 << 15, 2048), torch.empty(1 << 15, 2048))
    traced = trace(model, batch, loss_fn=nn.functional.mse_loss)
    cluster = Cluster.from_profile("h100-sxm", nodes=4, devices_per_node=8, mesh_shape=(4, 8))
    whole = OnePiece(traced, cluster, Constraints(), "adamw", Offers(cluster))
    seen: list[tuple[int, ...]] = []

    class Recorded(StepSearch):
        def glance(self, below_s: float = math.inf) -> float:
            seen.append(self.planned.mesh_shape)
            return super().glance(below_s)

    monkeypatch.setattr("autopar.search.mesh_searches.StepSearch", Recorded)
    free = whole.plan(UNLIMITED)
    assert seen == [(32,), (4, 8)]
    assert set(whole.free_s) == set(seen)
    assert min(whole.free_s.values()) == free.solver.bound
    limit = free.predicted.peak_memory_bytes - 1
    for slow, other in itertools.permutations([(4, 8), (32,)]):
        seen.clear()
        whole.free_s.update({slow: 100.0, other: 0.0})
        found = whole.plan(limit)
        assert seen == [other]
        assert found.mesh_shape == other
        assert found.predicted.peak_memory_bytes <= limit


def _two_products(mesh_shape: tuple[int, ...]) -> OnePiece:
    with torch.device("meta"):
        model = nn.Sequential(*(Product(2048).up for _ in range(2)))
        batch = (torch.empty(1 << 12, 2048), torch.empty(1 << 12, 2048))
    traced = trace(model, batch, loss_fn=nn.functional.mse_loss)
    cluster = Cluster.from_profile("h100-sxm", devices_per_node=8, mesh_shape=mesh_shape)
    return OnePiece(traced, cluster, Constraints(), "adamw", Offers(cluster))


def _programs_take(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[Plan], float]) -> None:
    """Programs take the seconds given, of plans with what their programs are predicted to take."""
    program = OnePiece._program

    def scripted(self: OnePiece, plan: Plan, *given: Any) -> Plan:
        found = program(self, plan, *given)
        told = replace(plan, predicted=found.predicted)
        return replace(found, predicted=replace(found.predicted, step_time_s=seconds(told)))

    monkeypatch.setattr(OnePiece, "_program", scripted)


@pytest.mark.parametrize(("hidden", "counted"), [(0.5, {EXPOSED, 1.0, 0.55}), (1.0, {EXPOSED})])
def test_all_is_counted_where_the_rule_is_in_doubt(
    hidden: float, counted: set[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = _two_products(mesh_shape=(8,))
    limit = round(0.95 * whole.plan(UNLIMITED).predicted.peak_memory_bytes)
    seen: set[float] = set()
    proved: set[float] = set()

    class Recorded(StepSearch):
        def run(self, *given: Any) -> Solved:
            seen.add(round(self.exposed, 6))
            if self.search.proved_within is not None:
                proved.add(self.exposed)
            return super().run(*given)

    monkeypatch.setattr("autopar.search.mesh_searches.StepSearch", Recorded)
    monkeypatch.setattr(OnePiece, "_hidden", lambda self, plan: hidden)
    plan = whole.best(limit)
    assert plan.predicted.peak_memory_bytes <= limit
    assert plan.predicted.hidden_comm_s
    assert seen == counted
    assert proved == {EXPOSED, plan.solver.exposed}  # what is not taken is not proved
    assert 0 < plan.solver.bound <= plan.solver.objective


@pytest.mark.parametrize(("slower", "counted"), [(1.06, {EXPOSED, 0.5}), (1.04, {EXPOSED})])
def test_half_is_counted_where_a_program_takes_much_more_than_was_counted(
    slower: float, counted: set[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it hides most of what was counted on: another plan may have less to hide."""
    whole = _two_products(mesh_shape=(8,))
    asked: set[float] = set()
    searched = OnePiece.plan

    def plan(
        self: OnePiece, limit: int, exposed: float = EXPOSED, *given: Any, **named: Any
    ) -> Plan:
        asked.add(exposed)
        return searched(self, limit, exposed, *given, **named)

    def seconds(plan: Plan) -> float:
        solver = plan.solver
        return solver.objective * (slower if solver.exposed == EXPOSED else 0.5)

    monkeypatch.setattr(OnePiece, "plan", plan)
    monkeypatch.setattr(OnePiece, "_hidden", lambda self, plan: 0.9)
    _programs_take(monkeypatch, seconds)
    best = whole.best(UNLIMITED, whole.plan(UNLIMITED))
    assert asked == counted
    assert best.solver.exposed == max(counted)
    assert 0 < best.solver.bound <= best.solver.objective


def test_a_plan_that_counts_otherwise_is_proved_once_it_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its search tells what no plan is below whose blocks are all recomputed in one way."""
    whole = _two_products(mesh_shape=(8,))
    limit = round(0.95 * whole.plan(UNLIMITED).predicted.peak_memory_bytes)

    def seconds(plan: Plan) -> float:
        return plan.predicted.step_time_s * (0.5 if plan.solver.exposed > EXPOSED else 1.0)

    _programs_take(monkeypatch, seconds)
    monkeypatch.setattr(OnePiece, "_hidden", lambda self, plan: 0.5)
    monkeypatch.setattr(SumSearch, "of_any", lambda self, weights, bound, enough_s: 0.5 * bound)
    plan = whole.best(limit)
    assert plan.solver.exposed > EXPOSED
    assert 0 < plan.solver.bound <= 0.5 * plan.solver.objective


@pytest.mark.parametrize("exposed", [EXPOSED, 0.55, 1.0])
def test_a_limit_counts_the_share_of_the_batch_that_is_read(exposed: float) -> None:
    """Inputs that outweigh the parameters: whole, they would leave nothing that fits."""
    whole = replace(_two_products(mesh_shape=(8,)), searches={})
    limit = round(0.95 * whole.plan(UNLIMITED).predicted.peak_memory_bytes)
    plan = whole.plan(limit, exposed)
    assert plan.predicted.peak_memory_bytes <= limit
    assert plan.solver.gap < 0.01
    assert whole.searches
    fits = [
        (found.search.memory, found.search.memory.best)
        for found in whole.searches.values()
        if found.search.memory.best is not None
    ]
    assert fits
    for memory, fit in fits:
        row = memory.relaxed.liveness.row(fit.row)
        assert row.value(fit.solution.chosen) == fit.peak


def test_many_axes_are_searched_last_under_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes long; where few axes are as good, other exposures are searched on these alone."""
    whole = _two_products(mesh_shape=(2, 2, 2))
    limit = round(0.95 * whole.plan(UNLIMITED).predicted.peak_memory_bytes)
    glanced: list[tuple[int, ...]] = []
    ran: list[tuple[tuple[int, ...], float]] = []

    class Recorded(StepSearch):
        def glance(self, below_s: float = math.inf) -> float:
            glanced.append(self.planned.mesh_shape)
            return super().glance(below_s)

        def run(self, *given: Any) -> Solved:
            ran.append((self.planned.mesh_shape, self.exposed))
            return super().run(*given)

    monkeypatch.setattr("autopar.search.mesh_searches.StepSearch", Recorded)
    monkeypatch.setattr(OnePiece, "_hidden", lambda self, plan: 0.5)
    soon = whole.soon(limit)
    assert soon is not None
    assert soon.predicted.peak_memory_bytes <= limit
    assert set(glanced) == {(8,), (4, 2), (2, 4)}
    # what is taken is proved on all meshes
    monkeypatch.setattr(OnePiece, "_in_full", lambda self, limit, best, *given: best)
    plan = whole.best(limit)
    assert plan.predicted.peak_memory_bytes <= limit
    first = [shape for shape, exposed in ran if exposed == EXPOSED]
    assert first.index((2, 2, 2)) == len(set(first)) - 1
    others = {shape for shape, exposed in ran if exposed == 0.55}
    assert others == {(8,), (4, 2), (2, 4)}


def test_all_is_counted_where_programs_without_a_limit_hide_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rule is in doubt before anything is searched under the limit, which takes longest."""
    whole = _two_products(mesh_shape=(8,))
    monkeypatch.setattr(OnePiece, "_hidden", lambda self, plan: 0.1)
    free = whole.best(UNLIMITED)
    seen: set[float] = set()

    class Recorded(StepSearch):
        def run(self, *given: Any) -> Solved:
            seen.add(self.exposed)
            return super().run(*given)

    monkeypatch.setattr("autopar.search.mesh_searches.StepSearch", Recorded)
    plan = whole.best(round(0.95 * free.predicted.peak_memory_bytes))
    assert seen == {1.0}
    assert plan.solver.exposed == 1.0
    assert plan.solver.bound <= plan.solver.objective


@pytest.mark.parametrize("mesh", [(8,), (2, 4)])
def test_a_plan_that_is_soon_found_fits_and_its_search_is_gone_on_with(
    mesh: tuple[int, ...],
) -> None:
    """With one mesh or several; nothing is begun twice."""
    whole = _two_products(mesh_shape=mesh)
    limit = whole.plan(UNLIMITED).predicted.peak_memory_bytes - 1
    soon = whole.soon(limit)
    assert soon is not None and soon.predicted.peak_memory_bytes <= limit
    (begun,) = whole.begun.values()
    found = whole.plan(limit)
    assert begun and not whole.begun
    assert found.predicted.peak_memory_bytes <= limit
    assert found.solver.objective <= soon.solver.objective * (1 + 1e-9)
    assert whole.soon(1) is None  # nothing fits


def test_a_rule_that_is_in_doubt_on_one_mesh_is_on_others() -> None:
    """Programs are simulated until one hides little, and only those of plans that are of use."""
    asked: list[float] = []

    def hidden(plan: Plan) -> float:
        asked.append(plan.solver.objective)
        return 0.5 if len(asked) > 1 else 0.9

    def plan(seconds: float) -> Plan:
        return cast("Plan", SimpleNamespace(solver=SimpleNamespace(objective=seconds)))

    doubts = Doubts(hidden)
    assert [doubts(plan(s), 2.0) for s in (3.0, 1.0, 4.0, 1.5, 5.0)] == [False] * 3 + [True] * 2
    assert asked == [1.0, 1.5]


def test_a_search_in_doubt_ends_whatever_its_plan_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _two_products(mesh_shape=(8,))
    limit = whole.plan(UNLIMITED).predicted.peak_memory_bytes - 1
    asked: list[bool] = []

    def asking(search: Any, exposed: float, stop: Any, *given: Any) -> Least:
        found = least(search, exposed)
        asked.append(stop(Found(found.variant, 0.0)))
        return found

    monkeypatch.setattr("autopar.solver.solve.least", asking)
    search = StepSearch(whole.traced, whole.cluster, memory_limit=limit, offers=whole.offers)
    search.glance()
    search.run(0.0, lambda plan: True)
    assert asked == [True]


def test_what_is_done_with_goes_between_large_pieces_of_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with paused_collector():
        gc.collect()  # what is counted begins here
        graph = fx.Graph()
        graph.placeholder("x")
        gone = weakref.ref(graph)
        del graph
        collect_many()
        assert gone() is not None  # few objects are not worth a look
        monkeypatch.setattr("autopar.core.collector._MANY", 1)
        collect_many()
        assert gone() is None


def _values(problems: Sequence[ChoiceProblem]) -> Iterator[tuple[float, ...]]:
    """Of every assignment that is possible, its value in each problem of the same states."""
    first = problems[0]
    nodes = list(first.costs)
    back = [
        [(i, j) for i, j in first.edges if {i, j} <= {*nodes[: k + 1]} and node in (i, j)]
        for k, node in enumerate(nodes)
    ]

    def extend(chosen: dict[Any, int], so_far: tuple[float, ...]) -> Iterator[tuple[float, ...]]:
        if len(chosen) == len(nodes):
            yield so_far
            return
        node = nodes[len(chosen)]
        for state in range(len(first.costs[node])):
            now = {**chosen, node: state}
            values = tuple(
                value
                + float(p.costs[node][state])
                + sum(float(p.edges[i, j][now[i], now[j]]) for i, j in back[len(chosen)])
                for p, value in zip(problems, so_far, strict=True)
            )
            if math.isfinite(values[0]):
                yield from extend(now, values)

    yield from extend({}, (0.0,) * len(problems))


@pytest.mark.parametrize("rows", [1 << 9, 1 << 12, 1 << 15, 1 << 18])
def test_the_plan_is_the_best_of_all_as_counted(rows: int) -> None:
    """Every assignment is priced by hand; from bound by communication to bound by compute."""
    traced = _product(rows, 1024)
    cluster = Cluster.from_profile("v100", devices_per_node=4)
    # an infinite price times nothing is no number
    weights = (Weights(), Weights(1e-6, 1.0), Weights(1.0, 1e-6))
    best = math.inf
    for total_s, less_s, apart_s in _values([_sums(traced, cluster, w) for w in weights]):
        compute_s = (total_s - less_s) / (1 - 1e-6)
        hideable_s = (total_s - apart_s) / (1 - 1e-6)
        waited_s = max(EXPOSED * hideable_s, hideable_s - compute_s)
        best = min(best, total_s - hideable_s + waited_s)
    report = solve(traced, cluster).solver
    assert report.bound <= best * (1 + 1e-9)
    assert best * (1 - 1e-9) <= report.objective <= best * 1.01


def test_what_hides_is_not_avoided() -> None:
    """Gradients that travel beside compute cost less than activations that are waited for."""
    traced = _product(1 << 15, 4096)
    cluster = Cluster.from_profile("h100-sxm", devices_per_node=8)
    found = solve(traced, cluster)
    seen = solve(traced, cluster, exposed=1.0)
    assert found.predicted.serial_time_s >= seen.predicted.serial_time_s * (1 - 1e-9)
    assert found.solver.objective < seen.solver.objective
    assert seen.solver.objective == pytest.approx(seen.predicted.serial_time_s, rel=1e-9)


def _planned(mesh: tuple[int, ...], constraints: Any = None) -> Plan:
    with torch.device("meta"):
        model = Product(4096)
        batch = (torch.empty(1 << 15, 4096),)
    cluster = Cluster.from_profile("h100-sxm", nodes=4, devices_per_node=8, mesh_shape=mesh)
    return autopar.plan(model, cluster, batch, constraints=constraints, cache=False)


def test_axes_are_joined_where_that_is_faster() -> None:
    """Data parallelism over two axes is that over one of all devices, and no slower."""
    free = _planned((4, 8))
    pinned = _planned((4, 8), {"data": 32, "zero": 0})
    assert pinned.mesh_shape == (32,)
    assert free.solver.objective <= pinned.solver.objective * (1 + 1e-3)


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ((8,), [(8,)]),
        ((4, 2), [(4, 2), (8,)]),
        ((1, 8), [(1, 8)]),
        ((2, 2, 2), [(2, 2, 2), (8,), (4, 2), (2, 4)]),
    ],
)
def test_meshes_with_joined_axes(shape: tuple[int, ...], wanted: list[tuple[int, ...]]) -> None:
    cluster = Cluster.from_profile("h100-sxm", devices_per_node=8, mesh_shape=shape)
    found = meshes(cluster, Constraints())
    assert [c.mesh_shape for c in found] == wanted
    assert all(len(c.axis_names) == len(c.mesh_shape) for c in found)


@pytest.mark.parametrize("pins", [{"data": 2}, {"params": {"*": ["R", "R"]}}, {"zero": 1}])
def test_pinned_axes_stay(pins: dict[str, Any]) -> None:
    cluster = Cluster.from_profile("h100-sxm", devices_per_node=8, mesh_shape=(4, 2))
    assert meshes(cluster, Constraints.parse(pins)) == [cluster]


def test_collectives_over_two_axes_hide() -> None:
    """Each of a chain has work to run beside: gathers before, reductions behind another one."""
    with torch.device("meta"):
        model = nn.Sequential(*(Product(2048).up for _ in range(6)))
        batch = (torch.empty(1 << 15, 2048), torch.empty(1 << 15, 2048))
    cluster = Cluster.from_profile("h100-sxm", nodes=4, devices_per_node=8, mesh_shape=(4, 8))
    traced = trace(model, batch, loss_fn=nn.functional.mse_loss)
    plan = solve(traced, cluster, constraints=Constraints.parse({"params": {"*": ["S0/8", "S0"]}}))
    exposed = {}
    for passes in (["prefetch", "early", "late"], []):
        program = written(traced, plan, [0, 0]).program(passes, {})
        found = simulate(program.joint.graph, cluster)
        exposed[bool(passes)] = sum(found.exposed_s) / sum(found.comm_s)
        if passes:
            _check_chains(program.joint.graph)
    assert exposed[False] > 0.99
    assert exposed[True] < 0.5


def test_what_waits_for_a_late_bucket_holds_nothing_else_back() -> None:
    """Biases share a bucket at the end of the backward; weights are summed over nodes before."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(6)))
        batch = (torch.empty(1 << 15, 2048), torch.empty(1 << 15, 2048))
    cluster = Cluster.from_profile("h100-sxm", nodes=4, devices_per_node=8, mesh_shape=(4, 8))
    traced = trace(model, batch, loss_fn=nn.functional.mse_loss)
    plan = solve(traced, cluster, constraints=Constraints.parse({"params": {"*": ["R", "S0"]}}))
    sizes = {(1, "reduce_scatter"): 1 << 20, (0, "all_reduce"): 3 << 20}
    graph = written(traced, plan, [0, 0]).program(None, {}, sizes=sizes).joint.graph
    products = (n for n in reversed(list(graph.nodes)) if "einsum" in str(n.target))
    last = next(products)
    sums = {}
    for node in graph.nodes:
        if node.meta.get("phase") == "backward" and is_start(node):
            kind, axis, _, _ = node.meta["collective"]
            members = node.meta.get("members", ((node.meta["origin"], 0),))
            sums[axis, kind, tuple(sorted(origin for origin, _ in members))] = node < last
    biases = ("view", *(f"view_{i}" for i in range(1, 6)))
    weights = [f"gradient of {i}.weight" for i in range(6)]
    assert sums[1, "reduce_scatter", biases]  # in front of one product, that of the first layer
    across = {names: early for (axis, _, names), early in sums.items() if axis == 0}
    assert across == {
        (weights[4], weights[5]): True,
        (weights[2], weights[3]): True,
        tuple(sorted((*biases, *weights[:2]))): False,
    }


def _check_chains(graph: fx.Graph) -> None:
    starts = [node for node in graph.nodes if is_start(node)]
    chained = 0
    for node in starts:
        (first,) = [s for n in link(node) for s in n.all_input_nodes if is_start(s)] or [None]
        if first is not None and node.meta["phase"] == "backward":
            chained += 1
            assert starts.index(node) > starts.index(first) + 1 or first in starts[-2:]
    assert chained == 6


def test_no_other_kind_is_searched_once_a_plan_is_below_the_best_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster, wanted = on_host(2, None), Constraints()
    traced, roles = deep(), assign_mesh(wanted, cluster.mesh_shape)
    note_places(traced)
    planned = with_roles(cluster, roles)
    free = solve(traced, cluster, constraints=wanted, memory_limit=1 << 40)
    made: list[Checkpoint] = []
    make = Variants.make

    def noted(self: Variants, weights: Weights, held: object, kind: Checkpoint) -> Variant:
        made.append(kind)
        return make(self, weights, held, kind)

    monkeypatch.setattr(Variants, "make", noted)
    limit = int(0.9 * free.predicted.peak_memory_bytes)

    def search() -> SumSearch:
        offers = Offers(planned)
        return SumSearch(
            Variants(
                traced=traced, offers=offers, wanted=wanted, roles=roles, limit=limit, ports=None,
                known={},
            ),
            "adamw", None, None,
        )  # fmt: skip

    whole = search()(ALL)
    assert made[:3] == ["none", "selective", "full"] and whole.bound <= whole.variant.seconds
    made.clear()
    found = search()(ALL, 2 * whole.variant.seconds)
    assert made == ["none", "selective"] and found.bound <= found.variant.seconds


def test_plain_data_parallelism_is_looked_at_also_for_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its program may be faster by less than what the search tells apart."""
    whole = _two_products(mesh_shape=(8,))
    free = whole.plan(UNLIMITED)
    close_s = free.solver.bound * 1.005

    def seconds(plan: Plan) -> float:
        return close_s * (0.998 if plan.constraints.get("zero") == 1 else 1.0)

    def planned(self: OnePiece, *given: Any, **more: Any) -> Plan:
        return replace(free, constraints=self.constraints.to_dict())

    _programs_take(monkeypatch, seconds)
    monkeypatch.setattr(OnePiece, "plan", planned)
    found = whole.best(UNLIMITED, free)
    assert found.predicted.step_time_s == pytest.approx(0.998 * close_s)
    assert found.solver.bound == free.solver.bound
    assert found.constraints == whole.constraints.to_dict()


def test_plain_data_parallelism_is_looked_for_as_far_as_it_may_help(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A search gives up what is below by less than `CLOSE`."""
    whole = _two_products(mesh_shape=(8,))
    free = whole.plan(UNLIMITED)
    now_s = free.solver.bound * 1.005
    asked: list[float] = []

    def planned(self: OnePiece, limit: int, exposed: float, below_s: float, **more: Any) -> Plan:
        asked.append(below_s)
        raise NotBelow(0.0)

    _programs_take(monkeypatch, lambda plan: now_s)
    monkeypatch.setattr(OnePiece, "plan", planned)
    monkeypatch.setattr("autopar.search.one_piece.unseen_s", lambda plan, program: 0.02 * now_s)
    whole.best(UNLIMITED, free)
    assert asked == pytest.approx([0.99 * now_s / (1 - CLOSE)] * 3)


@pytest.mark.parametrize("share", [2.0, 1.0])
def test_where_no_limit_binds_others_are_planned_without_it(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is recomputed there; what does not fit so is planned again within the limit."""
    whole = _two_products(mesh_shape=(8,))
    free = whole.plan(UNLIMITED)
    limit = round(share * free.predicted.peak_memory_bytes)
    limits: set[int] = set()

    class Recorded(StepSearch):
        def __init__(self, *given: Any, **more: Any) -> None:
            super().__init__(*given, **more)
            limits.add(self.limit)

    monkeypatch.setattr("autopar.search.mesh_searches.StepSearch", Recorded)
    monkeypatch.setattr(OnePiece, "_hidden", lambda self, plan: 0.5)
    plan = whole.best(limit, replace(free, memory_limit_bytes=limit))
    assert plan.memory_limit_bytes == limit
    assert plan.predicted.peak_memory_bytes <= limit
    # plain data parallelism holds all parameters on every device
    assert limits == ({UNLIMITED} if share > 1.0 else {UNLIMITED, limit})


def test_a_sum_that_does_not_rise_is_greatest_where_it_begins() -> None:
    """The same plan from both ends: its line crosses itself nowhere."""
    falling = (2.0, -1.0)
    assert _next(falling, falling, 0.5, in_steps=True) == 0.0
    assert _next(None, falling, 0.5, in_steps=True) == 0.0
    assert _next((1.0, 1.0), falling, 0.5, in_steps=True) == 0.5
    assert _next((1.0, 1.0), None, 0.0, in_steps=False) == _LAST
    # under a limit, sums that count next to no compute are not searched on the way up
    steps = [(0.0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 0.75), (0.9, 0.9)]
    for last, then in steps:
        assert _next((1.0, 1.0), None, last, in_steps=True) == then


def test_what_a_glance_proves_too_slow_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _two_products(mesh_shape=(8,))
    limit = whole.plan(UNLIMITED).predicted.peak_memory_bytes - 1
    given: dict[str, Any] = {"memory_limit": limit, "offers": whole.offers}
    best_s = StepSearch(whole.traced, whole.cluster, **given).run().plan.solver.bound
    search = StepSearch(whole.traced, whole.cluster, **given)
    with pytest.raises(NotBelow) as glanced:
        search.glance(0.1 * best_s)
    assert 0.1 * best_s <= glanced.value.bound <= best_s

    def asked(*given: Any) -> Least:
        raise AssertionError("a search that a glance has ended is begun anew")

    with monkeypatch.context() as patched:
        patched.setattr("autopar.solver.solve.least", asked)
        with pytest.raises(NotBelow) as searched:
            search.run(0.1 * best_s)
    assert searched.value.bound == glanced.value.bound
    assert search.run(2 * best_s).plan.solver.objective < 2 * best_s  # what it says no more of


def test_the_fastest_program_of_those_looked_at_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan that counts least may hide less than one that was simulated on the way to it."""
    whole = _two_products(mesh_shape=(8,))
    first = whole.plan(UNLIMITED)
    pinned = replace(whole, constraints=Constraints(data=8, zero=0), free_s={}, begun={})
    soon = pinned.plan(UNLIMITED)

    def known(plan: Plan, step_s: float, peak: int = 1) -> tuple[Plan, Plan]:
        told = replace(plan.predicted, step_time_s=step_s, peak_memory_bytes=peak)
        return plan, replace(plan, predicted=told)

    first_s = 2 * first.solver.bound
    whole.programs.extend([known(first, first_s), known(soon, 0.9 * first.solver.bound)])
    monkeypatch.setattr(OnePiece, "_hidden", lambda self, plan: 1.0)
    found = whole.best(UNLIMITED, first)
    assert found.predicted.step_time_s == 0.9 * first.solver.bound
    assert found.parameters == soon.parameters != first.parameters
    assert found.constraints == whole.constraints.to_dict()
    assert found.solver.bound == first.solver.bound
    # but for what is too large
    whole.programs[1] = known(soon, 0.9 * first.solver.bound, peak=1 << 50)
    assert whole._fastest(whole.programs[0][1], 1 << 40).parameters == first.parameters
    # and of two that are as fast the one that counts less
    whole.programs[:] = [known(first, 1.002 * first_s), known(soon, first_s)]
    assert first.solver.objective < soon.solver.objective
    assert whole._fastest(whole.programs[0][1], 1 << 40).parameters == first.parameters
    whole.programs[:] = [known(first, 1.01 * first_s), known(soon, first_s)]
    assert whole._fastest(whole.programs[0][1], 1 << 40).parameters == soon.parameters
