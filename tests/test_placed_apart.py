"""Equal blocks that are placed in different ways: some as in one plan, the others as in another."""

from __future__ import annotations

import copy
import itertools
import json
import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.core.block_kinds import (
    RECOMPUTATIONS,
    as_checkpoint,
    kinds_of,
    labels_of,
    moved_checkpoint,
    sections_of,
)
from autopar.core.blocks import Block, Blocks
from autopar.core.constraints import Constraints
from autopar.core.folding import unfolded
from autopar.core.graph import TracedModel
from autopar.core.plan import Plan
from autopar.core.recompute import recomputed
from autopar.cost_model import Cluster
from autopar.explanation import explain
from autopar.solver.fit import UNLIMITED
from autopar.solver.hiding_mixture import between
from autopar.solver.mixer import Mixer, Point
from autopar.solver.mixture import free_blocks
from autopar.solver.overlap import ALL, EXPOSED, Found, counted_seconds, weights_at
from autopar.solver.solve import StepSearch, solve
from autopar.solver.sums import SumSearch
from autopar.solver.variant import Variant
from autopar.tracer.trace import trace
from benchmarks.planner_rows import ROWS
from tests.dist import run_ranks
from tests.folding import cluster
from tests.test_folding import TEXT, gemma, gpt2, llama

MODELS = {"gpt2": gpt2, "llama": llama, "gemma": gemma}


# --- what a plan says ----------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(20))
def test_a_plan_says_where_sections_begin(seed: int) -> None:
    rng = random.Random(seed)
    blocks = [Block(c, n) for c in ("a.layers", "b") for n in range(rng.randrange(1, 9))]
    kinds = {block: rng.choice(RECOMPUTATIONS[:2]) for block in blocks}
    sections = {block: rng.randrange(2) for block in blocks}
    said = json.loads(json.dumps(as_checkpoint(kinds, sections)))
    assert kinds_of(said, blocks) == kinds
    starts = set(sections_of(said))
    for before, block in itertools.pairwise(blocks):
        follows = before.container == block.container and kinds[before] == kinds[block]
        assert (block in starts) == (follows and sections[before] != sections[block])
    moved = set(sections_of(moved_checkpoint(said, "b", 7)))
    assert moved == {Block(c, n + 7 * (c == "b")) for c, n in starts}
    assert sections_of(as_checkpoint(kinds)) == ()


def test_each_section_has_a_stand_in_and_choices_of_its_own() -> None:
    folded = trace(llama(24), TEXT, training=True, fold=True)
    said = {"model.layers.0-9": "none", "model.layers.10-23": "none"}
    graph = recomputed(folded, said)
    assert [(r.first, r.times) for r in graph.repeats] == [(2, 7), (11, 12)]
    apart, alike = Blocks(graph), Blocks(recomputed(folded, "none"))
    classes: list[set[str]] = [set(), set()]
    for block, (_, section) in labels_of(said, apart.members).items():
        classes[section] |= {apart.classes[node.name] for node in apart.members[block]}
    assert classes[0].isdisjoint(classes[1])
    assert len(set(alike.classes.values())) < len(set(apart.classes.values()))


@pytest.mark.parametrize("name", ["llama", pytest.param("gemma", marks=pytest.mark.slow)])
def test_a_folded_graph_in_sections_costs_what_the_whole_one_does(name: str) -> None:
    folded, whole = (trace(MODELS[name](12), TEXT, training=True, fold=fold) for fold in (1, 0))
    container = Blocks(whole).every()[0].container
    said = {f"{container}.0-5": "none", f"{container}.6-11": "none"}
    pins = Constraints(checkpoint=said)
    short, long = (solve(t, cluster(2, 4), constraints=pins) for t in (folded, whole))
    assert short.checkpoint == long.checkpoint == said
    assert short.predicted.step_time_s == pytest.approx(long.predicted.step_time_s, rel=1e-9)
    assert short.predicted.peak_memory_bytes == long.predicted.peak_memory_bytes
    assert set(unfolded(short, folded, whole).nodes) == set(long.nodes)
    # more is left to choose than where all blocks are placed alike
    assert long.solver.objective <= solve(whole, cluster(2, 4)).solver.objective * (1 + 1e-9)


# --- mixtures of two plans -----------------------------------------------------------------------
class Mixed:
    """Plans of a step on two devices with blocks as in plans of different pins."""

    def __init__(self, traced: TracedModel, *pins: dict[str, Any]) -> None:
        self.traced = traced
        self.cluster = cluster(2)
        self.searches = [self._search(Constraints.parse(wanted)) for wanted in ({}, *pins)]
        self.variants = [self._started(search) for search in self.searches[1:]]
        self.free = free_blocks(traced, None)
        cheap, strong = (Point.of(variant, self.free[-1]) for variant in self.variants)
        given = self.searches[0].search.variants
        self.mixer = Mixer(cheap, strong, self.free, partial(given.make, ALL, "adamw"))

    def _search(self, wanted: Constraints) -> StepSearch:
        return StepSearch(self.traced, self.cluster, constraints=wanted, memory_limit=UNLIMITED)

    def _started(self, search: StepSearch) -> Variant:
        variant = search.search.variants.make(ALL, "adamw", "none")
        variant.search.start(float("inf"), 0.0)
        return variant

    def plan(self, number: int) -> Plan:
        found = self.mixer.priced(number, self.mixer.both())
        assert found is not None
        found.variant.search.memory.best = found.fit
        return self.searches[0]._as_plan(found.variant, 0.0)


TENSOR = {"tensor": {"mode": "1d", "size": 2}}
SHARDED = {"data": 2, "zero": 3}


@pytest.mark.parametrize("fold", [True, False], ids=["folded", "whole"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_gradients_are_those_of_the_module(name: str, fold: bool) -> None:
    torch.manual_seed(0)
    model = MODELS[name](6).double().train()
    mixed = Mixed(trace(model, TEXT, fold=fold), TENSOR, SHARDED)
    number = len(mixed.free) // 2 + 1
    plan = mixed.plan(number)
    assert len(sections_of(plan.checkpoint)) == 1
    # blocks of the same container are placed as in the two plans
    container = mixed.free[number].container
    layouts = [
        {n.split(".", len(container.split(".")) + 1)[-1]: x for n, x in plan.parameters.items()
         if n.startswith(f"{container}.{mixed.free[i].number}.")}
        for i in (number - 1, number)
    ]  # fmt: skip
    assert layouts[0].keys() == layouts[1].keys()
    assert layouts[0] != layouts[1]
    found = autopar.verify(Plan.from_dict(plan.to_dict()), model, TEXT)
    assert len(found.gradients) == sum(p.requires_grad for p in model.parameters())
    assert found.worst[1] < 1e-6  # some losses compute in float32


def test_a_choice_in_a_section_is_explained() -> None:
    model = llama(6)
    mixed = Mixed(trace(model, TEXT, fold=True), TENSOR, SHARDED)
    plan = mixed.plan(3)
    for number in range(6):
        name = f"model.layers.{number}.mlp.up_proj.weight"
        found = explain(plan, param=name)
        blocks = [
            Block("model.layers", int(found.name.split(".")[2])),
            Block("model.layers", number),
        ]
        assert len(set(labels_of(plan.checkpoint, blocks).values())) == 1
    name = next(n for n in plan.nodes if "_period" in n and "einsum" in n)
    again = explain(plan, node=name, model=model, example_inputs=TEXT)
    assert again.runner_up is not None
    assert again.runner_up.plan is not None
    assert again.runner_up.plan.checkpoint == plan.checkpoint


# --- the search ----------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def large_vit() -> tuple[TracedModel, Cluster]:
    """A step of which more travels than is computed, unless its tensors are split."""
    row = ROWS["vit-22b@8"]
    with torch.device("meta"):
        model = row.build().to(row.dtype).train()
    inputs = {k: v.to(row.dtype) if v.is_floating_point() else v for k, v in row.inputs().items()}
    return trace(model, inputs, fold=True), Cluster.from_profile(row.profile, devices_per_node=8)


def test_a_mixture_hides_what_no_plan_alone_does(
    large_vit: tuple[TracedModel, Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    traced, devices = large_vit
    asked: list[tuple[Variant, Variant, float]] = []
    mixed = SumSearch.mixed

    def noted(search: SumSearch, waiting: Found, hidden: Found, *given: float) -> Found | None:
        asked.append((waiting.variant, hidden.variant, given[0]))
        return mixed(search, waiting, hidden, *given)

    monkeypatch.setattr(SumSearch, "mixed", noted)
    search = StepSearch(traced, devices, memory_limit=UNLIMITED)
    plan = search.run().plan
    ((waiting, hidden, t),) = asked
    (start,) = sections_of(plan.checkpoint)
    assert set(dict(plan.checkpoint).values()) == {"none"}
    alone = []
    for variant in (waiting, hidden):
        assert variant.search.memory.best is not None
        alone.append(counted_seconds(variant.search.memory.best.price, EXPOSED))
    assert plan.solver.objective < 0.95 * min(alone)
    assert plan.solver.bound <= plan.solver.objective <= 1.01 * plan.solver.bound
    # no other number of blocks is better
    make = partial(search.search.variants.make, weights_at(t, EXPOSED), "adamw")
    free = free_blocks(traced, None)
    cheap, strong = (Point.of(variant, free[-1]) for variant in (waiting, hidden))
    mixer = Mixer(cheap, strong, free, make)
    for number in {1, start[1] - 1, start[1] + 1, start[1] + 2, 30, len(free) - 1}:
        other = mixer.priced(number, mixer.both())
        assert other is not None
        assert counted_seconds(other.fit.price, EXPOSED) >= plan.solver.objective * (1 - 1e-9)


def test_there_is_no_mixture_of_plans_on_one_side(large_vit: tuple[TracedModel, Cluster]) -> None:
    traced, devices = large_vit
    search = StepSearch(traced, devices, memory_limit=UNLIMITED)
    found = [search.search(weights_at(t, EXPOSED)).variant for t in (0.0, 0.99)]
    free, make = free_blocks(traced, None), partial(search.search.variants.make, ALL, "adamw")
    assert between(*found, free, make, EXPOSED) is not None
    assert between(*reversed(found), free, make, EXPOSED) is None
    assert between(found[0], found[0], free, make, EXPOSED) is None
    assert between(*found, free[:1], make, EXPOSED) is None


def test_a_choice_of_the_user_keeps_blocks_alike(large_vit: tuple[TracedModel, Cluster]) -> None:
    pins = Constraints.parse({"checkpoint": {"vit.layers.*": "none"}})
    plan = StepSearch(*large_vit, constraints=pins, memory_limit=UNLIMITED).run().plan
    assert plan.checkpoint == "none"


class Added(nn.Module):
    """One matrix, which is split over the devices or is not."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).tanh()


class Stack(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Added(width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_a_limit_between_two_placements_gives_a_mixture(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model, inputs = Stack(40, 2048).double().train(), {"x": torch.empty(64, 2048).double()}
    traced = trace(model, inputs, fold=True)

    def planned(limit: int = UNLIMITED, **pins: Any) -> Plan:
        wanted = Constraints.parse({"data": 2, "checkpoint": "none", **pins})
        return solve(traced, cluster(2), constraints=wanted, memory_limit=limit)

    free, least = planned(), planned(zero=3)
    limit = (free.predicted.peak_memory_bytes + least.predicted.peak_memory_bytes) // 2
    plan = planned(limit)
    assert plan.predicted.peak_memory_bytes <= limit
    assert set(dict(plan.checkpoint).values()) == {"none"}
    assert len(sections_of(plan.checkpoint)) == 1
    assert plan.solver.bound <= plan.solver.objective
    again = planned(limit)
    assert (again.nodes, again.checkpoint) == (plan.nodes, plan.checkpoint)
    monkeypatch.setattr("autopar.solver.sums.mixtures", lambda *given: [])
    alike = planned(limit)
    assert alike.checkpoint == "none"
    assert free.solver.objective < plan.solver.objective < 0.9 * alike.solver.objective


class Stacks(nn.Module):
    """Two lists of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (Stack(2, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first: torch.Tensor = self.first(x)
        return first + self.second(x * 2)


def test_a_mixture_that_begins_with_a_list_is_a_search_of_its_own() -> None:
    torch.manual_seed(0)
    model, inputs = Stacks().double(), {"x": torch.randn(4, 8).double()}
    search = StepSearch(trace(model, inputs), cluster(2), memory_limit=UNLIMITED)
    make = partial(search.search.variants.make, ALL, "adamw")
    plain, free = make("none"), free_blocks(search.search.variants.traced, None)
    plain.search.start(float("inf"), 0.0)
    point = Point.of(plain, free[-1])
    mixer = Mixer(point, point, free, make)
    found = mixer.priced(2, mixer.both())
    assert found is not None
    assert found.variant is not plain
    assert plain.search.memory.best is not None  # it is one of the plans that are mixed
    found.variant.search.memory.best = found.fit
    plan = search._as_plan(found.variant, 0.0)
    assert sections_of(plan.checkpoint) == ()
    assert autopar.verify(Plan.from_dict(plan.to_dict()), model, inputs).worst[1] < 1e-9


def errors(rank: int, plan: dict[str, Any]) -> dict[str, float]:
    """Of the gradients of a rank's parameters, against those of one process."""
    torch.manual_seed(0)
    model = llama(6).double().train()
    single = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    parallel = autopar.parallelize(model, mesh, TEXT, plan=Plan.from_dict(plan))
    parallel.train_step(**TEXT)
    single(**TEXT).loss.backward()
    found = {}
    for (name, parameter), other in zip(
        parallel.named_parameters(), single.parameters(), strict=True
    ):
        assert parameter.grad is not None
        assert other.grad is not None
        whole = parameter.grad.full_tensor()
        found[name] = float((whole - other.grad).norm() / other.grad.norm())
    return found


@pytest.mark.slow
def test_gradients_on_real_ranks() -> None:
    torch.manual_seed(0)
    model = llama(6).double().train()
    plan = Mixed(trace(model, TEXT, fold=True), TENSOR, SHARDED).plan(3)
    for found in run_ranks(errors, 2, plan.to_dict()):
        assert found.keys() == dict(model.named_parameters()).keys()
        assert max(found.values()) < 1e-6  # its loss computes in float32
